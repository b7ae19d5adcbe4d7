"""Decoders of the block formats of GGUF.

Every tensor type splits a row into blocks of N weights. A block stores small integers q and the
values that they share:

    Q8_0 Q4_0 Q5_0   w = d q         N = 32    d: one f16 scale
    Q4_1 Q5_1        w = d q + m     N = 32    m: one f16 minimum; q need not be symmetric
    Q2_K .. Q6_K     w = d s q [- dmin t]      N = 256 in sub-blocks of 16 or 32, each with its own
                                               integers s, t; d and dmin: f16 scales of them

The digit in a name is the bits of q; with the scales, Q4_0 and Q4_K take 4.5 bits per weight and
Q4_1 takes 5. The q of Q4_0, Q5_0, Q3_K and Q6_K are signed, but stored with half their range added,
as unsigned bits. The order of the bits follows the structs in ggml-common.h and the
`dequantize_row_*` functions in ggml-quants.c of https://github.com/ggml-org/ggml; the docstring of
each decoder describes it. Typical is "byte j holds weights j and j+16": one wide register then
splits off the low halves of 16 bytes at once, and another the high halves.

Shapes: N blocks. Each decoder takes the uint8 bytes of whole blocks (N, bytes of a block) and
returns float32 weights (N, weights of a block), with the operations in the order of the reference,
so that results are bit-identical.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from shardwise.quant.ggml import BLOCKS

_SLICE_ELEMENTS = 1 << 17
"""Weights decoded at once, a multiple of every block size: the temporaries, about 8 bytes per
weight, then fit in a cache."""


def decode_blocks(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Decode the bytes of whole blocks, in row order, into float32 of the given shape.

    `raw` is uint8 of any shape, `kind` a key of `BLOCKS`. Temporaries are bounded. Raises
    ValueError for an unknown kind and for a number of bytes that does not match the shape.
    """
    if kind not in BLOCKS:
        raise ValueError(f"unknown GGUF tensor type {kind}; supported: {', '.join(BLOCKS)}")
    block = BLOCKS[kind]
    num_elements = prod(shape)
    num_bytes = num_elements // block.num_elements * block.num_bytes
    if num_elements % block.num_elements or raw.dtype != torch.uint8 or raw.numel() != num_bytes:
        raise ValueError(
            f"{raw.numel()} elements of {raw.dtype} do not hold {tuple(shape)} weights of {kind}, "
            f"whose blocks hold {block.num_elements} weights in {block.num_bytes} bytes"
        )
    out = torch.empty(shape, dtype=torch.float32, device=raw.device)
    flat = out.view(-1)
    flat_raw = raw.reshape(-1)
    for elements, stored in block_slices(num_elements, kind):
        flat[elements] = decode_slice(flat_raw[stored], kind)
    return out


def block_slices(num_elements: int, kind: str) -> Iterator[tuple[slice, slice]]:
    """Split weights into slices of whole blocks, and yield each with its slice of bytes."""
    block = BLOCKS[kind]
    for start in range(0, num_elements, _SLICE_ELEMENTS):
        stop = min(start + _SLICE_ELEMENTS, num_elements)
        first, last = (at // block.num_elements * block.num_bytes for at in (start, stop))
        yield slice(start, stop), slice(first, last)


def decode_slice(raw: Tensor, kind: str) -> Tensor:
    """Decode the bytes of whole blocks into flat float32 weights."""
    return _DECODERS[kind](raw.view(-1, BLOCKS[kind].num_bytes)).view(-1)


def _float(blocks: Tensor, start: int) -> Tensor:
    """Return the f16 at byte `start` of every block, in float32: (N, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, num_bits: int) -> Tensor:
    """Split bytes (..., W) into fields of `num_bits`, lowest first: (..., 8 / num_bits, W) of
    uint8."""
    mask = (1 << num_bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, num_bits)], dim=-2)


# Unquantized types


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


# Blocks of 32 weights


def _q8_0(blocks: Tensor) -> Tensor:
    """d f16, then 32 signed bytes q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_float(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    """d f16, then 16 bytes: byte j holds weight j in its low half and weight j+16 in its high half,
    both as q + 8."""
    q = _fields(blocks[:, 2:], 4).view(-1, 32)
    return q.float().sub_(8).mul_(_float(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, then 16 bytes of halves as in Q4_0, but q itself, 0 to 15."""
    q = _fields(blocks[:, 4:], 4).view(-1, 32)
    return q.float().mul_(_float(blocks, 0)).add_(_float(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    """d f16, the fifth bits (see _five_bits), then 16 bytes of halves as in Q4_0; stored as q +
    16."""
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    return q.float().sub_(16).mul_(_float(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, the fifth bits (see _five_bits), then 16 bytes of halves as in Q4_0; q itself,
    0 to 31."""
    q = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return q.float().mul_(_float(blocks, 0)).add_(_float(blocks, 2))


def _five_bits(high: Tensor, halves: Tensor) -> Tensor:
    """Join halves (N, 16) with fifth bits (N, 4): bit i of the 32-bit little-endian word belongs to
    weight i."""
    fifth = _fields(high.unsqueeze(-1), 1).view(-1, 32)
    return _fields(halves, 4).view(-1, 32) | (fifth << 4)


# Super-blocks of 256 weights


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of scales, 64 bytes of q, d f16, dmin f16; sub-blocks of 16 weights.

    Scale byte i holds s in its low half and t in its high half, for weights 16i to 16i+15. The
    weights come in two halves of 128 with 32 bytes of q each: byte j of a half holds its weights j,
    j+32, j+64 and j+96, two bits each.
    """
    scales = _fields(blocks[:, :16], 4).float()
    scale = scales[:, 0] * _float(blocks, 80)
    minimum = scales[:, 1] * _float(blocks, 82)
    q = _fields(blocks[:, 16:80].view(-1, 2, 32), 2).view(-1, 16, 16)
    return q.float().mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1)).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits, 64 bytes of low bits, 12 bytes of scales, d f16; sub-blocks of 16
    weights.

    The low two bits lie as in Q2_K. Bit g of third-bit byte j belongs to weight 32g + j; q is
    stored as q + 4. The 16 scales have six bits, stored as s + 32: the low four in the halves of
    bytes 0-7 (scale i low in byte i, scale i+8 high), the top two in bytes 8-11 (byte 8+i holds
    those of scales i, i+4, i+8 and i+12).
    """
    low = _fields(blocks[:, 96:104], 4).view(-1, 16)
    top = _fields(blocks[:, 104:108], 2).view(-1, 16)
    scale = (low | (top << 4)).float().sub_(32).mul_(_float(blocks, 108))
    third = _fields(blocks[:, :32], 1).view(-1, 16, 16)
    q = _fields(blocks[:, 32:96].view(-1, 2, 32), 2).view(-1, 16, 16) | (third << 2)
    return q.float().sub_(4).mul_(scale.unsqueeze(-1)).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    """d f16, dmin f16, 12 bytes of scales (see _scales_and_minima), 128 bytes of q; sub-blocks of
    32 weights.

    Each 32 bytes of q hold 64 weights: byte j weight j in its low half, weight j+32 in its high
    half.
    """
    scale, minimum = _scales_and_minima(blocks)
    q = _fields(blocks[:, 16:].view(-1, 4, 32), 4).view(-1, 8, 32)
    return q.float().mul_(scale).sub_(minimum).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    """Q4_K with 32 bytes of fifth bits before q: bit g of byte j belongs to weight 32g + j."""
    scale, minimum = _scales_and_minima(blocks)
    fifth = _fields(blocks[:, 16:48], 1)
    q = _fields(blocks[:, 48:].view(-1, 4, 32), 4).view(-1, 8, 32) | (fifth << 4)
    return q.float().mul_(scale).sub_(minimum).view(-1, 256)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return d s and dmin t of the eight sub-blocks of Q4_K and Q5_K, each (N, 8, 1).

    s and t have six bits. Of the 12 bytes, the low six bits of 0-3 are s of sub-blocks 0-3, those
    of 4-7 are t of 0-3. Sub-blocks 4-7 have their low four bits in bytes 8-11, s in the low halves
    and t in the high ones, and their top two bits in the free bits of bytes 0-3 (s) and 4-7 (t).
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    s = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    t = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    scale = s.float().mul_(_float(blocks, 0))
    minimum = t.float().mul_(_float(blocks, 2))
    return scale.unsqueeze(-1), minimum.unsqueeze(-1)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low halves, 64 bytes of top bits, 16 signed bytes of scales, d f16; sub-blocks
    of 16 weights.

    The weights come in two halves of 128. Of a half's 64 bytes of low halves, byte j holds weight j
    low and weight j+64 high; of its 32 bytes of top bits, byte j holds those of weights j, j+32,
    j+64 and j+96. Stored as q + 32.
    """
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_float(blocks, 208))
    low = _fields(blocks[:, :128].view(-1, 2, 64), 4).view(-1, 16, 16)
    top = _fields(blocks[:, 128:192].view(-1, 2, 32), 2).view(-1, 16, 16)
    q = low | (top << 4)
    return q.float().sub_(32).mul_(scale.unsqueeze(-1)).view(-1, 256)


def _q8_k(blocks: Tensor) -> Tensor:
    """d f32, 256 signed bytes q, then 16 sums of q that only matmuls use."""
    d = blocks[:, :4].contiguous().view(torch.float32)
    return blocks[:, 4:260].view(torch.int8).float().mul_(d)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
}
