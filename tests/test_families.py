"""A family of models is one record: a made-up one loads and writes like those that exist."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.formats.convert import convert, prompt_logits
from shardwise.formats.families import FAMILIES, LLAMA, Family
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.gguf.gguf_reader import read_tensor
from shardwise.formats.gguf.write_gguf import write_gguf
from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.write_folder import write_folder
from shardwise.formats.model_source import read_config
from shardwise.layout import Layout
from shardwise.params import model_specs
from tiny_models import tiny_model
from whole_weights import load_weights

CLONE = replace(
    LLAMA,
    model_type="alpaca",
    transformers_class="AlpacaForCausalLM",
    gguf_architecture="alpaca",
    folder=replace(LLAMA.folder, stems={**LLAMA.folder.stems, "head": "output_head"}),
    mlp_bias="feed_forward_bias",
)


@pytest.fixture
def clone(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES, CLONE.model_type, CLONE)
    return CLONE


def test_a_family_with_the_same_math_is_one_record(clone: Family, tmp_path: Path) -> None:
    tiny_model("llama-biases").save_pretrained(tmp_path / "llama")
    config = read_config(tmp_path / "llama")
    specs = model_specs(config)
    layout = Layout()
    weights = load_weights(
        tmp_path / "llama", config, specs, layout, layout.coord(0), torch.float32
    )
    config = replace(config, family=clone.model_type)
    tensors = list(weights.items())
    write_folder(tmp_path / "folder", config, specs, tensors, torch.bfloat16)
    write_gguf(tmp_path / "model.gguf", config, tensors, "BF16", torch.bfloat16, {})

    raw = read_config_json(tmp_path / "folder")
    assert (raw["model_type"], raw["architectures"]) == ("alpaca", ["AlpacaForCausalLM"])
    assert raw["feed_forward_bias"] and "mlp_bias" not in raw
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata["general.architecture"] == "alpaca"
    assert not torch.equal(
        read_tensor(file, "blk.0.attn_q.weight"), weights["blocks.0.qkv"][: config.q_size]
    )  # the order of llama.cpp
    expected = prompt_logits(tmp_path / "llama", read_config(tmp_path / "llama"), torch.bfloat16)
    for path in (tmp_path / "folder", tmp_path / "model.gguf"):
        assert read_config(path).family == "alpaca"
        assert torch.equal(prompt_logits(path, read_config(path), torch.bfloat16), expected)
    convert(tmp_path / "folder", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "folder" / "model.safetensors"
    ).read_bytes()


def test_only_the_records_and_the_catalogue_name_families() -> None:
    """All other code uses the record; GGUF's names of tokenizers are not names of families."""
    package = Path("src/shardwise")
    tokenizers = {"formats/gguf/gguf_tokenizer.py", "formats/tokenizers/pre_tokenizers.py"}
    allowed = {"formats/families.py", "formats/catalogue.py", *tokenizers}
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if str(path.relative_to(package)) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(f'"{name}"' in line for name in FAMILIES)
    ]
    assert not found
