"""The small operations of a block in Triton: each reads and writes memory once. Their definitions
are in `norm.py`, `gated.py`, `rotary.py` and `kv.py`; what they compute is computed in fp32 and
rounded where those round.

Every row is computed by itself and in one way, so its bits do not depend on its company.

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
"""Columns of a gated activation that a program makes."""


@triton.jit
def norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    wide = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    times = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, times * normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, in fp32, times weight [D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    size = triton.next_power_of_2(width)
    norm_kernel[(x.numel() // width,)](
        x, weight, out, eps, WIDTH=width, PADDED=size, num_warps=warps(size)
    )
    return out


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, gelu or gelu_tanh, whose tanh is a sigmoid of twice as much."""
    if KIND == "silu":
        made = x * tl.sigmoid(x)
    elif KIND == "gelu":
        made = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        made = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return made


@triton.jit
def gated_kernel(inner, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gate = tl.load(inner + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    made = activated(gate, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, made * up, mask=inside)


def gated(inner: Tensor, activation: str) -> Tensor:
    """inner [..., gate | up], each of F -> [..., F]: activation(gate) * up."""
    inner = inner.contiguous()
    width = inner.shape[-1] // 2
    out = inner.new_empty(*inner.shape[:-1], width)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = inner.numel() // (2 * width), triton.cdiv(width, columns)
    gated_kernel[grid](inner, out, WIDTH=width, COLUMNS=columns, KIND=activation, num_warps=4)
    return out


@triton.jit
def turned_half(a, b, cos, sin, DIRECTION: tl.constexpr):
    return (a.to(tl.float32) * cos + DIRECTION * b.to(tl.float32) * sin).to(a.dtype)


@triton.jit
def scale_of(x, CODE_MAX: tl.constexpr):
    """What takes the largest of a vector to the largest code, as `kv.quantize` has it; infinite if
    any is no number."""
    wide = x.to(tl.float32)
    return tl.div_rn(tl.max(tl.where(wide == wide, tl.abs(wide), float("inf")), 0), CODE_MAX)


@triton.jit
def bits_of_e4m3(x):
    """The nearest floats of 8 bits, of two the even one, of numbers up to 448: those of fp32 with a
    shorter mantissa and a smaller exponent. Below 2^-6 there is only zero."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nearest = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (127 - 7) * 8
    return tl.where(tl.abs(x) < 0.015625, 0, nearest | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def write_codes(x, scale, codes, at, mask, KEPT: tl.constexpr, CODE_MAX: tl.constexpr):
    """Codes of numbers, as `kv.quantize` makes them; 0 where the scale is not finite."""
    steps = tl.div_rn(x.to(tl.float32), scale)
    steps = tl.minimum(tl.maximum(tl.where(steps == steps, steps, 0.0), -CODE_MAX), CODE_MAX)
    if KEPT == "int8":
        steps = steps + 12582912.0 - 12582912.0  # 1.5 2^23, above which fp32 has integers alone
        tl.store(codes + at, steps.to(tl.int8), mask=mask)
    else:
        tl.store(codes + at, bits_of_e4m3(steps), mask=mask)


@triton.jit
def write_vector(
    x,
    codes,
    scales,
    place,
    element,
    inside,
    written,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    CODE_MAX: tl.constexpr,
):
    scale = scale_of(x, CODE_MAX)
    write_codes(x, scale, codes, place + element, inside & written, KEPT, CODE_MAX)
    tl.store(scales + place // SIZE, scale, mask=written)


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
    TURNS: tl.constexpr,
    KEPT: tl.constexpr,
    CODE_MAX: tl.constexpr,
):
    """Program (token, head), query heads first: rope a query, or rope a key and writes it and its
    value."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    is_query = head < QUERIES
    kv = head - QUERIES
    source = q + token * q_token + head * q_head if is_query else k + token * k_token + kv * k_head
    slot = tl.load(slots + token).to(tl.int64)
    place = kv.to(tl.int64) * kv_head + slot * SIZE
    written = slot >= 0
    if TURNS:
        pair = tl.arange(0, HALF)
        both = pair < SIZE // 2
        low = tl.load(source + pair, mask=both, other=0.0)
        high = tl.load(source + SIZE // 2 + pair, mask=both, other=0.0)
        c = tl.load(cos + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        s = tl.load(sin + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        first = turned_half(low, high, c, s, -1)
        second = turned_half(high, low, c, s, 1)
        if is_query:
            target = rotated + (token * QUERIES + head) * SIZE
            tl.store(target + pair, first, mask=both)
            tl.store(target + SIZE // 2 + pair, second, mask=both)
        elif KEPT == "auto":
            tl.store(keys + place + pair, first, mask=both & written)
            tl.store(keys + place + SIZE // 2 + pair, second, mask=both & written)
        else:
            scale = tl.maximum(scale_of(first, CODE_MAX), scale_of(second, CODE_MAX))
            write_codes(first, scale, keys, place + pair, both & written, KEPT, CODE_MAX)
            write_codes(
                second, scale, keys, place + SIZE // 2 + pair, both & written, KEPT, CODE_MAX
            )
            tl.store(key_scales + place // SIZE, scale, mask=written)
    else:
        key = tl.load(source + element, mask=inside, other=0.0)
        if KEPT == "auto":
            tl.store(keys + place + element, key, mask=inside & written)
        else:
            write_vector(
                key, keys, key_scales, place, element, inside, written, SIZE, KEPT, CODE_MAX
            )
    if not is_query:
        value = tl.load(v + token * v_token + kv * v_head + element, mask=inside, other=0.0)
        if KEPT == "auto":
            tl.store(values + place + element, value, mask=inside & written)
        else:
            write_vector(
                value, values, value_scales, place, element, inside, written, SIZE, KEPT, CODE_MAX
            )


def rope_and_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rope: RopeTables | None, pages: KVPages, slots: Tensor
) -> Tensor:
    """Turn k [N, K, C] and put it and v into the slots [N] of the pages, as these keep them; a slot
    below 0 is nowhere. Returns q [N, H, C] rotated. Without `rope` nothing is rotated."""
    num_tokens, num_heads, size = q.shape
    num_kv = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    num_turned = 0 if rope is None else num_heads
    rotated = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if rope is None else (rope[0].contiguous(), rope[1].contiguous())
    size_padded = triton.next_power_of_2(size)
    kept_as = kind_of(pages)
    rope_and_write_kv_kernel[(num_tokens, num_turned + num_kv)](
        q,
        k,
        v,
        cos,
        sin,
        rotated,
        *operands(pages),
        slots,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        pages.keys.numbers.stride(0),
        QUERIES=num_turned,
        SIZE=size,
        PADDED=size_padded,
        HALF=max(1, size_padded // 2),
        TURNS=rope is not None,
        KEPT=kept_as,
        CODE_MAX=LARGEST.get(pages.keys.numbers.dtype, 1.0),
        num_warps=1,
    )
    return rotated


def kind_of(pages: KVPages) -> KvDtype:
    """What keys and values are kept as."""
    found = pages.keys.numbers.dtype
    return next((kind for kind, codes in CODES.items() if codes == found), "auto")


def operands(pages: KVPages) -> tuple[Tensor, ...]:
    """Keys, values, and their scales, as kernels take them: floats of 8 bits as their bytes, which
    every GPU reads; and anything in place of scales that are not there."""
    both = pages.keys, pages.values
    keys, values = (
        each.numbers if kind_of(pages) != "fp8" else as_bytes(each.numbers) for each in both
    )
    assert keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
    return keys, values, *(keys if each.scales is None else each.scales for each in both)


def warps(columns: int) -> int:
    """Of a program that holds a row of so many columns."""
    return min(16, max(1, columns // 256))
