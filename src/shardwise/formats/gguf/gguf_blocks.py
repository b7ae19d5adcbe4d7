"""Writing quantized matrices as blocks of GGUF files: their scales and minima, and their bytes.

A block is 32 columns of a row: a scale in fp16, for Q4_1 a minimum in fp16, then the codes (see
`quant/ggml_decode.py`).
"""

import torch
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, codes_of, grouped
from shardwise.quant.scheme import Scheme

BLOCK_COLUMNS = 32


def choose_block_scales(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return scales [N, blocks] in fp16 and, for asymmetric schemes, the minimum of each block.

    8-bit codes do not use -128, since some kernels multiply magnitudes. Raises ValueError for
    scales beyond fp16.
    """
    groups = grouped(weight, scheme).float()
    if scheme.zero:
        low = groups.amin(-1)
        high = groups.amax(-1)
        return _round_scales((high - low) / (scheme.levels - 1)), low.half()
    num_steps = 127 if scheme.bits == 8 else (scheme.levels - 1) / 2
    return _round_scales(groups.abs().amax(-1) / num_steps), None


def _round_scales(scales: Tensor) -> Tensor:
    """Round scales to fp16, with 1 for blocks of zeros. Raises ValueError for scales beyond
    fp16."""
    rounded = scales.half()
    if not rounded.isfinite().all():
        raise ValueError(
            "a block has weights too large for GGUF, whose scales are fp16; write a folder, whose "
            "scales have a larger range: --quant int8"
        )
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def to_blocks(quantized: QuantizedMatrix) -> Tensor:
    """Return the bytes [N, bytes per row] of a matrix of one of the schemes in `GGUF_SCHEMES`,
    with scales in fp16."""
    scheme = quantized.scheme
    assert scheme.group == BLOCK_COLUMNS and quantized.scales.dtype == torch.float16
    codes = codes_of(quantized).unflatten(1, (-1, BLOCK_COLUMNS))
    if scheme.bits == 8:
        stored = codes.view(torch.uint8)
    else:
        low, high = (codes + scheme.implicit_zero).to(torch.uint8).split(BLOCK_COLUMNS // 2, -1)
        stored = low | high << 4
    fields = [quantized.scales] if quantized.zeros is None else [quantized.scales, quantized.zeros]
    assert all(field.dtype == torch.float16 for field in fields)
    field_bytes = [field.contiguous().view(torch.uint8).unflatten(1, (-1, 2)) for field in fields]
    return torch.cat([*field_bytes, stored], -1).flatten(1)
