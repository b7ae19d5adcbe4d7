"""The kernels for GPUs, in Triton's interpreter on CPUs, against their definitions; and compiled
for GPUs.

The interpreter computes with CPU arithmetic, here with products that do not depend on their shape.
So these tests show that the structure of the kernels is batch-invariant; whether a GPU's products
are is measured when a model is loaded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines import (
    Got,
    ReferenceModel,
    answers,
    drawn_tokens,
    engine_of,
    fill_with_anything,
    greedy,
    runner_of,
    tiny,
)
from examples import examples
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import CODES, LARGEST, KVPages, Vectors, as_bytes, write_pages
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.reference.gated import gated_naive
from shardwise.kernels.reference.norm import rms_norm_naive
from shardwise.kernels.reference.rope import apply_rope_naive
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.registry import serving_kernels, triton_kernels
from shardwise.kernels.serving_interface import AttentionShape
from shardwise.kernels.triton.batch import table_batch
from shardwise.quant.kv_dtype import KvDtype
from shardwise.serve.engine.cuda_graphs import Step
from shardwise.serve.engine.runner import Runner
from shardwise.serve.request import Request
from test_kv import KV_DTYPES, kept
from test_paged import PAGE_TOKENS, Drawn, Runs, cut, definition, drawn, whole

pytest.importorskip("triton", reason="Triton has builds for Linux on x86-64 only")

from interpreter import shape_invariant_dot  # noqa: F401 (a fixture that all tests use)
from shardwise.kernels.triton import attention as triton_paged
from shardwise.kernels.triton import pointwise as triton_small

pytestmark = (
    pytest.mark.filterwarnings(  # of numpy, in rows that only fill up, and of what is no number
        "ignore:overflow:RuntimeWarning",
        "ignore:divide by zero:RuntimeWarning",
        "ignore:invalid value:RuntimeWarning",
    )
)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative to the largest, or to 1: the last two bits, as results are rounded on the way, and the
interpreter cuts bf16 off where a GPU rounds it."""


# -- attention over pages


def over_tables(
    case: Drawn,
    runs: Runs,
    window: int | None,
    wanted_programs: int,
    sizes: Sequence[int],
    num_done: Sequence[int] = (),
    kv_dtype: KvDtype = "auto",
) -> list[Tensor]:
    """Attention output [T, H, C] of every sequence, its tokens run in the steps of `runs`; the
    first `num_done` tokens have only keys and values. Pages are full of NaN at first."""
    _, num_heads, size = case.q[0].shape
    num_kv = case.k[0].shape[1]
    dtype = case.q[0].dtype
    pages = KVPages.empty((num_kv, case.num_pages, PAGE_TOKENS, size), kv_dtype, dtype)
    fill_with_anything(pages)
    done = list(num_done) or [0] * len(case.q)
    out = [torch.zeros_like(q) for q in case.q]
    for number, count in enumerate(num_done):
        slots = table_batch(
            [TokenSpan(0, count, case.tables[number])], 1, PAGE_TOKENS, (16,), CPU
        ).slots.long()
        pages.keys.write(slots, case.k[number][:count])
        pages.values.write(slots, case.v[number][:count])
    for step in runs:
        places = [(number, slice(done[number], done[number] + count)) for number, count in step]
        spans = [
            TokenSpan(at.start, at.stop - at.start, case.tables[number]) for number, at in places
        ]
        batch = table_batch(spans, num_heads // num_kv, PAGE_TOKENS, sizes, CPU)
        q, k, v = (
            torch.cat([x[number][at] for number, at in places]) for x in (case.q, case.k, case.v)
        )
        pages.keys.write(batch.slots.long(), k)
        pages.values.write(batch.slots.long(), v)
        found = triton_paged.triton_paged_attention(q, pages, batch, window, wanted_programs)
        for (number, at), part in zip(
            places, found.split([span.num_tokens for span in spans]), strict=True
        ):
            out[number][at] = part
            done[number] = at.stop
    return out


def sizes_for(
    heads: tuple[int, int], size: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> tuple[int, ...]:
    return triton_paged.agreeing_tiles(
        AttentionShape(*heads, size, PAGE_TOKENS, frozenset([None]), dtype, CPU, kv_dtype)
    )


def assert_close(found: Tensor, expected: Tensor, error: float) -> None:
    assert found.isfinite().all()
    assert (found.double() - expected.double()).abs().max() <= error * max(
        1.0, expected.double().abs().max().item()
    )


@settings(max_examples=examples(3))
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    size=st.sampled_from([16, 40]),
    window=st.sampled_from([None, 1, 20, 130]),
    dtype=st.sampled_from(DTYPES),
    most=st.sampled_from([30, 60, 150]),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_attention_matches_definition_and_is_batch_invariant(
    kv_dtype: KvDtype,
    lengths: list[int],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    dtype: torch.dtype,
    most: int,
    seed: int,
) -> None:
    """The definition uses keys and values as the pages store them."""
    case = drawn(lengths, *heads, size, dtype, seed)
    sizes = sizes_for(heads, size, dtype, kv_dtype)
    alone = over_tables(case, whole(lengths), window, 0, sizes, (), kv_dtype)
    for q, k, v, found in zip(case.q, case.k, case.v, alone, strict=True):
        if kv_dtype != "auto":
            k = kept(k, kv_dtype)
            v = kept(v, kv_dtype)
        assert_close(found, definition(q, k, v, window), ERROR[dtype])
    random = torch.Generator().manual_seed(seed)
    together = over_tables(case, cut(lengths, most, random), window, 16, sizes, (), kv_dtype)
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 200)])
def test_split_blocks_are_bit_identical(dtype: torch.dtype, window: int | None) -> None:
    """A token with several blocks is computed by one program, by two that alternate, and by one per
    block."""
    lengths = [300, 129, 700]
    case = drawn(lengths, 4, 2, 16, dtype)
    runs: Runs = [[(0, 1), (1, 1), (2, 1)], [(2, 1), (0, 1), (1, 1)]]
    num_done = [length - 2 for length in lengths]
    found = [
        over_tables(case, runs, window, wanted, (16, 64), num_done) for wanted in (0, 12, 1000)
    ]
    for q, k, v, out in zip(case.q, case.k, case.v, found[0], strict=True):
        assert_close(out[-2:], definition(q, k, v, window)[-2:], ERROR[dtype])
    for shared in found[1:]:
        assert all(torch.equal(a[-2:], b[-2:]) for a, b in zip(found[0], shared, strict=True))


def test_masked_slots_do_not_affect_results() -> None:
    """Slots behind a sequence in its last page or before a window, and pages of other sequences,
    may hold anything."""
    case = drawn([60], 2, 1, 16, torch.float32)
    batch = table_batch([TokenSpan(40, 20, case.tables[0])], 2, PAGE_TOKENS, (16,), CPU)
    found = []
    for garbage in (0.0, torch.nan, torch.inf):
        pages = KVPages(
            *(Vectors(torch.full((1, case.num_pages, PAGE_TOKENS, 16), garbage)) for _ in range(2))
        )
        seen = table_batch(
            [TokenSpan(31, 29, case.tables[0])], 2, PAGE_TOKENS, (16,), CPU
        ).slots.long()
        pages.keys.write(seen, case.k[0][31:])
        pages.values.write(seen, case.v[0][31:])
        found.append(triton_paged.triton_paged_attention(case.q[0][40:], pages, batch, 10, 0))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_nan_affects_only_its_request(kv_dtype: KvDtype) -> None:
    """With codes also where a value is NaN: earlier tokens do not attend to it."""
    case = drawn([30, 20], 2, 1, 16, torch.float32)
    expected = over_tables(case, [[(0, 30), (1, 20)]], None, 0, (16,), (), kv_dtype)
    for broken in (case.k, case.v) if kv_dtype != "auto" else (case.k,):
        before = broken[0][7].clone()
        broken[0][7] = torch.nan
        found = over_tables(case, [[(0, 30), (1, 20)]], None, 0, (16,), (), kv_dtype)
        assert torch.equal(found[0][:7], expected[0][:7]) and torch.equal(found[1], expected[1])
        assert found[0][7:].isnan().all()
        broken[0][7] = before


def test_tile_sizes_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = triton_paged.launch_tiles

    def differing(q: Tensor, pages: KVPages, batch: Any, tiles: Any, *given: Any) -> None:
        attend(q, pages, batch, tiles, *given)
        if tiles.num_rows == 64:
            given[-1].mul_(1 + 2**-23)

    assert sizes_for((4, 2), 16, torch.float32) == (16, 64)
    monkeypatch.setattr(triton_paged, "launch_tiles", differing)
    assert sizes_for((4, 2), 16, torch.float32) == (16,)


@settings(max_examples=examples(50))
@given(
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 100)), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 16]),
)
def test_tiles_cover_all_tokens_once(spans: list[tuple[int, int]], group: int) -> None:
    step = [TokenSpan(start, count, tuple(range(20))) for start, count in spans]
    batch = table_batch(step, group, PAGE_TOKENS, (16, 64), CPU)
    found = []
    for tiles in batch.tiles:
        for sequence, begin in tiles.origins.tolist():
            count = min(tiles.num_rows // group, spans[sequence][1] - begin)
            found += [(sequence, begin + offset) for offset in range(count)]
            assert (spans[sequence][1] * group <= 16) == (tiles.num_rows == 16)
    assert sorted(found) == [
        (number, n) for number, (_, count) in enumerate(spans) for n in range(count)
    ]
    for number, (start, count) in enumerate(spans):
        first = int(batch.first_tokens[number])
        assert batch.slots[first : first + count].tolist() == list(range(start, start + count))


# -- small operations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (2, 576)])
def test_norm_matches_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(each, generator=random).to(dtype) for each in (shape, shape[-1:]))
    found = triton_small.rms_norm(x, weight, 1e-5)
    assert_close(found, rms_norm_naive(x, weight, 1e-5), ERROR[dtype])
    assert torch.equal(triton_small.rms_norm(x[-1:], weight, 1e-5), found[-1:])
    assert torch.equal(
        triton_small.rms_norm(x.expand(2, *shape).transpose(0, 1), weight, 1e-5)[:, 1], found
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_matches_definition(activation: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for width in (1, 96, 1100):
        inner = (3 * torch.randn(3, 2 * width, generator=random)).to(dtype)
        inner[0, 0] = 80  # of which the exponential is no fp16, and no sigmoid but 1
        found = triton_small.gated(inner, activation)
        assert_close(found, gated_naive(inner, activation), ERROR[dtype])
        assert torch.equal(triton_small.gated(inner[1:2], activation), found[1:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv", "size"), [(1, 1, 2), (6, 2, 40), (9, 3, 64)])
def test_rope_is_applied_and_keys_and_values_are_written(
    num_heads: int, num_kv: int, size: int, dtype: torch.dtype
) -> None:
    """Keys and values are written into their slots and nowhere else; a token without a slot is not
    written."""
    random = torch.Generator().manual_seed(size)
    q, k, v = (
        torch.randn(4, num_heads + 2 * num_kv, size, generator=random)
        .to(dtype)
        .split((num_heads, num_kv, num_kv), 1)
    )
    angles = 10 * torch.rand(4, 1, size // 2, generator=random)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    slots = torch.tensor([17, -1, 3, 40], dtype=torch.int32)
    written = [0, 2, 3]
    for rope in (RopeTables(cos, sin), None):
        keys, values = (
            torch.full((num_kv, 3, PAGE_TOKENS, size), 7.0, dtype=dtype) for _ in range(2)
        )
        wanted_keys = keys.clone()
        wanted_values = values.clone()
        rotated = triton_small.rope_and_write_kv(
            q, k, v, rope, KVPages(Vectors(keys), Vectors(values)), slots
        )
        wanted_q, wanted_k = (
            (q, k) if rope is None else (apply_rope_naive(q, *rope), apply_rope_naive(k, *rope))
        )
        write_pages(wanted_keys, slots[written].long(), wanted_k[written])
        write_pages(wanted_values, slots[written].long(), v[written])
        assert_close(rotated, wanted_q, ERROR[dtype])
        assert_close(keys, wanted_keys, ERROR[dtype])
        assert torch.equal(values, wanted_values)
        assert ((keys == 7).all((0, 3)).sum() == 45) and (
            rope is not None or torch.equal(keys, wanted_keys)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_written_codes_match_definition(kv_dtype: KvDtype, dtype: torch.dtype) -> None:
    """Codes and scales of rotated keys and of values are bit-identical, also for vectors of zeros,
    of tiny numbers, and with NaN, whose scales are not finite; a token without a slot is not
    written."""
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(9, 3 * 2, 40, generator=random).to(dtype).split((2, 2, 2), 1)
    for x in (k, v):
        x[1], x[2, 1, 3], x[3, 0, 39], x[4] = 0, torch.nan, -torch.inf, 1e-8 * x[4]
    angles = 10 * torch.rand(9, 1, 20, generator=random)
    slots = torch.tensor([17, 5, 2, 3, 40, -1, 0, 21, 9], dtype=torch.int32)
    for rope in (None, RopeTables(angles.cos().to(dtype), angles.sin().to(dtype))):
        shape = 2, 3, PAGE_TOKENS, 40
        plain, pages, wanted = (
            KVPages.empty(shape, "auto", dtype),
            *(KVPages.empty(shape, kv_dtype, dtype) for _ in range(2)),
        )
        for each in (plain, pages, wanted):
            fill_with_anything(each)
        rotated = triton_small.rope_and_write_kv(q, k, v, rope, plain, slots)
        assert torch.equal(triton_small.rope_and_write_kv(q, k, v, rope, pages, slots), rotated)
        real = slots >= 0
        there = slots[real].long()
        wanted.keys.write(there, plain.keys.numbers.flatten(1, 2)[:, there].transpose(0, 1))
        wanted.values.write(there, v[real])
        for found, expected in zip(
            (pages.keys, pages.values), (wanted.keys, wanted.values), strict=True
        ):
            assert torch.equal(as_bytes(found.numbers), as_bytes(expected.numbers))
            assert found.scales is not None and expected.scales is not None
            assert torch.equal(
                *(torch.where(x.isfinite(), x, -1) for x in (found.scales, expected.scales))
            )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_codes_are_nearest_with_ties_to_even(kv_dtype: KvDtype) -> None:
    """All codes, the midpoints between two, and the numbers next to those."""
    codes = torch.arange(256, dtype=torch.uint8).view(CODES[kv_dtype]).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    beside = middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))
    numbers = torch.cat([codes, middles, *beside])
    most = LARGEST[CODES[kv_dtype]]
    lines = F.pad(numbers, (0, -len(numbers) % 31)).view(-1, 1, 31).clamp(-most, most)
    vectors = F.pad(lines, (1, 0), value=most)  # so scales are 1
    pages, wanted = (
        KVPages.empty((1, 3, PAGE_TOKENS, 32), kv_dtype, torch.float32) for _ in range(2)
    )
    slots = torch.arange(len(vectors), dtype=torch.int32)
    triton_small.rope_and_write_kv(vectors, vectors, vectors, None, pages, slots)
    wanted.values.write(slots.long(), vectors)
    found, expected = (
        as_bytes(each.values.numbers).flatten(1, 2)[:, slots.long()] for each in (pages, wanted)
    )
    assert torch.equal(found, expected)


# -- whole models


class NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph cannot capture: numbers that the host reads or creates in the
    step."""

    REFUSED = frozenset(
        {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::lift_fresh"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in self.REFUSED, func
        return func(*args, **(kwargs or {}))


def record(step: Step) -> Step:
    """A replay like that of a CUDA graph: runs the step again and writes the result to the same
    memory."""
    kept = step().fill_(torch.nan)

    def replay() -> Tensor:
        with NoWaiting():
            made = step()
        return kept.copy_(made)

    return replay


def answered(
    runner: Runner,
    model: ReferenceModel,
    requests: Sequence[Request],
    capture: Callable[[Step], Step] | None = None,
) -> list[Got]:
    """Run prompts in chunks, and single tokens in captured steps, if any."""
    engine = engine_of(runner, model.tokenizer, num_pages=16)
    if capture is not None:
        runner.capture_graphs(3, 64, capture)
    return [got for (got,) in answers(engine, requests)]


def assert_served(
    model: ReferenceModel, kv_dtype: KvDtype, error: float, num_tokens: int = 2
) -> None:
    """Completions match those with torch kernels, in fp32 with equal tokens, and are bit-identical
    in a batch, in captured steps, and alone."""
    requests = [Request(drawn_tokens(n, n), greedy(num_tokens)) for n in (17, 4)]
    runner = runner_of(model, kv_dtype, triton_kernels())
    alone = answered(runner, model, requests[:1])
    together = answered(runner, model, requests, record)
    assert alone[0].said == together[0].said
    for ours, theirs in zip(
        together, answered(runner_of(model, kv_dtype, REFERENCE), model, requests), strict=True
    ):
        assert model.dtype != torch.float32 or ours.tokens == theirs.tokens
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=error)


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "error"),
    [
        ("llama", torch.bfloat16, "auto", 0.1),
        ("mistral", torch.float32, "auto", 1e-5),
        ("qwen3", torch.float32, "auto", 1e-5),
        ("gpt2", torch.float32, "fp8", 1e-2),
    ],
)
def test_served_model_matches_torch_and_is_batch_invariant(
    name: str, dtype: torch.dtype, kv_dtype: KvDtype, error: float
) -> None:
    changes = {"num_hidden_layers": 1} if name in ("llama", "mistral") else {}
    assert_served(tiny(name, dtype, **changes), kv_dtype, error)


def test_fp32_on_cpu_uses_torch_kernels() -> None:
    assert serving_kernels(CPU, torch.float32) is REFERENCE


# -- on GPUs


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """The whole compiler runs, down to machine code, for compute capabilities 8.0 and 9.0.
    Attention fits into the smallest shared memory of a GPU with bf16 (99 KiB) and into registers,
    uses tensor cores for bf16, and fuses multiplications and additions only in fp32 products."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "compiled.py", "80", "90"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    products = {"product_kernel", "add_parts_kernel", "block_sums_kernel", "look_up_kernel"}
    small = {"norm_kernel", "gated_kernel", "rope_and_write_kv_kernel"}
    for capability in (80, 90):
        mine = [each for each in told if each["capability"] == capability]
        assert {each["name"] for each in mine} == {
            "attend_kernel",
            "merge_blocks_kernel",
        } | small | products
        assert all(
            each["shared_bytes"] <= 99 * 1024 and each["spilled_bytes"] == 0 for each in mine
        )
        attention = [
            each for each in mine if each["name"] in ("attend_kernel", "merge_blocks_kernel")
        ]
        in_bf16 = [each for each in attention if each["tensor_cores"]]
        assert len(in_bf16) == 6
        assert not any(each["fused"] for each in mine if each["name"] in products)
        assert all(each["tensor_cores"] for each in mine if each["name"] == "product_kernel")
        assert not any(
            each["fused"]
            for each in attention
            if each["name"] == "merge_blocks_kernel" or each in in_bf16
        )
