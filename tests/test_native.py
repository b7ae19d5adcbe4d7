"""The native kernels against fp64, on every instruction set that this processor has."""

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import fill_with_anything
from examples import examples
from shardwise.environment import CPU_KERNELS_VARIABLE
from shardwise.kernels.interface import RopeTables, TrainingKernels
from shardwise.kernels.kv_cache import CODES, KVPages, as_bytes, quantize_vectors
from shardwise.kernels.native.library import instruction_sets
from shardwise.kernels.native.serving import (
    NativePagedAttention,
    NativeServing,
    PackedQuantized,
    PackedWeight,
)
from shardwise.kernels.native.training import NativeTraining
from shardwise.kernels.page_table import BLOCK_TOKENS, TokenSpan
from shardwise.kernels.reference.batch_invariant import Head, RowWeight
from shardwise.kernels.reference.gated import gated, gated_naive
from shardwise.kernels.reference.norm import rms_norm_naive
from shardwise.kernels.reference.rope import apply_rope_naive
from shardwise.kernels.reference.serving import REFERENCE, ReferenceAttention
from shardwise.kernels.reference.training import REFERENCE_TRAINING
from shardwise.kernels.registry import serving_kernels
from shardwise.kernels.serving_interface import AttentionShape, ServingKernels
from shardwise.kernels.training_registry import training_kernels
from shardwise.quant.dynamic import dynamic_matmul
from shardwise.quant.format import QuantizedMatrix, dequantize, quantize
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import Scheme
from shardwise.quant.weight import QuantizedTable, QuantizedWeight
from test_kv import KV_DTYPES, kept

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="the native kernels are not built: no compiler"
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
HALF_STEP = 2.0**-8
"""Rounding to bf16 moves a number by at most this, relatively."""


@pytest.fixture(params=instruction_sets())
def native(request: pytest.FixtureRequest) -> NativeServing:
    return NativeServing.of(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


# -- products


def weight_of(native: NativeServing, weight: Tensor, wide: bool) -> PackedWeight:
    packed = (
        native.pack_weights({"blocks.0.out": weight})["blocks.0.out"]
        if not wide
        else native.pack_head(weight, BF16)[0]
    )
    assert isinstance(packed, PackedWeight)
    return packed


@settings(max_examples=examples(25), deadline=None)
@given(
    name=st.sampled_from(instruction_sets() or ("none",)),
    num_rows=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13, 65]),
    num_in=st.integers(1, 90).map(lambda pairs: 2 * pairs),
    num_out=st.integers(1, 150),
)
def test_product_matches_definition_and_is_batch_invariant(
    name: str, num_rows: int, num_in: int, num_out: int
) -> None:
    native = NativeServing.of(name)
    x = drawn(num_rows, num_in)
    weight = drawn(num_out, num_in, seed=1)
    exact = x.double() @ weight.double().t()
    most = x.double().abs() @ weight.double().abs().t()
    wide = weight_of(native, weight, True)
    narrow = weight_of(native, weight, False)
    found = wide.apply(x)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= num_in * 2.0**-23 * most).all()
    assert torch.equal(narrow.apply(x), found.to(BF16))
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(wide.apply(x[row]), found[row])


def test_product_accepts_strided_rows_and_leading_dims(native: NativeServing) -> None:
    x = drawn(3, 5, 200)
    weight = drawn(40, 64, seed=1)
    packed = weight_of(native, weight, False)
    assert torch.equal(packed.apply(x[..., 10:74]), packed.apply(x[..., 10:74].contiguous()))
    assert packed.apply(x[..., 10:74]).shape == (3, 5, 40)
    assert packed.apply(x[:0, 0, :64]).shape == (0, 40)


def test_nan_stays_in_its_row_and_column(native: NativeServing) -> None:
    x = drawn(8, 32)
    weight = drawn(20, 32, seed=1)
    x[3, 5] = torch.nan
    weight[7, 0] = torch.inf
    x[6, 1] = 0
    x[6, 0] = 1
    found = weight_of(native, weight, True).apply(x)
    assert found[3].isnan().all() and not found[[0, 1, 2, 4, 5, 6, 7]].isnan().any()
    assert found[6, 7] == torch.inf and found[6, [0, 6, 8]].isfinite().all()


def test_subnormal_numbers_may_be_flushed(native: NativeServing) -> None:
    """Subnormal numbers may count as zero, as in bf16 instructions; other numbers may not."""
    x = torch.full((2, 64), 1e-39, dtype=BF16)
    found = weight_of(native, torch.full((16, 64), 1.0, dtype=BF16), True).apply(x)
    assert ((found == 0) | ((found - 64e-39).abs() < 1e-39)).all()


@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(instruction_sets() or ("none",)),
    scheme=st.sampled_from(
        ["int8", "int8-g32", "int8z-g64", "int4", "int4-g32", "int4z-g32", "int4-g128", "int4z"]
    ),
    num_rows=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13, 65]),
    num_in=st.integers(1, 3).map(lambda groups: 128 * groups),
    num_out=st.integers(1, 150),
    scales=st.sampled_from([BF16, torch.float16, torch.float32]),
    minima=st.booleans(),
)
def test_quantized_product_matches_definition_and_is_batch_invariant(
    name: str,
    scheme: str,
    num_rows: int,
    num_in: int,
    num_out: int,
    scales: torch.dtype,
    minima: bool,
) -> None:
    """Integer sums are exact, so only the fp32 sums over stretches differ from the definition in
    fp64."""
    native = NativeServing.of(name)
    x = drawn(num_rows, num_in)
    held = with_numbers(
        quantize(drawn(num_out, num_in, seed=1).float(), Scheme.parse(scheme)), scales, minima
    )
    head, table = native.pack_head(QuantizedWeight((held,)), BF16)
    found = head.apply(x)
    exact = dynamic_matmul(x.double(), held)
    most = x.double().abs() @ dequantize(held, torch.float64).abs().t() + x.double().abs().sum(
        1, keepdim=True
    )
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= (num_in / 16 + 8) * 2.0**-23 * most).all()
    narrow = native.pack_weights({"blocks.0.out": QuantizedWeight((held,)), "norm": drawn(1)})[
        "blocks.0.out"
    ]
    assert isinstance(narrow, PackedQuantized) and torch.equal(narrow.apply(x), found.to(BF16))
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(head.apply(x[row]), found[row])
    ids = torch.tensor([[0, num_out - 1], [num_out // 2, 0]])
    torch.testing.assert_close(
        table.look_up(ids), dequantize(held, BF16)[ids], rtol=HALF_STEP, atol=1e-6
    )


def with_numbers(held: QuantizedMatrix, scales: torch.dtype, minima: bool) -> QuantizedMatrix:
    """The same codes with scales of another dtype and, where they have offsets, minima in place of
    zero points."""
    zeros = held.zeros
    if zeros is not None and minima:
        zeros = (-held.scales.float() * zeros.float()).to(scales)
    return replace(held, scales=held.scales.to(scales), zeros=zeros)


@given(num_in=st.integers(1, 140), num_out=st.integers(1, 40))
def test_one_scale_per_row_supports_partial_stretches(num_in: int, num_out: int) -> None:
    held = quantize(drawn(num_out, num_in).float(), Scheme.parse("int8"))
    x = drawn(3, 2 * num_in, seed=1)[:, :num_in]
    for name in instruction_sets():
        head, table = NativeServing.of(name).pack_head(QuantizedWeight((held,)), BF16)
        torch.testing.assert_close(
            head.apply(x).double(), dynamic_matmul(x.double(), held), rtol=1e-5, atol=1e-4
        )
        assert torch.equal(table.look_up(torch.arange(num_out)), dequantize(held, BF16))


def test_nan_in_a_stretch_affects_only_its_row(native: NativeServing) -> None:
    held = quantize(drawn(20, 96, seed=1).float(), Scheme.parse("int4-g32"))
    x = drawn(8, 96)
    x[3, 40] = torch.nan
    x[5, 95] = torch.inf
    x[6] = 1e-38
    found = native.pack_head(QuantizedWeight((held,)), BF16)[0].apply(x)
    assert not found[[3, 5]].isfinite().any() and found[[0, 1, 2, 4, 6, 7]].isfinite().all()
    assert found[6].eq(0).all()
    assert native.pack_head(QuantizedWeight((held,)), BF16)[0].apply(x[:0]).shape == (0, 20)


def test_weights_without_native_product_are_dequantized_on_the_fly(native: NativeServing) -> None:
    """Weights with several storage formats, floats, and groups of partial stretches are dequantized
    a strip of rows at a time."""
    names = ("int8", "int4", "fp8", "int4-g16", "int3-g16")
    int8, int4, *odd = [quantize(drawn(8, 80).float(), Scheme.parse(name)) for name in names]
    for weight in (QuantizedWeight((int8, int4)), *(QuantizedWeight((each,)) for each in odd)):
        x = drawn(3, weight.shape[1], seed=1)
        ready = native.pack_weights({"blocks.0.out": weight, "norm": drawn(1)})["blocks.0.out"]
        assert isinstance(ready, RowWeight)
        torch.testing.assert_close(
            ready.apply(x), x @ weight.dequantized(BF16).t(), rtol=0.02, atol=0.05
        )
        if len(weight.parts) == 1:
            head, table = native.pack_head(weight, BF16)
            assert isinstance(head, Head) and isinstance(table, QuantizedTable)
            expected = x.double() @ weight.dequantized(torch.float64).t()
            torch.testing.assert_close(head.apply(x).double(), expected, rtol=1e-5, atol=1e-4)
            assert torch.equal(
                table.look_up(torch.tensor([5, 0])), weight.dequantized(BF16)[[5, 0]]
            )


@given(
    rows=st.integers(1, 4),
    num_out=st.integers(1, 70),
    num_in=st.integers(1, 20).map(lambda pairs: 2 * pairs),
)
def test_tied_embedding_looks_up_rows_of_the_head(rows: int, num_out: int, num_in: int) -> None:
    weight = drawn(num_out, num_in)
    ids = torch.arange(rows)[:, None] * 7 % num_out
    for name in instruction_sets():
        assert torch.equal(
            NativeServing.of(name).pack_head(weight, BF16)[1].look_up(ids), weight[ids]
        )


# -- rows


@pytest.mark.parametrize("size", [1, 15, 64, 100, 576])
def test_norm_matches_definition(native: NativeServing, size: int) -> None:
    x = drawn(7, size) * 3
    weight = drawn(size, seed=1)
    found = native.rms_norm(x, weight, 1e-5)
    expected = rms_norm_naive(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(
        found.double(), expected, rtol=2 * HALF_STEP, atol=0
    )  # rounded twice
    assert torch.equal(native.rms_norm(x[3], weight, 1e-5), found[3])


@pytest.mark.parametrize("size", [96, 100])
def test_gated_matches_definition(native: NativeServing, size: int) -> None:
    inner = drawn(5, 2 * size) * 20
    found = native.gated(inner, "silu")
    expected = gated_naive(inner.double(), "silu")
    torch.testing.assert_close(found.double(), expected, rtol=2.1 * HALF_STEP, atol=1e-30)
    assert torch.equal(native.gated(inner[2], "silu"), found[2])
    assert torch.equal(native.gated(inner, "gelu_tanh"), gated(inner, "gelu_tanh"))


def test_rank_with_an_empty_mlp_shard(native: NativeServing) -> None:
    """With more ranks than ffn units a rank has no rows of one matrix and no columns of the next,
    unquantized and quantized."""
    x = drawn(3, 64)
    none = torch.empty(0, 64, dtype=BF16)
    for up, down in (
        (none, none.t()),
        tuple(QuantizedWeight((empty_codes(each),)) for each in (none, none.t())),
    ):
        ready = native.pack_weights(
            {"blocks.0.gate_up": up, "blocks.0.down": down, "norm": drawn(1)}
        )
        inner = ready["blocks.0.gate_up"].apply(x)  # type: ignore[union-attr]
        assert inner.shape == (3, 0) and native.gated(inner, "silu").shape == (3, 0)
        found = ready["blocks.0.down"].apply(inner)  # type: ignore[union-attr]
        assert found.shape == (3, 64) and found.eq(0).all()
    trained = NativeTraining(native.name, native.functions)
    inner = torch.empty(2, 3, 0, dtype=BF16, requires_grad=True)
    y = trained.gated(inner, "silu")
    assert y.shape == (2, 3, 0) and torch.autograd.grad(y.sum(), inner)[0].shape == (2, 3, 0)


def empty_codes(weight: Tensor) -> QuantizedMatrix:
    """Codes in groups, of which there are none without columns."""
    num_rows, num_columns = weight.shape
    codes = torch.empty(num_rows, num_columns, dtype=torch.int8)
    return QuantizedMatrix(
        Scheme.parse("int8-g32"),
        (num_rows, num_columns),
        codes,
        torch.empty(num_rows, num_columns // 32),
    )


# -- attention


@dataclass(frozen=True)
class Story:
    """Sequences that grow by chunks: the length of each sequence after each step."""

    heads: AttentionShape
    window: int | None
    lengths: tuple[tuple[int, ...], ...]
    rotated: bool


@st.composite
def stories(draw: st.DrawFn) -> Story:
    num_kv = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 3, 4, 50]))
    head_dim = draw(st.sampled_from([32, 64, 96]))
    page_tokens = draw(st.sampled_from([16, 32, 128]))
    window = draw(st.sampled_from([None, 5, 130, 600]))
    step = st.sampled_from([1, 1, 2, 17, 40, 130, 500])
    steps = draw(st.lists(st.lists(step, min_size=1, max_size=3), min_size=1, max_size=3))
    lengths = tuple(tuple(sum(each[: number + 1]) for number in range(len(each))) for each in steps)
    kv_dtype = draw(st.sampled_from(get_args(KvDtype)))
    heads = AttentionShape(
        num_kv * group, num_kv, head_dim, page_tokens, frozenset({window}), BF16, CPU, kv_dtype
    )
    return Story(heads, window, lengths, draw(st.booleans()))


class Told:
    """A story with its numbers: q, k and v of every sequence, the RoPE tables of every position,
    pages full of NaN."""

    def __init__(self, story: Story, seed: int) -> None:
        self.story = story
        heads = story.heads
        torch.manual_seed(seed)
        totals = [lengths[-1] for lengths in story.lengths]
        shapes = [(heads.num_heads,), (heads.num_kv,), (heads.num_kv,)]
        self.qkv = [[torch.randn(n, *h, heads.head_dim).to(BF16) for h in shapes] for n in totals]
        angles = torch.rand(max(totals), 1, heads.head_dim // 2) * 6
        self.cos = angles.cos().to(BF16)
        self.sin = angles.sin().to(BF16)
        counts = [-(-n // heads.page_tokens) for n in totals]
        order = random.Random(seed).sample(range(sum(counts)), sum(counts))
        self.pages = [tuple(order.pop() for _ in range(count)) for count in counts]
        shape = heads.num_kv, sum(counts), heads.page_tokens, heads.head_dim
        self.kv = KVPages.empty(shape, heads.kv_dtype, BF16)
        fill_with_anything(self.kv)

    def step(
        self,
        attention: NativePagedAttention | ReferenceAttention,
        parts: list[tuple[int, int, int]],
    ) -> Tensor:
        """The attention output of tokens [start, stop) of each (sequence, start, stop)."""
        spans = [
            TokenSpan(start, stop - start, self.pages[number]) for number, start, stop in parts
        ]
        q, k, v = (
            torch.cat([self.qkv[number][i][start:stop] for number, start, stop in parts])
            for i in range(3)
        )
        cos, sin = (
            torch.cat([each[start:stop] for _, start, stop in parts])
            for each in (self.cos, self.sin)
        )
        rope = RopeTables(cos, sin) if self.story.rotated else None
        return attention.attend(q, k, v, rope, self.kv, attention.batch(spans), self.story.window)

    def expected(self, number: int) -> Tensor:
        q, k, v = (x.double() for x in self.qkv[number])
        heads = self.story.heads
        count = len(q)
        if self.story.rotated:
            cos = self.cos[:count].double()
            sin = self.sin[:count].double()
            q, k = (apply_rope_naive(x, cos, sin).to(BF16).double() for x in (q, k))
        if heads.kv_dtype != "auto":
            k = kept(k, heads.kv_dtype)
            v = kept(v, heads.kv_dtype)
        k, v = (x.repeat_interleave(heads.group, 1) for x in (k, v))
        scores = torch.einsum("nhc,thc->hnt", q, k) / math.sqrt(heads.head_dim)
        behind = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (
            behind < 0
            if self.story.window is None
            else (behind < 0) | (behind >= self.story.window)
        )
        return torch.einsum("hnt,thc->nhc", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@settings(max_examples=examples(15), deadline=None)
@given(
    story=stories(), name=st.sampled_from(instruction_sets() or ("none",)), seed=st.integers(0, 9)
)
def test_attention_matches_definition_and_is_batch_invariant(
    story: Story, name: str, seed: int
) -> None:
    attention = NativeServing.of(name).paged_attention(story.heads)
    together = Told(story, seed)
    found: list[list[Tensor]] = [[] for _ in story.lengths]
    for number in range(max(map(len, story.lengths))):
        parts = [
            (sequence, lengths[number - 1] if number else 0, lengths[number])
            for sequence, lengths in enumerate(story.lengths)
            if number < len(lengths)
        ]
        made = together.step(attention, parts).split([stop - start for _, start, stop in parts])
        for (sequence, _, _), out in zip(parts, made, strict=True):
            found[sequence].append(out)
    alone = Told(story, seed)
    for sequence, lengths in enumerate(story.lengths):
        whole = torch.cat(found[sequence])
        # weights are rounded to bf16, and the result is
        torch.testing.assert_close(
            whole.double(), alone.expected(sequence), rtol=2 * HALF_STEP, atol=2 * HALF_STEP
        )
        assert torch.equal(alone.step(attention, [(sequence, 0, lengths[-1])]), whole)


@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_decoding_token_by_token_is_bit_identical_to_one_chunk(
    native: NativeServing, kv_dtype: KvDtype
) -> None:
    story = Story(
        AttentionShape(9, 3, 64, 16, frozenset({None}), BF16, CPU, kv_dtype),
        None,
        ((150,),),
        rotated=True,
    )
    whole = Told(story, 1)
    single = Told(story, 1)
    attention = native.paged_attention(story.heads)
    out = whole.step(attention, [(0, 0, 150)])
    assert torch.equal(
        torch.cat([single.step(attention, [(0, at, at + 1)]) for at in range(150)]), out
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_written_codes_match_definition(native: NativeServing, kv_dtype: KvDtype) -> None:
    """Codes have their own order within a page; scales are bit-identical at their positions; NaN
    vectors have scales that are not finite. Vectors include zeros, and tiny to huge numbers."""
    heads = AttentionShape(2, 2, 64, 16, frozenset({None}), BF16, CPU, kv_dtype)
    told = Told(Story(heads, None, ((32,),), rotated=False), 3)
    _, k, v = told.qkv[0]
    k *= torch.logspace(-44, 38, 32)[:, None, None]
    k[3] = 0
    v[4] = 0
    v[5, 0, 7] = torch.nan
    v[5, 1, 8] = torch.inf
    told.step(native.paged_attention(heads), [(0, 0, 32)])
    for kept_there, new in ((told.kv.keys, k), (told.kv.values, v)):
        codes, scales = quantize_vectors(new, CODES[kv_dtype])
        finite = scales.isfinite()
        assert kept_there.scales is not None
        for page, tokens in zip(told.pages[0], (slice(0, 16), slice(16, 32)), strict=True):
            there = kept_there.scales[:, page].t()
            assert torch.equal(there[finite[tokens]], scales[tokens][finite[tokens]])
            assert not there[~finite[tokens]].isfinite().any()
            for head in range(2):
                if finite[tokens, head].all():
                    found = as_bytes(kept_there.numbers)[head, page]
                    expected = as_bytes(codes)[tokens, head]
                    assert torch.equal(found.flatten().sort()[0], expected.flatten().sort()[0])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (1e-3, 1e12), (3, 1e-12)])
def test_attention_over_codes_matches_torch(
    native: NativeServing, kv_dtype: KvDtype, key_size: float, value_size: float
) -> None:
    """The reference in bf16 rounds elsewhere: within 2^-6 of the largest value."""
    heads = AttentionShape(9, 3, 64, 16, frozenset({130}), BF16, CPU, kv_dtype)
    found = []
    for attention in (native.paged_attention(heads), ReferenceAttention.of(heads)):
        told = Told(Story(heads, 130, ((200,), (33,)), rotated=False), 4)
        for _, k, v in told.qkv:
            k *= key_size
            v *= value_size
        told.step(attention, [(0, 0, 180), (1, 0, 32)])
        found.append(told.step(attention, [(1, 32, 33), (0, 180, 200)]).double() / value_size)
    torch.testing.assert_close(*found, rtol=0, atol=4 * 2**-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_nan_codes_stay_in_their_sequence(native: NativeServing, kv_dtype: KvDtype) -> None:
    heads = AttentionShape(2, 1, 32, 16, frozenset({None}), BF16, CPU, kv_dtype)
    told = Told(Story(heads, None, ((40,), (40,), (40,)), rotated=True), 5)
    told.qkv[0][1][30, 0, 1] = torch.nan
    told.qkv[1][2][30, 0, 1] = torch.inf
    first, second, third = told.step(
        native.paged_attention(heads), [(0, 0, 40), (1, 0, 40), (2, 0, 40)]
    ).split(40)
    assert first[30:].isnan().all() and first[:30].isfinite().all()
    assert not second[30:].isfinite().any() and second[:30].isfinite().all()
    assert third.isfinite().all()


def test_threads_do_not_change_results(native: NativeServing) -> None:
    story = Story(
        AttentionShape(4, 2, 64, 16, frozenset({None}), BF16, CPU),
        None,
        ((1100,), (3,)),
        rotated=True,
    )
    x = drawn(40, 256)
    weight = weight_of(native, drawn(300, 256, seed=1), True)
    found = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            told = Told(story, 2)
            found.append(told.step(native.paged_attention(story.heads), [(0, 0, 1100), (1, 0, 3)]))
            found.append(weight.apply(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[i], found[i % 2]) for i in range(6))


# -- the choice


@pytest.mark.parametrize(
    ("choose", "plain"), [(serving_kernels, REFERENCE), (training_kernels, REFERENCE_TRAINING)]
)
def test_kernels_choice_by_environment(
    choose: Callable[[torch.device, torch.dtype], ServingKernels | TrainingKernels],
    plain: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice of serving and of training kernels."""
    monkeypatch.delenv(CPU_KERNELS_VARIABLE, raising=False)
    assert choose(CPU, BF16).name == f"native {instruction_sets()[0]}"
    assert choose(CPU, torch.float32) is plain
    for name in instruction_sets():
        monkeypatch.setenv(CPU_KERNELS_VARIABLE, name)
        assert choose(CPU, BF16).name == f"native {name}"
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "torch")
    assert choose(CPU, BF16) is plain
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "avx9")
    with pytest.raises(ValueError, match=r"avx9.*portable, torch"):
        choose(CPU, BF16)


def test_attention_blocks_are_those_of_the_library() -> None:
    header = (Path(__file__).parents[1] / "csrc/attention.h").read_text()
    assert f"BLOCK_TOKENS = {BLOCK_TOKENS}," in header


def test_one_openmp_runtime_is_loaded() -> None:
    """Two runtimes would start separate threads, and torch's thread count would not apply to the
    kernels."""
    code = (
        "import shardwise.kernels.native.serving; "
        "print({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("libgomp") == 1
