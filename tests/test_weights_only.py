"""Models of unknown architectures are planned by the size of their weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardwise.cli import main
from shardwise.formats.stored_sizes import stored_sizes
from smollm2 import smollm2_gguf

CONFIG = {"model_type": "mixtral", "torch_dtype": "bfloat16"}
TENSORS = {
    "a": torch.zeros(300, 200, dtype=torch.bfloat16),
    "b": torch.zeros(1000, dtype=torch.float32),
    "c": torch.zeros(64, dtype=torch.int8),
}


def folder_with(tmp_path: Path, weights: bool = True) -> Path:
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if weights:
        save_file(TENSORS, folder / "model.safetensors")
    return folder


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, object]]:
    code = main(["plan", *map(str, words), "--json"])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return code, answer


def test_sizes_are_those_of_the_tensors(tmp_path: Path) -> None:
    sizes = stored_sizes(folder_with(tmp_path))
    assert sizes.params == sum(each.numel() for each in TENSORS.values())
    assert dict(sizes.bytes_by_dtype) == {"BF16": 120_000, "F32": 4000, "I8": 64}
    assert sizes.num_bytes == sum(each.nbytes for each in TENSORS.values())


def test_sizes_of_a_gguf_file_are_those_of_its_tensors() -> None:
    reader = gguf.GGUFReader(smollm2_gguf())
    sizes = stored_sizes(smollm2_gguf())
    assert sizes.num_bytes == sum(int(each.n_bytes) for each in reader.tensors)
    assert sizes.params == sum(int(each.n_elements) for each in reader.tensors)


def test_an_index_is_enough(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, weights=False)
    index = {"metadata": {"total_size": 93_400_000_000}, "weight_map": {"a": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = stored_sizes(folder)
    assert (sizes.params, sizes.num_bytes) == (46_700_000_000, 93_400_000_000)


def test_the_answer_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, weights=False)
    index = {"metadata": {"total_size": 93_400_000_000}, "weight_map": {"a": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    words = (folder, "--gpu", "h100-80gb", "--gpus", 8)
    code, answer = planned(capsys, *words)
    assert code == 1 and answer["weights_only"] and "KV cache" in str(answer["missing"])
    train, serve = answer["train"], answer["serve"]
    assert isinstance(train, dict) and isinstance(serve, dict)
    assert train["total_bytes"] == 16 * 46_700_000_000 and not train["fits"]
    assert serve["per_gpu_bytes"] == 93_400_000_000 // 8 and serve["fits"]
    assert planned(capsys, *words, "--mode", "serve")[0] == 0
    assert planned(capsys, folder, "--gpu", "h100", "--gpus", serve["least_gpus"])[0] == 1
    assert main(["plan", *map(str, words)]) == 1
    text = capsys.readouterr().out
    assert "46.7 billion parameters, 93.4 GB as stored" in text
    assert "unknown architecture 'mixtral'; known are llama" in text
    assert "Serving: 93.4 GB of weights as stored; 11.7 GB on each of 8 x h100-80gb" in text


def test_a_gguf_file_of_an_unknown_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tensor("a.weight", np.zeros((64, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, answer = planned(capsys, file, "--gpu", "l4")
    assert code == 0 and answer["stored_bytes"] == {"F16": 4096}
    assert "unknown architecture 'mamba'" in str(answer["reason"])


def test_without_weights_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, weights=False)
    assert main(["plan", str(folder), "--gpu", "l4"]) == 2
    said = capsys.readouterr().err
    assert "unknown architecture 'mixtral'" in said and "has no weights" in said
    (folder / "model.safetensors.index.json").write_text("{}")
    assert main(["plan", str(folder), "--gpu", "l4"]) == 2
    assert "is not an index of weights" in capsys.readouterr().err
