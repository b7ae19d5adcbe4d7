"""Check the Triton kernels on one GPU against their definitions and for batch invariance, and
measure their speed and that of captured decode steps. Takes a few minutes.

    python bench/gpu.py [--json]
    python bench/gpu.py --interpret [--json]   # only correctness, on a CPU, in the interpreter

Exit status: 0 if all checks pass, 1 if not, 2 without a GPU.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import get_args

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE, llama
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import CODES, KVPages, quantize_vectors
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.reference.batch_invariant import RowWeight, row_quantized, row_weights
from shardwise.kernels.reference.gated import gated_naive
from shardwise.kernels.reference.norm import rms_norm_naive
from shardwise.kernels.reference.rope import apply_rope_naive
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.registry import triton_kernels
from shardwise.kernels.serving_interface import AttentionShape, PagedAttention, ServingKernels
from shardwise.layout import Layout
from shardwise.parallel.mesh import make_mesh
from shardwise.params import model_specs
from shardwise.quant import format
from shardwise.quant.dynamic import dequantize_fp64
from shardwise.quant.format import QuantizedMatrix, dequantize
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import Scheme, quantizable
from shardwise.quant.weight import QuantizedWeight
from shardwise.serve.engine.cuda_graphs import Capture, cuda_capture
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import Batch, BatchEntry

PAGE_TOKENS = 16
MAX_RUNNING = 32
Step = Sequence[tuple[int, int]]
"""(sequence, number of its tokens) of each sequence of a step."""
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Tolerances relative to the largest number: the last two bits. fp32 sums on a GPU differ from
those of the definition."""
LOGITS_ERROR = 0.05
"""Tolerance relative to the largest logit, between kernels, of a model in bf16."""
PRODUCT_ERROR = 1e-5
"""Tolerance relative to the largest number, of fp32 sums of exact products."""
SCHEMES = ("int8", "int8-g32", "int4-g32", "int4-g128", "int4z-g128", "int4z")


@dataclass(frozen=True)
class Result:
    """A measurement, or a check with `ok`."""

    name: str
    value: float
    unit: str
    ok: bool | None = None


@dataclass(frozen=True)
class Work:
    """The cases to run: sequences of `lengths` tokens, heads (H, K, C) of attention, products
    (N, K), models."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    heads: tuple[tuple[int, int, int], ...]
    products: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    models: tuple[ModelConfig, ...]
    context: int
    capture: Capture


def on_gpu(device: torch.device) -> Work:
    heads = (9, 3, 64), (32, 8, 128), (8, 1, 80)
    products = (960, 640), (1000, 2048), (2048, 8192)
    models = CATALOGUE["smollm2-135m"], CATALOGUE["llama-3.2-1b"]
    return Work(
        device,
        tuple(ERROR),
        heads,
        products,
        (300, 1, 129, 1000),
        models,
        512,
        cuda_capture(device),
    )


def interpreted() -> Work:
    tiny = llama(2, 64, 96, 4, 2, vocab=101, max_positions=64)
    dtypes = torch.float32, torch.bfloat16
    heads = ((6, 2, 16),)
    products = ((20, 128),)
    return Work(
        torch.device("cpu"), dtypes, heads, products, (20, 1, 140), (tiny,), 30, lambda step: step
    )


# Correctness.


def drawn(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=random, device=device).to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest number; infinite if any result is not
    finite."""
    if not found.isfinite().all():
        return float("inf")
    return float(
        (found.double() - expected.double()).abs().max()
        / expected.double().abs().max().clamp(min=1)
    )


def check_attention(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    kinds: list[tuple[int | None, KvDtype]] = [
        (None, "auto"),
        (100, "auto"),
        (None, "int8"),
        (100, "fp8"),
    ]
    for (num_heads, num_kv, size), dtype, (window, kv_dtype) in product(
        work.heads, work.dtypes, kinds
    ):
        heads = AttentionShape(
            num_heads, num_kv, size, PAGE_TOKENS, frozenset([window]), dtype, work.device, kv_dtype
        )
        attention = kernels.paged_attention(heads)
        name = f"attention {num_heads}/{num_kv} heads of {size}, {str(dtype)[6:]}, "
        name += f"window {window}, kv_dtype {kv_dtype}"
        texts = [
            drawn((n, num_heads + 2 * num_kv, size), dtype, work.device, n) for n in work.lengths
        ]
        alone = [
            attend_in_steps(attention, heads, [text], window, [[(0, len(text))]])[0]
            for text in texts
        ]
        error = max(
            relative_error(out, attention_fp64(text, heads, window))
            for out, text in zip(alone, texts, strict=True)
        )
        yield Result(name, error, "of the largest", error <= ERROR[dtype])
        steps = [[(number, len(text) - 1)] for number, text in enumerate(texts) if len(text) > 1]
        together = attend_in_steps(
            attention, heads, texts, window, [*steps, [(number, 1) for number in range(len(texts))]]
        )
        same = all(map(torch.equal, alone, together))
        yield Result(
            f"{name}: batch-invariant, tiles of {attention.row_sizes}", float(same), "", same
        )


def attend_in_steps(
    attention: PagedAttention,
    heads: AttentionShape,
    texts: Sequence[Tensor],
    window: int | None,
    steps: Sequence[Step],
) -> list[Tensor]:
    """Return the attention output [T, H, C] of texts [T, q|k|v, C], run in `steps`, over pages that
    were full of NaN."""
    pages_of = [-(-len(text) // PAGE_TOKENS) for text in texts]
    ends = [sum(pages_of[: n + 1]) for n in range(len(texts))]
    shape = heads.num_kv, ends[-1], PAGE_TOKENS, heads.head_dim
    pages = KVPages.empty(shape, heads.kv_dtype, heads.dtype, heads.device)
    for each in pages.tensors:
        each.fill_(torch.nan if each.is_floating_point() else 99)
    done = [0] * len(texts)
    out = [text.new_empty(len(text), heads.num_heads, heads.head_dim) for text in texts]
    for step in steps:
        spans = [
            TokenSpan(done[n], count, tuple(range(ends[n] - pages_of[n], ends[n])))
            for n, count in step
        ]
        new = torch.cat([texts[n][done[n] : done[n] + count] for n, count in step])
        q, k, v = new.split((heads.num_heads, heads.num_kv, heads.num_kv), 1)
        batch = attention.batch(spans)
        found = attention.attend(q, k, v, None, pages, batch, window)
        for (n, count), part in zip(step, found.split([count for _, count in step]), strict=True):
            out[n][done[n] : done[n] + count] = part
            done[n] += count
    return out


def attention_fp64(text: Tensor, heads: AttentionShape, window: int | None) -> Tensor:
    """Return the definition in fp64, over keys and values as the cache stores them."""
    q, k, v = text.double().transpose(0, 1).split((heads.num_heads, heads.num_kv, heads.num_kv))
    if heads.kv_dtype != "auto":
        pairs = [quantize_vectors(x.float(), CODES[heads.kv_dtype]) for x in (k, v)]
        k, v = (codes.double() * scales.double()[..., None] for codes, scales in pairs)
    k, v = (x.repeat_interleave(heads.group, 0) for x in (k, v))
    position = torch.arange(len(text), device=text.device)
    distance = position[:, None] - position
    mask = (distance < 0) | (distance >= (window or len(text)))
    scores = (q @ k.transpose(1, 2) * heads.head_dim**-0.5).masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check_pointwise(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    for dtype in work.dtypes:
        kind = str(dtype)[6:]
        x = drawn((7, 576), dtype, work.device)
        weight = drawn((576,), dtype, work.device, 1)
        error = relative_error(kernels.rms_norm(x, weight, 1e-5), rms_norm_naive(x, weight, 1e-5))
        yield Result(f"norm, {kind}", error, "of the largest", error <= ERROR[dtype])
        for activation in ("silu", "gelu", "gelu_tanh"):
            inner = drawn((7, 2200), dtype, work.device)
            error = relative_error(kernels.gated(inner, activation), gated_naive(inner, activation))
            yield Result(
                f"gated {activation}, {kind}", error, "of the largest", error <= ERROR[dtype]
            )
        yield check_rope(work, dtype)
        yield from (check_codes(work, dtype, kv_dtype) for kv_dtype in CODES)


def check_rope(work: Work, dtype: torch.dtype) -> Result:
    from shardwise.kernels.triton.pointwise import rope_and_write_kv

    q, k, v = drawn((5, 15, 64), dtype, work.device).split((9, 3, 3), 1)
    angles = 10 * drawn((5, 1, 32), torch.float32, work.device)
    rope = RopeTables(angles.cos().to(dtype), angles.sin().to(dtype))
    pages = KVPages.empty((3, 2, PAGE_TOKENS, 64), "auto", dtype, work.device)
    slots = torch.tensor([20, 3, -1, 4, 31], dtype=torch.int32, device=work.device)
    rotated = rope_and_write_kv(q, k, v, rope, pages, slots)
    there = [0, 1, 3, 4]
    written = [each.flatten(1, 2)[:, slots[there].long()].transpose(0, 1) for each in pages.tensors]
    pairs = (
        (rotated, apply_rope_naive(q, *rope)),
        (written[0], apply_rope_naive(k, *rope)[there]),
        (written[1], v[there]),
    )
    error = max(relative_error(found, expected) for found, expected in pairs)
    return Result(
        f"RoPE and KV write, {str(dtype)[6:]}", error, "of the largest", error <= ERROR[dtype]
    )


def check_codes(work: Work, dtype: torch.dtype, kv_dtype: KvDtype) -> Result:
    """Compare the written codes and scales with their definition."""
    from shardwise.kernels.triton.pointwise import rope_and_write_kv

    q, k, v = drawn((40, 9, 80), dtype, work.device).split((3, 3, 3), 1)
    slots = torch.arange(40, dtype=torch.int32, device=work.device)
    found, expected = (
        KVPages.empty((3, 3, PAGE_TOKENS, 80), kv_dtype, dtype, work.device) for _ in range(2)
    )
    for pages in (found, expected):
        for each in pages.tensors:
            each.zero_()
    rope_and_write_kv(q, k, v, None, found, slots)
    expected.keys.write(slots.long(), k)
    expected.values.write(slots.long(), v)
    same = all(
        torch.equal(a.float(), b.float())
        for a, b in zip(found.tensors, expected.tensors, strict=True)
    )
    return Result(f"KV write in {kv_dtype}, {str(dtype)[6:]}", float(same), "", same)


def quantized(name: str, num_out: int, num_in: int, device: torch.device) -> QuantizedMatrix:
    return format.quantize(drawn((num_out, num_in), torch.float32, device), Scheme.parse(name))


def check_products(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    cases = [*product(work.products, SCHEMES, (torch.bfloat16,))]
    cases += product(work.products[:1], ("int4z-g128",), set(work.dtypes) - {torch.bfloat16})
    for (num_out, num_in), name, dtype in cases:
        held = quantized(name, num_out, num_in, work.device)
        head, table = kernels.pack_head(QuantizedWeight((held,)), dtype)
        x = drawn((300 if work.device.type == "cuda" else 40, num_in), dtype, work.device, 1)
        found = head.apply(x)
        error = relative_error(found, x.double() @ dequantize_fp64(held).t())
        label = f"product {num_in} -> {num_out}, {name}, {str(dtype)[6:]}"
        yield Result(label, error, "of the largest", error <= PRODUCT_ERROR)
        same = all(
            torch.equal(head.apply(x[-n:]), found[-n:]) for n in (1, 2, 16, 17, 33, 64, 65, 200)
        )
        yield Result(f"{label}: batch-invariant, tiles of {head.sizes}", float(same), "", same)
        ids = torch.tensor([5, 0, num_out - 1], device=work.device)
        error = relative_error(table.look_up(ids), dequantize(held, torch.float32)[ids])
        yield Result(f"rows of {label}", error, "of the largest", error <= ERROR[dtype])


def check_torch_products(work: Work) -> Iterator[Result]:
    for num_out, num_in in (
        ((960, 576), (576, 1536), (8192, 2048), (2048, 8192)) if work.device.type == "cuda" else ()
    ):
        weight = row_weights(
            {"blocks.0.out": drawn((num_out, num_in), torch.bfloat16, work.device)}
        )["blocks.0.out"]
        assert isinstance(weight, RowWeight)
        x = drawn((300, num_in), torch.bfloat16, work.device, 1)
        whole = weight.apply(x)
        same = all(
            torch.equal(weight.apply(x[-n:]), whole[-n:])
            for n in (1, 2, 3, 7, 8, 17, 33, 64, 100, 257)
        )
        yield Result(
            f"product {num_in} -> {num_out}: batch-invariant, rows {weight.sizes}",
            float(same),
            "",
            same,
        )


# Models.


@dataclass(frozen=True)
class Precision:
    """The quantization of weights and of the KV cache."""

    quant: str | None = None
    kv_dtype: KvDtype = "auto"


PRECISIONS = Precision(), Precision("int4-g32", "int8")


def runner_of(
    work: Work, config: ModelConfig, kernels: ServingKernels, num_pages: int, precision: Precision
) -> Runner:
    """Return a runner with random weights: norms of ones, matrices that preserve the scale of their
    inputs."""
    weights: dict[str, Tensor | QuantizedWeight] = {
        spec.name: drawn(spec.shape, torch.bfloat16, work.device, number) * spec.shape[-1] ** -0.5
        if len(spec.shape) == 2
        else torch.ones(spec.shape, dtype=torch.bfloat16, device=work.device)
        for number, spec in enumerate(model_specs(config))
        if not spec.tied_to
    }
    scheme = Scheme.parse(precision.quant) if precision.quant else None
    for spec in model_specs(config) if scheme else ():
        weight = weights.get(spec.name)
        if scheme and quantizable(spec) and isinstance(weight, Tensor):
            weights[spec.name] = QuantizedWeight((format.quantize(weight, scheme),))
    mesh = make_mesh(Layout(), 0, work.device, config.num_kv_heads)
    runner = Runner(config, weights, mesh, torch.bfloat16, PAGE_TOKENS, kernels, precision.kv_dtype)
    runner.make_pages(num_pages)
    return runner


def batch_entries(
    work: Work, config: ModelConfig, count: int, num_tokens: int, start: int
) -> list[BatchEntry]:
    """Return `num_tokens` tokens from position `start` of each of `count` sequences."""
    width = -(-(work.context + 1) // PAGE_TOKENS)
    tokens = torch.randint(
        config.vocab_size, (count, work.context + 1), generator=torch.Generator().manual_seed(0)
    )
    return [
        BatchEntry(
            n,
            tuple(row[start : start + num_tokens]),
            start,
            tuple(range(n * width, (n + 1) * width)),
            1,
            False,
        )
        for n, row in enumerate(tokens.tolist())
    ]


def run_models(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    num_pages = MAX_RUNNING * -(-(work.context + 1) // PAGE_TOKENS)
    for config, precision in product(work.models, PRECISIONS):
        name = f"{config.num_layers} layers of {config.hidden_size}"
        if precision.quant:
            name += f", {precision.quant}, KV cache in {precision.kv_dtype}"
        counts = (1, 8, MAX_RUNNING) if work.device.type == "cuda" else (1, 3)
        logits: dict[str, Tensor] = {}
        for kind, each in (("torch", REFERENCE), ("Triton", kernels)):
            runner = runner_of(work, config, each, num_pages, precision)
            for entry in batch_entries(work, config, counts[-1], work.context, 0):
                runner.run(Batch((entry,), ()))
            if work.device.type == "cuda":
                yield from time_model(work, runner, counts, f"{name}, {kind}")
            logits[kind] = decode_logits(work, runner, counts[-1])
            if each is kernels:
                start = time.perf_counter()
                runner.capture_graphs(counts[-1], work.context + 1, work.capture)
                yield Result(f"{name}: graphs captured", time.perf_counter() - start, "s")
                logits["graphs"] = decode_logits(work, runner, counts[-1])
                alone = decode_logits(work, runner, 1)
                same = torch.equal(logits["graphs"], logits["Triton"]) and torch.equal(
                    alone[0], logits["Triton"][0]
                )
                yield Result(f"{name}: bit-identical in graphs and alone", float(same), "", same)
                if work.device.type == "cuda":
                    yield from time_model(work, runner, counts, f"{name}, graphs", prefill=False)
            del runner
        error = relative_error(logits["Triton"], logits["torch"])
        yield Result(
            f"{name}: logits against torch's", error, "of the largest", error <= LOGITS_ERROR
        )


def decode_logits(work: Work, runner: Runner, count: int) -> Tensor:
    logits, _ = runner.run(
        Batch(tuple(batch_entries(work, runner.config, count, 1, work.context)), ())
    )
    return torch.stack(list(logits.values()))


def time_model(
    work: Work, runner: Runner, counts: Sequence[int], name: str, prefill: bool = True
) -> Iterator[Result]:
    if prefill:
        prompt = Batch(tuple(batch_entries(work, runner.config, 1, work.context, 0)), ())
        seconds = device_s(partial(runner.run, prompt))
        yield Result(f"{name}: prefill of {work.context}", work.context / seconds, "tokens/s")
    for count in counts:
        batch = Batch(tuple(batch_entries(work, runner.config, count, 1, work.context)), ())
        seconds = device_s(partial(runner.run, batch))
        yield Result(
            f"{name}: decode, {count} at {work.context} tokens", count / seconds, "tokens/s"
        )


# Speed.


def device_s(run: Callable[[], object], rounds: int = 15) -> float:
    """Return the median seconds of one run, launches included."""
    for _ in range(3):
        run()
    took = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def kernel_s(run: Callable[[], object], rounds: int = 20) -> float:
    """Return the device seconds per run, of many runs in a row."""
    run()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds / 1000


def time_attention(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    num_heads = 32
    num_kv = 8
    size = 128
    counts = (1, 1024), (1, 16384), (32, 1024), (32, 8192)
    for (count, context), kv_dtype in product(counts, get_args(KvDtype)):
        heads = AttentionShape(
            num_heads,
            num_kv,
            size,
            PAGE_TOKENS,
            frozenset([None]),
            torch.bfloat16,
            work.device,
            kv_dtype,
        )
        attention = kernels.paged_attention(heads)
        width = -(-context // PAGE_TOKENS)
        pages = KVPages.empty(
            (num_kv, count * width, PAGE_TOKENS, size), kv_dtype, torch.bfloat16, work.device
        )
        slots = torch.arange(count * width * PAGE_TOKENS, device=work.device)
        for vectors in (pages.keys, pages.values):
            vectors.write(slots, drawn((len(slots), num_kv, size), torch.bfloat16, work.device))
        spans = [
            TokenSpan(context - 1, 1, tuple(range(n * width, (n + 1) * width)))
            for n in range(count)
        ]
        q, k, v = drawn((count, num_heads + 2 * num_kv, size), torch.bfloat16, work.device).split(
            (32, 8, 8), 1
        )
        batch = attention.batch(spans)
        seconds = kernel_s(partial(attention.attend, q, k, v, None, pages, batch, None))
        name = f"attention, {count} tokens at {context}, kv_dtype {kv_dtype}"
        yield Result(name, 1e6 * seconds, "us")
        yield Result(name, sum(each.nbytes for each in pages.tensors) / seconds / 1e9, "GB/s")
    yield from time_prompt(work, kernels)


def time_prompt(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    num_heads = 32
    num_kv = 8
    size = 128
    num_tokens = 4096
    num_pages = num_tokens // PAGE_TOKENS
    q, k, v = drawn((num_tokens, num_heads + 2 * num_kv, size), torch.bfloat16, work.device).split(
        (32, 8, 8), 1
    )
    flops = 2 * num_heads * num_tokens**2 * size  # half of the scores are masked
    for kv_dtype in get_args(KvDtype):
        heads = AttentionShape(
            num_heads,
            num_kv,
            size,
            PAGE_TOKENS,
            frozenset([None]),
            torch.bfloat16,
            work.device,
            kv_dtype,
        )
        attention = kernels.paged_attention(heads)
        pages = KVPages.empty(
            (num_kv, num_pages, PAGE_TOKENS, size), kv_dtype, torch.bfloat16, work.device
        )
        batch = attention.batch([TokenSpan(0, num_tokens, tuple(range(num_pages)))])
        ours = kernel_s(partial(attention.attend, q, k, v, None, pages, batch, None), 5)
        yield Result(
            f"attention of {num_tokens} tokens, kv_dtype {kv_dtype}", flops / ours / 1e12, "TFLOP/s"
        )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    theirs = kernel_s(
        partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True), 5
    )
    yield Result("the same by torch, not paged", flops / theirs / 1e12, "TFLOP/s")


def time_products(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    """Measure products with integers, in Triton and in torch, and in bf16 with cuBLAS: bytes of the
    weight read per second for few rows, operations for many."""
    num_out = 4096
    num_in = 4096
    norm = torch.ones(1, dtype=torch.bfloat16, device=work.device)
    plain = drawn((num_out, num_in), torch.bfloat16, work.device)
    rows = [drawn((count, num_in), torch.bfloat16, work.device) for count in (1, 16, 64, 512, 4096)]
    products: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "bf16 by cuBLAS": (partial(F.linear, weight=plain), plain.nbytes)
    }
    for name in SCHEMES:
        held = quantized(name, num_out, num_in, work.device)
        weights: dict[str, Tensor | QuantizedWeight] = {
            "blocks.0.out": QuantizedWeight((held,)),
            "norm": norm,
        }
        theirs = row_quantized(weights)["blocks.0.out"]
        ours = kernels.pack_weights(dict(weights))["blocks.0.out"]
        products |= {
            name: (ours.apply, held.num_bytes),
            f"{name} by torch": (theirs.apply, held.num_bytes),
        }
    for name, (run, num_bytes) in products.items():
        for x in rows:
            seconds = kernel_s(partial(run, x))
            label = f"product of {len(x)} rows, {num_in} -> {num_out}, {name}"
            few = len(x) <= 64
            rate = num_bytes / 1e9 if few else 2 * len(x) * num_out * num_in / 1e12
            yield Result(label, rate / seconds, "GB/s" if few else "TFLOP/s")


def time_pointwise(work: Work, kernels: ServingKernels) -> Iterator[Result]:
    x = drawn((2048, 4096), torch.bfloat16, work.device)
    weight = drawn((4096,), torch.bfloat16, work.device)
    inner = drawn((2048, 2 * 8192), torch.bfloat16, work.device)
    for name, num_bytes, run, theirs in (
        (
            "norm",
            2 * x.nbytes,
            lambda: kernels.rms_norm(x, weight, 1e-5),
            lambda: REFERENCE.rms_norm(x, weight, 1e-5),
        ),
        (
            "gated",
            1.5 * inner.nbytes,
            lambda: kernels.gated(inner, "silu"),
            lambda: REFERENCE.gated(inner, "silu"),
        ),
    ):
        yield Result(name, num_bytes / kernel_s(run) / 1e9, "GB/s")
        yield Result(f"{name} by torch", num_bytes / kernel_s(theirs) / 1e9, "GB/s")


@torch.inference_mode()
def run_all(work: Work) -> Iterator[Result]:
    kernels = triton_kernels()
    yield from check_pointwise(work, kernels)
    yield from check_torch_products(work)
    yield from check_products(work, kernels)
    yield from check_attention(work, kernels)
    if work.device.type == "cuda":
        yield from time_pointwise(work, kernels)
        yield from time_products(work, kernels)
        yield from time_attention(work, kernels)
    yield from run_models(work, kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="only check correctness, on a CPU, in Triton's interpreter",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif not torch.cuda.is_available():
        print(
            "bench/gpu.py: no GPU found; --interpret checks the kernels on a CPU", file=sys.stderr
        )
        return 2
    work = interpreted() if args.interpret else on_gpu(torch.device("cuda", 0))
    where = "Triton's interpreter" if args.interpret else torch.cuda.get_device_name(0)
    rows = []
    for row in run_all(work):
        rows.append(row)
        print(f"gpu: {row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    ok = all(row.ok is not False for row in rows)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ok": ok, "machine": where}))
    else:
        table = Table("what", "measured", "", title=f"{where}, torch {torch.__version__}")
        for row in rows:
            verdict = {None: "", True: "ok", False: "FAILED"}[row.ok]
            table.add_row(row.name, f"{row.value:.4g} {row.unit}", verdict)
        Console().print(table)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
