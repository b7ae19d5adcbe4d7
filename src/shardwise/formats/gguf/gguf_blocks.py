"""Quantized matrices as the blocks of GGUF files: scales and minima that fit them, and their bytes.

A block is 32 columns of a row: the scale in fp16, of Q4_1 the minimum in fp16, then the codes (see
`gguf.py`).
"""

import torch
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, codes_of, grouped
from shardwise.quant.scheme import Scheme

BLOCK_COLUMNS = 32


def choose_block_scales(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales in fp16 and, with an offset, the least weight of each block as its minimum. Codes of 8
    bits leave out -128, since some kernels multiply magnitudes."""
    groups = grouped(weight, scheme).float()
    if scheme.zero:
        low = groups.amin(-1)
        high = groups.amax(-1)
        return usable((high - low) / (scheme.levels - 1)), low.half()
    num_steps = 127 if scheme.bits == 8 else (scheme.levels - 1) / 2
    return usable(groups.abs().amax(-1) / num_steps), None


def usable(scales: Tensor) -> Tensor:
    """In fp16, and 1 where nothing is to be scaled. Raises ValueError for what fp16 cannot hold."""
    rounded = scales.half()
    if not rounded.isfinite().all():
        raise ValueError(
            "a block of weights is too large for GGUF, whose scales are fp16; a folder's can be: --quant int8"
        )
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def to_blocks(quantized: QuantizedMatrix) -> Tensor:
    """The bytes [N, bytes of a row] of a matrix of one of the schemes in `GGUF_SCHEMES`, with
    scales in fp16."""
    scheme = quantized.scheme
    assert scheme.group == BLOCK_COLUMNS and quantized.scales.dtype == torch.float16
    codes = codes_of(quantized).unflatten(1, (-1, BLOCK_COLUMNS))
    if scheme.bits == 8:
        stored = codes.view(torch.uint8)
    else:
        low, high = (codes + scheme.implicit_zero).to(torch.uint8).split(BLOCK_COLUMNS // 2, -1)
        stored = low | high << 4
    heads = [quantized.scales] if quantized.zeros is None else [quantized.scales, quantized.zeros]
    assert all(each.dtype == torch.float16 for each in heads)
    return torch.cat(
        [*(each.contiguous().view(torch.uint8).unflatten(1, (-1, 2)) for each in heads), stored], -1
    ).flatten(1)
