"""Products with quantized weights in Triton, in its interpreter on CPUs: against their definition
in fp64, batch-invariant however they are split, and in whole models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import ReferenceModel, tiny
from examples import examples
from shardwise.kernels.reference.batch_invariant import Head, RowWeight
from shardwise.quant.dynamic import dequantize_fp64
from shardwise.quant.format import QuantizedMatrix, dequantize, quantize
from shardwise.quant.scheme import Scheme
from shardwise.quant.weight import QuantizedTable, QuantizedWeight
from test_native import with_numbers

pytest.importorskip("triton", reason="Triton has builds for Linux on x86-64 only")

from interpreter import shape_invariant_dot  # noqa: F401 (a fixture that all tests use)
from shardwise.kernels.triton import linear as triton_quantized
from shardwise.kernels.triton.linear import (
    TritonQuantized,
    agreeing_rows,
    blocks_per_part,
    pack_integers,
    quantized_product,
)
from test_triton import DTYPES, assert_served

pytestmark = (
    pytest.mark.filterwarnings(  # of numpy, in rows that only fill up, and of what is no number
        "ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
    )
)
BF16 = torch.bfloat16
FP32 = torch.float32
SCHEMES = (
    "int8",
    "int8-g32",
    "int8z-g64",
    "int4",
    "int4-g32",
    "int4z-g32",
    "int4-g128",
    "int4z",
    "int8z",
    "int4z-g96",
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held_as(
    scheme: str, num_out: int, num_in: int, scales: torch.dtype = BF16, minima: bool = False
) -> QuantizedMatrix:
    return with_numbers(
        quantize(drawn(num_out, num_in, seed=1), Scheme.parse(scheme)), scales, minima
    )


def head_of(held: QuantizedMatrix, dtype: torch.dtype) -> TritonQuantized:
    head, table = triton_quantized.pack_head(QuantizedWeight((held,)), dtype)
    assert isinstance(head, TritonQuantized) and head is table, "it is there once"
    return head


def assert_defined(found: Tensor, x: Tensor, held: QuantizedMatrix) -> None:
    """Products equal the definition in fp64 up to fp32 roundings: of each term, of the sum of K
    terms, of its scale, of the minimum's term, and of adding that."""
    wide = x.double()
    roundings = held.shape[1] + 5
    bound = roundings * 2.0**-24 * (wide.abs() @ term_sizes(held).t())
    assert found.dtype == FP32
    assert ((found - wide @ dequantize_fp64(held).t()).abs() <= bound).all()


def term_sizes(held: QuantizedMatrix) -> Tensor:
    """Return the size of what is added up for each weight [N, K]: scale times code less zero point,
    or scale times code and, apart from it, the minimum."""
    weights = dequantize_fp64(held)
    if held.zeros is None or held.zeros.dtype == torch.uint8:
        return weights.abs()
    minima = held.zeros.double().repeat_interleave(weights.shape[1] // held.zeros.shape[1], 1)
    return (weights - minima).abs() + minima.abs()


# -- products


@settings(max_examples=examples(12))
@given(
    scheme=st.sampled_from(SCHEMES),
    num_rows=st.sampled_from([1, 3, 16, 17]),
    dtype=st.sampled_from(DTYPES),
    scales=st.sampled_from(DTYPES),
    minima=st.booleans(),
    num_groups=st.integers(1, 2),
    odd=st.integers(1, 140),
    num_out=st.integers(1, 70),
)
def test_product_matches_definition_and_is_batch_invariant(
    scheme: str,
    num_rows: int,
    dtype: torch.dtype,
    scales: torch.dtype,
    minima: bool,
    num_groups: int,
    odd: int,
    num_out: int,
) -> None:
    group = Scheme.parse(scheme).group
    held = held_as(scheme, num_out, group * num_groups if group else odd, scales, minima)
    x = drawn(num_rows, 2 * held.shape[1])[:, : held.shape[1]].to(dtype)  # rows may lie apart
    head = head_of(held, dtype)
    found = head.apply(x)
    assert_defined(found, x, held)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(head.apply(x[row]), found[row])
    narrow = replace(head, wide=False).apply(x)  # the interpreter cuts bf16 off
    assert (
        narrow.dtype == dtype
        and ((narrow - found).abs() <= found.abs() * torch.finfo(dtype).eps).all()
    )
    ids = torch.tensor([[0, num_out - 1], [num_out // 2, 0]])
    assert torch.equal(replace(head, dtype=FP32).look_up(ids), dequantize(held, FP32)[ids])


@pytest.mark.parametrize(
    ("scheme", "minima"), [("int8", False), ("int4z-g64", False), ("int4z-g32", True)]
)
def test_split_parts_are_bit_identical(scheme: str, minima: bool) -> None:
    held = held_as(scheme, 20, 320, minima=minima)
    packed = pack_integers(held)
    x = drawn(3, 320).to(BF16)
    for part_blocks in (1, 2, packed.num_blocks):
        found = [
            quantized_product(x, packed, 16, part_blocks, split, FP32) for split in (False, True)
        ]
        assert torch.equal(*found)
        assert_defined(found[0], x, held)


@given(num_blocks=st.integers(1, 300), num_tiles=st.integers(1, 2000), wanted=st.integers(1, 600))
def test_parts_cover_all_columns_and_are_not_too_short(
    num_blocks: int, num_tiles: int, wanted: int
) -> None:
    like = pack_integers(held_as("int8-g64", 1, 64))
    packed = replace(
        like,
        shape=(64 * num_tiles, 64 * num_blocks),
        codes=like.codes[:, :1].expand(num_tiles, num_blocks, -1, -1),
    )
    part_blocks = blocks_per_part(packed, wanted)
    num_parts = -(-num_blocks // part_blocks)
    assert num_parts == 1 or part_blocks * 64 >= 256
    assert num_parts == 1 or (num_parts - 1) * num_tiles < wanted


@pytest.mark.parametrize("scheme", ["int8", "int4z-g32"])
def test_nan_rows_do_not_affect_others(scheme: str) -> None:
    held = held_as(scheme, 70, 160)
    x = drawn(9, 160).to(BF16)
    head = head_of(held, BF16)
    expected = head.apply(x)
    x[3, 40] = torch.nan
    x[5, 159] = torch.inf
    found = head.apply(x)
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(found[others], expected[others])
    assert found[3].isnan().all() and not found[5].isfinite().any()
    assert head.apply(x[:0]).shape == (0, 70) and head.apply(x.view(3, 3, 160)).shape == (3, 3, 70)


def test_tile_sizes_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_integers(held_as("int8", 64, 128))
    sizes = agreeing_rows(packed, 1, FP32)
    assert 16 in sizes and set(sizes) <= {16, 64, 128}

    def differing(
        x: Tensor, packed: Any, num_rows: int, part_blocks: int, split: bool, dtype: torch.dtype
    ) -> Tensor:
        return quantized_product(x, packed, num_rows, part_blocks, split, dtype) * (
            1 + 2**-20 * (num_rows == at and split)
        )

    monkeypatch.setattr(triton_quantized, "quantized_product", differing)
    at = 64
    assert agreeing_rows(packed, 1, FP32) == tuple(size for size in sizes if size != 64)
    at = 16
    with pytest.raises(RuntimeError, match="other bits where its parts are split"):
        agreeing_rows(packed, 1, FP32)


# -- weights


@pytest.mark.parametrize("scheme", ["int8", "int8z-g64", "int4-g32", "int4z-g128"])
def test_packed_weights_have_the_same_bytes(scheme: str) -> None:
    held = held_as(scheme, 192, 256)
    packed = pack_integers(held)
    parts = packed.codes, packed.scales, packed.offsets
    assert sum(part.nbytes for part in parts if part is not None) == held.num_bytes


def test_weights_without_triton_product_use_torch() -> None:
    """Weights with several storage formats, floats, and groups of partial blocks use torch; an
    embedding that is not tied stays as it is."""
    int8, int4, *odd = [
        held_as(name, 8, 80) for name in ("int8", "int4", "fp8", "int4-g16", "int3")
    ]
    for weight in (QuantizedWeight((int8, int4)), *(QuantizedWeight((each,)) for each in odd)):
        table = QuantizedTable((int8,), BF16)
        known = QuantizedWeight((int8,))
        norm = drawn(1).to(BF16)
        given: dict[str, Any] = {
            "blocks.0.out": weight,
            "blocks.0.qkv": known,
            "embed": table,
            "norm": norm,
        }
        ready = triton_quantized.pack_weights(given)
        assert isinstance(ready["blocks.0.out"], RowWeight) and isinstance(
            ready["blocks.0.qkv"], TritonQuantized
        )
        assert ready["embed"] is table and "blocks.0.qkv" not in given, "it is given up"
        if len(weight.parts) == 1:
            head, looked_up = triton_quantized.pack_head(weight, BF16)
            assert isinstance(head, Head) and isinstance(looked_up, QuantizedTable)


def quantized_model(name: str, dtype: torch.dtype, scheme: str) -> ReferenceModel:
    """A model with the matrices of its blocks, and a tied embedding, in integers."""
    model = tiny(name, dtype, num_hidden_layers=1)
    weights: dict[str, Any] = dict(model.weights)
    for key, weight in model.weights.items():
        if key.startswith("blocks.") and weight.dim() == 2:
            weights[key] = QuantizedWeight((quantize(weight, Scheme.parse(scheme)),))
    if model.config.tied:
        weights["embed"] = QuantizedTable(
            (quantize(model.weights["embed"], Scheme.parse("int8-g32")),), dtype
        )
    return replace(model, weights=weights)


@pytest.mark.parametrize(
    ("name", "dtype", "scheme", "error"),
    [("llama", BF16, "int8", 0.1), ("llama-tied", FP32, "int4z-g32", 1e-5)],
)
def test_served_model_matches_torch_and_is_batch_invariant(
    name: str, dtype: torch.dtype, scheme: str, error: float
) -> None:
    assert_served(quantized_model(name, dtype, scheme), "auto", error, 2)
