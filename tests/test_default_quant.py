"""`--quant auto`: stored codes are kept where kernels multiply by them, in the loader, the planner
and the words of the start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.formats.catalogue import CATALOGUE, FoundModel
from shardwise.formats.model_source import read_config
from shardwise.formats.storage_formats import choose_formats, stored_formats
from shardwise.hardware import find_device
from shardwise.kernels import description
from shardwise.kernels.description import describe_kernels
from shardwise.layout import Layout
from shardwise.params import model_specs
from shardwise.plan import plan
from shardwise.plan import planner as planner_module
from shardwise.quant.format import quantize
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.scheme import (
    COMMON,
    Scheme,
    StorageFormat,
    StorageFormats,
    can_stay_quantized,
    ggml_format,
    has_product,
)
from shardwise.quant.weight import QuantizedWeight
from shardwise.serve.engine.startup_report import describe_weights
from shardwise.serve.engine_client import Ready
from smollm2 import smollm2_gguf

CONFIG = CATALOGUE["smollm2-135m"]
ONE = Layout()


def formats_of(kinds: dict[str, str]) -> StorageFormats:
    """Return a format for each part of the model's matrices: `kinds` by part or parameter, with a
    default under ""."""
    found = {}
    for spec in model_specs(CONFIG):
        if can_stay_quantized(spec):
            for part in spec.all_parts:
                kind = kinds.get(part.name, kinds.get(spec.name, kinds[""]))
                format = ggml_format(kind)
                assert format is not None
                found[spec.name, part.name] = format
    return found


def chosen(
    stored: StorageFormats, quant: str = "auto", multiplies_codes: bool = True
) -> StorageFormats:
    return choose_formats(stored, Path("m.gguf"), CONFIG, ONE, quant, multiplies_codes)


@pytest.mark.parametrize("name", COMMON)
def test_formats_with_a_product_are_those_of_the_kernels(name: str) -> None:
    """The kernels decide the same for a matrix in memory (`QuantizedWeight.integers`)."""
    scheme = Scheme.parse(name)
    matrix = QuantizedWeight((quantize(torch.randn(4, 384), scheme),))
    assert has_product(scheme.storage_format()) == (matrix.integers(32) is not None)


def test_three_types_of_gguf_have_products() -> None:
    formats = {kind: ggml_format(kind) for kind in BLOCKS}
    have = {kind for kind, format in formats.items() if format is not None and has_product(format)}
    assert have == {"Q8_0", "Q4_0", "Q4_1"}


def test_all_of_a_file_is_kept_if_all_has_products() -> None:
    stored = stored_formats(smollm2_gguf(), read_config(smollm2_gguf()))
    assert chosen(stored) == chosen(stored, "as-stored") == stored
    assert chosen(stored, multiplies_codes=False) == chosen(stored, "none") == {}


def test_a_matrix_is_kept_as_a_whole_or_not() -> None:
    """A head in another type is dequantized alone; so is a fused matrix of two types."""
    stored = formats_of({"": "Q4_0", "embed": "Q6_K", "v": "Q5_0"})
    kept = chosen(stored)
    names = {name for name, _ in kept}
    assert "embed" not in names and "blocks.0.qkv" not in names
    assert {"blocks.0.out", "blocks.3.gate_up"} <= names
    assert all(kept[part] == stored[part] for part in kept)
    assert chosen(stored, "as-stored") == stored
    assert not chosen(formats_of({"": "Q4_K"}))


def test_unquantized_models_stay_so() -> None:
    assert chosen({}) == chosen({}, "none") == {}


Q4 = formats_of({"": "Q4_0"})
MIXED = formats_of({"": "Q4_0", "embed": "Q6_K"})
K = formats_of({"": "Q4_K", "down": "Q6_K"})


@pytest.mark.parametrize(
    ("stored", "quant", "words"),
    [
        ({}, "auto", "bf16 weights"),
        ({}, "int4-g64", "block weights quantized to int4-g64"),
        (Q4, "auto", "Q4_0 weights kept as stored"),
        (
            MIXED,
            "auto",
            "Q4_0 weights kept as stored, Q6_K weights dequantized to bf16 (no kernels for them "
            "here; --quant as-stored keeps them, slower)",
        ),
        (
            K,
            "auto",
            "Q4_K and Q6_K weights dequantized to bf16 (no kernels for them here; --quant "
            "as-stored keeps them, slower)",
        ),
        (K, "as-stored", "Q4_K and Q6_K weights kept as stored"),
        (Q4, "none", "Q4_0 weights dequantized to bf16"),
    ],
)
def test_words_about_the_weights(stored: StorageFormats, quant: str, words: str) -> None:
    kept = chosen(stored, quant)
    assert describe_weights(stored, kept, quant, "bf16") == words


def test_words_about_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_kernels("native avx512_bf16", "cpu", "bf16") == "AVX-512 BF16 kernels"
    assert describe_kernels("Triton", "cuda", "bf16") == "Triton kernels"
    assert describe_kernels("torch", "cuda", "bf16") == "torch kernels"
    fp32 = describe_kernels("torch", "cpu", "fp32")
    assert fp32 == "torch operations (native kernels are for bf16)"
    chosen_so = describe_kernels("torch", "cpu", "bf16")
    assert chosen_so == "torch operations (SHARDWISE_KERNELS=torch)"
    assert description.library is not None
    monkeypatch.setattr(description, "library", None)
    assert "install a C++ compiler" in describe_kernels("torch", "cpu", "bf16")


def test_words_about_the_room() -> None:
    ready = Ready(2048, 5376, 16, "bf16 weights", "AVX2 kernels")
    assert str(ready) == "bf16 weights, AVX2 kernels, room for 42 requests of 2,048 tokens"
    assert str(replace(ready, num_pages=128)).endswith("room for 1 request of 2,048 tokens")


# -- the planner


def change_of(stored: StorageFormats, monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> str:
    """Return the proposal for SmolLM2 on a GPU of that memory, as if its file had these formats."""
    monkeypatch.setattr(planner_module, "stored_formats", lambda source, config: stored)
    gpu = replace(find_device("l4"), memory_bytes=memory_bytes)
    model = FoundModel("m", CONFIG, "gguf", Path("m.gguf"))
    return str(plan(model, gpu, 1, "serve", seq=512).to_json()["smallest_change"])


def test_a_plan_counts_stored_codes_by_default() -> None:
    default, plain = (
        plan(str(smollm2_gguf()), "l4", mode="serve", quant=quant) for quant in (None, "none")
    )
    kept = plan(str(smollm2_gguf()), "l4", mode="serve", quant="as-stored")
    rows = [each.modes[0].candidates[0].ledger[0].rows for each in (default, kept, plain)]
    assert rows[0] == rows[1] and 2 * rows[0]["parameters"] < rows[2]["parameters"]
    assert (default.quant, plain.quant) == ("as-stored", None)
    assert plan(str(smollm2_gguf()), "l4", mode="train").quant is None


def test_a_quantized_file_is_not_proposed_to_be_quantized_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dequantized K-quants that do not fit are proposed as stored; what is kept already is not
    proposed another scheme, which `serve` would refuse."""
    assert "--quant as-stored" in change_of(K, monkeypatch, 200_000_000)
    assert "--quant int" not in change_of(Q4, monkeypatch, 60_000_000)
    assert "--quant int8" in change_of({}, monkeypatch, 200_000_000)


def test_formats_are_by_name() -> None:
    assert not has_product(StorageFormat("unknown", 4, 32, 2))
