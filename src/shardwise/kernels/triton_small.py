"""The small operations of a block in Triton: each reads and writes memory once. Their definitions are in `norm.py`,
`gated.py`, `rotary.py` and `paged.write_pages`; what they compute is computed in fp32 and rounded where those round.

Every row is computed by itself and in one way, so its bits do not depend on its company.

Shapes: N tokens, D model, F ffn, H query heads, K kv heads, P tokens of a page, C head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.choice import Turns

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
    out, width = torch.empty_like(x), x.shape[-1]
    size = triton.next_power_of_2(width)
    norm_kernel[(x.numel() // width,)](x, weight, out, eps, WIDTH=width, PADDED=size, num_warps=warps(size))
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
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
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
def turn_and_write_kernel(
    q, k, v, cos, sin, turned, keys, values, slots, q_token, q_head, k_token, k_head, v_token, v_head, kv_head,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Program (token, head), query heads first: turns a query, or turns a key and writes it and its value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    is_query = head < QUERIES
    kv = head - QUERIES
    source = q + token * q_token + head * q_head if is_query else k + token * k_token + kv * k_head
    slot = tl.load(slots + token).to(tl.int64)
    place = kv.to(tl.int64) * kv_head + slot * SIZE
    target = turned + (token * QUERIES + head) * SIZE if is_query else keys + place
    written = is_query | (slot >= 0)
    if TURNS:
        pair = tl.arange(0, HALF)
        both = pair < SIZE // 2
        low, high = (
            tl.load(source + pair, mask=both, other=0.0),
            tl.load(source + SIZE // 2 + pair, mask=both, other=0.0),
        )
        c = tl.load(cos + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        s = tl.load(sin + token * (SIZE // 2) + pair, mask=both, other=0.0).to(tl.float32)
        tl.store(target + pair, turned_half(low, high, c, s, -1), mask=both & written)
        tl.store(target + SIZE // 2 + pair, turned_half(high, low, c, s, 1), mask=both & written)
    else:
        tl.store(target + element, tl.load(source + element, mask=inside, other=0.0), mask=inside & written)
    if not is_query:
        value = tl.load(v + token * v_token + kv * v_head + element, mask=inside, other=0.0)
        tl.store(values + place + element, value, mask=inside & written)


def turn_and_write(
    q: Tensor, k: Tensor, v: Tensor, turns: Turns | None, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Turn k [N, K, C] and put it and v into the slots [N] of the pages [K, pages, P, C]; a slot below 0 is nowhere.
    Returns q [N, H, C] turned. Without `turns` nothing is turned."""
    (num_tokens, num_heads, size), num_kv = q.shape, k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and keys.is_contiguous() and values.is_contiguous()
    num_turned = 0 if turns is None else num_heads
    turned = q if turns is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if turns is None else (turns[0].contiguous(), turns[1].contiguous())
    size_padded = triton.next_power_of_2(size)
    turn_and_write_kernel[(num_tokens, num_turned + num_kv)](
        q, k, v, cos, sin, turned, keys, values, slots, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        keys.stride(0), QUERIES=num_turned, SIZE=size, PADDED=size_padded,
        HALF=max(1, size_padded // 2), TURNS=turns is not None, num_warps=1,
    )  # fmt: skip
    return turned


def warps(columns: int) -> int:
    """Of a program that holds a row of so many columns."""
    return min(16, max(1, columns // 256))
