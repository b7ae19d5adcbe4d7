"""Pointwise and row-wise operations of a block in Triton. Each reads and writes memory once.

The definitions are in `reference/norm.py`, `gated.py` and `rope.py`, and in `kv_cache.py`. The
kernels compute in fp32 and round where the definitions do. Every row is computed by itself, always
in the same way, so they are batch-invariant.

Shapes: N tokens, D model, F ffn, H query heads, K kv heads, P tokens of a page, C head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import CODES, LARGEST, KVPages, as_bytes
from shardwise.quant.kv_dtype import KvDtype

COLUMNS = 1024
"""Columns of a gated activation per program."""


@triton.jit
def norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    x_fp32 = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / WIDTH + eps)
    normed = (x_fp32 * scale).to(out.dtype.element_ty).to(tl.float32)
    times = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, times * normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `reference.norm.rms_norm_naive` of x [..., D] and weight [D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    padded = triton.next_power_of_2(width)
    norm_kernel[(x.numel() // width,)](
        x, weight, out, eps, WIDTH=width, PADDED=padded, num_warps=row_warps(padded)
    )
    return out


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply silu, gelu or gelu_tanh; the tanh is written as a sigmoid."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_kernel(inner, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gate = tl.load(inner + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated = activate(gate, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, activated * up, mask=inside)


def gated(inner: Tensor, activation: str) -> Tensor:
    """Compute `reference.gated.gated_naive` of inner [..., gate | up]: [..., F]."""
    inner = inner.contiguous()
    width = inner.shape[-1] // 2
    out = inner.new_empty(*inner.shape[:-1], width)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = inner.numel() // (2 * width), triton.cdiv(width, columns)
    gated_kernel[grid](inner, out, WIDTH=width, COLUMNS=columns, KIND=activation, num_warps=4)
    return out


@triton.jit
def rotated_half(a, b, cos, sin, DIRECTION: tl.constexpr):
    return (a.to(tl.float32) * cos + DIRECTION * b.to(tl.float32) * sin).to(a.dtype)


@triton.jit
def vector_scale(x, CODE_MAX: tl.constexpr):
    """Return the scale of a vector, as `kv_cache.quantize_vectors` does; infinite if any number is
    NaN."""
    x_fp32 = x.to(tl.float32)
    size = tl.where(x_fp32 == x_fp32, tl.abs(x_fp32), float("inf"))
    return tl.div_rn(tl.max(size, 0), CODE_MAX)


@triton.jit
def e4m3_bits(x):
    """Round numbers up to 448 to the nearest e4m3, ties to even, by shortening the mantissa and the
    exponent of fp32. Numbers below 2^-6 become zero."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nearest = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (127 - 7) * 8
    return tl.where(tl.abs(x) < 0.015625, 0, nearest | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def write_codes(x, scale, codes, offset, mask, KV_DTYPE: tl.constexpr, CODE_MAX: tl.constexpr):
    """Write the codes of numbers, as `kv_cache.quantize_vectors` computes them; 0 where the scale
    is not finite."""
    steps = tl.div_rn(x.to(tl.float32), scale)
    steps = tl.minimum(tl.maximum(tl.where(steps == steps, steps, 0.0), -CODE_MAX), CODE_MAX)
    if KV_DTYPE == "int8":
        steps = steps + 12582912.0 - 12582912.0  # 1.5 * 2^23, where fp32 has only integers
        tl.store(codes + offset, steps.to(tl.int8), mask=mask)
    else:
        tl.store(codes + offset, e4m3_bits(steps), mask=mask)


@triton.jit
def write_vector(
    x,
    codes,
    scales,
    vector,
    element,
    inside,
    has_slot,
    SIZE: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    CODE_MAX: tl.constexpr,
):
    """Write the codes and the scale of the vector that starts at offset `vector`."""
    scale = vector_scale(x, CODE_MAX)
    write_codes(x, scale, codes, vector + element, inside & has_slot, KV_DTYPE, CODE_MAX)
    tl.store(scales + vector // SIZE, scale, mask=has_slot)


@triton.jit
def rope_and_write_kv_kernel(
    q,
    k,
    v,
    cos,
    sin,
    rotated,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_head,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    CODE_MAX: tl.constexpr,
):
    """Program (token, head), query heads first: rotates a query, or rotates a key and writes it and
    its value into the pages."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    is_query = head < QUERIES
    kv = head - QUERIES
    source = q + token * q_token + head * q_head if is_query else k + token * k_token + kv * k_head
    slot = tl.load(slots + token).to(tl.int64)
    vector = kv.to(tl.int64) * kv_head + slot * SIZE
    has_slot = slot >= 0
    if ROPE:
        pair = tl.arange(0, HALF)
        both = pair < SIZE // 2
        low = tl.load(source + pair, mask=both, other=0.0)
        high = tl.load(source + SIZE // 2 + pair, mask=both, other=0.0)
        c = tl.load(cos + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        s = tl.load(sin + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        first = rotated_half(low, high, c, s, -1)
        second = rotated_half(high, low, c, s, 1)
        if is_query:
            target = rotated + (token * QUERIES + head) * SIZE
            tl.store(target + pair, first, mask=both)
            tl.store(target + SIZE // 2 + pair, second, mask=both)
        elif KV_DTYPE == "auto":
            tl.store(keys + vector + pair, first, mask=both & has_slot)
            tl.store(keys + vector + SIZE // 2 + pair, second, mask=both & has_slot)
        else:
            mask = both & has_slot
            scale = tl.maximum(vector_scale(first, CODE_MAX), vector_scale(second, CODE_MAX))
            write_codes(first, scale, keys, vector + pair, mask, KV_DTYPE, CODE_MAX)
            write_codes(second, scale, keys, vector + SIZE // 2 + pair, mask, KV_DTYPE, CODE_MAX)
            tl.store(key_scales + vector // SIZE, scale, mask=has_slot)
    else:
        key = tl.load(source + element, mask=inside, other=0.0)
        if KV_DTYPE == "auto":
            tl.store(keys + vector + element, key, mask=inside & has_slot)
        else:
            write_vector(
                key, keys, key_scales, vector, element, inside, has_slot, SIZE, KV_DTYPE, CODE_MAX
            )
    if not is_query:
        value = tl.load(v + token * v_token + kv * v_head + element, mask=inside, other=0.0)
        if KV_DTYPE == "auto":
            tl.store(values + vector + element, value, mask=inside & has_slot)
        else:
            write_vector(
                value,
                values,
                value_scales,
                vector,
                element,
                inside,
                has_slot,
                SIZE,
                KV_DTYPE,
                CODE_MAX,
            )


def rope_and_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rope: RopeTables | None, pages: KVPages, slots: Tensor
) -> Tensor:
    """Apply RoPE to q [N, H, C] and k [N, K, C], write k and v [N, K, C] into the slots [N] of the
    pages, in their dtype, and return q.

    Tokens with a slot below 0 are not written. Without `rope` nothing is rotated.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    num_queries = 0 if rope is None else num_heads
    rotated = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if rope is None else (rope.cos.contiguous(), rope.sin.contiguous())
    padded = triton.next_power_of_2(head_dim)
    rope_and_write_kv_kernel[(num_tokens, num_queries + num_kv)](
        q,
        k,
        v,
        cos,
        sin,
        rotated,
        *page_operands(pages),
        slots,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        pages.keys.numbers.stride(0),
        QUERIES=num_queries,
        SIZE=head_dim,
        PADDED=padded,
        HALF=max(1, padded // 2),
        ROPE=rope is not None,
        KV_DTYPE=kv_dtype_of(pages),
        CODE_MAX=LARGEST.get(pages.keys.numbers.dtype, 1.0),
        num_warps=1,
    )
    return rotated


def kv_dtype_of(pages: KVPages) -> KvDtype:
    """Return the format of keys and values."""
    dtype = pages.keys.numbers.dtype
    return next((kv_dtype for kv_dtype, codes in CODES.items() if codes == dtype), "auto")


def page_operands(pages: KVPages) -> tuple[Tensor, ...]:
    """Return keys, values and their scales as kernels take them.

    fp8 codes are bytes, which every GPU can read. Without scales other tensors take their place.
    """
    both = pages.keys, pages.values
    is_fp8 = kv_dtype_of(pages) == "fp8"
    keys, values = (as_bytes(each.numbers) if is_fp8 else each.numbers for each in both)
    assert keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
    return keys, values, *(keys if each.scales is None else each.scales for each in both)


def row_warps(columns: int) -> int:
    """Return the warps of a program that holds a row of that many columns."""
    return min(16, max(1, columns // 256))
