"""Conversion ends in a folder whose logits transformers agrees with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.formats import convert as conversion
from shardwise.formats.convert import compare_models, convert, prompt_logits
from shardwise.formats.huggingface.hf_config import from_hugging_face, to_hugging_face
from shardwise.formats.model_source import read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.params import model_specs, num_params
from smollm2 import smollm2_gguf
from tiny_models import MODELS, tiny_model

TOLERANCE = 1e-4  # of the largest logit, in fp32


def saved(path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    tiny_model(name, dtype, **changes).save_pretrained(path)
    return path


@torch.no_grad()
def their_logits(path: Path) -> Tensor:
    """Logits of transformers in fp32 for the random prompt of `convert`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    num_tokens = min(32, model.config.max_position_embeddings)
    tokens = torch.randint(
        model.config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0)
    )
    return model(tokens).logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_keeps_its_logits(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "old", name)
    converted = convert(source, tmp_path / "new")
    assert converted.checked_logits == 0.0
    assert (
        converted.params
        == num_params(model_specs(read_config(source)))
        == tiny_model(name).num_parameters()
    )
    assert set(converted.files) >= {"config.json", "model.safetensors"}
    assert read_config(tmp_path / "new") == read_config(source)
    assert torch.equal(their_logits(tmp_path / "new"), their_logits(source))
    assert_close(
        prompt_logits(tmp_path / "new", read_config(source), torch.float32), their_logits(source)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrower_dtype_is_compared_with_the_source_rounded_alike(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    source = saved(tmp_path / "old", "qwen2")
    assert convert(source, tmp_path / "new", dtype).checked_logits == 0.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").dtype == dtype
    assert_close(prompt_logits(source, read_config(source), dtype), their_logits(tmp_path / "new"))


def test_the_dtype_of_the_source_is_kept(tmp_path: Path) -> None:
    source = saved(tmp_path / "old", "llama", torch.bfloat16)
    convert(source, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").dtype == torch.bfloat16
    )


def test_tokenizer_files_of_a_folder_are_copied_as_they_are(tmp_path: Path) -> None:
    source = saved(tmp_path / "old", "llama", vocab_size=300)
    byte_tokenizer().save(source)
    (source / "special_tokens_map.json").write_text('{"eos_token":   "<|endoftext|>"}')
    files = convert(source, tmp_path / "new").files
    for file in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ):
        assert (
            file in files and (tmp_path / "new" / file).read_bytes() == (source / file).read_bytes()
        )
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == 256


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    convert(
        saved(tmp_path / "old", "gpt2"),
        tmp_path / "new",
        progress=lambda what, done: seen.append((what, done)),
    )
    writing = [done for what, done in seen if what == "writing"]
    assert writing == sorted(writing) and writing[-1] == 1.0 and seen[-1] == ("checking", 1.0)


def test_real_model_from_gguf(tmp_path: Path) -> None:
    path = smollm2_gguf()
    new = tmp_path / "new"
    converted = convert(path, new)
    assert converted.checked_logits == 0.0 and converted.params == 134_515_008
    assert_close(prompt_logits(path, read_config(path), torch.bfloat16), their_logits(new))
    tokenizer = AutoTokenizer.from_pretrained(new)
    text = "Gravity is a force, isn't it? \N{SNOWMAN} 1234"
    assert tokenizer(text)["input_ids"] == load_tokenizer(path).encode(text)
    assert tokenizer.chat_template == load_tokenizer(path).chat_template


# What is refused


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_different_models_do_not_compare_equal(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", "llama")
    second = saved(tmp_path / "b", "llama-biases")
    assert "logits differ by" in refusal(
        lambda: compare_models(first, second, torch.float32, lambda *_: None)
    )
    assert compare_models(first, first, torch.float32, lambda *_: None) == 0.0


def test_a_folder_that_computes_something_else_does_not_stay(tmp_path: Path, monkeypatch) -> None:
    source = saved(tmp_path / "old", "llama")
    original = conversion.full_tensors

    def with_one_weight_off(*args: Any) -> Any:
        for name, tensor in original(*args):
            yield name, tensor * 1.01 if name == "blocks.1.down" else tensor

    monkeypatch.setattr(conversion, "full_tensors", with_one_weight_off)
    assert "does not compute the same" in refusal(lambda: convert(source, tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_weights_that_are_not_numbers_do_not_pass(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path / "old")
    assert "logits differ by nan" in refusal(lambda: convert(tmp_path / "old", tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "old", "llama")
    byte_tokenizer().save(source)
    assert "the tokenizer has ids up to 256" in refusal(lambda: convert(source, tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "old", "llama")
    assert "already exists" in refusal(lambda: convert(source, source))
    assert "does not exist" in refusal(lambda: convert(tmp_path / "none", tmp_path / "new"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    message = refusal(lambda: convert(source, tmp_path / "new"))
    assert "unknown architecture 'mamba'; known are llama, mistral, qwen2, qwen3, gpt2" in message
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("name", MODELS)
def test_configs_survive_the_way_there_and_back(name: str) -> None:
    config = from_hugging_face(tiny_model(name).config.to_dict())
    assert from_hugging_face(to_hugging_face(config)) == config
