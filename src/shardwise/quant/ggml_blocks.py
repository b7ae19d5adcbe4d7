"""Matrices of GGUF files in their stored format.

Q8_0, Q4_0 and Q4_1 have one scale per 32 columns and become a `QuantizedMatrix` without loss. The
other types, whose scales have scales of their own, remain the raw blocks of the file.

Shapes: N rows, K columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, strip_rows
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.ggml_decode import decode_blocks
from shardwise.quant.scheme import GGUF_SCHEMES, Scheme


@dataclass(frozen=True, eq=False)
class GgmlMatrix:
    """A matrix [N, K] in raw blocks of a ggml type.

    Attributes:
        kind: the type, a key of `BLOCKS`.
        shape: (N, K).
        raw: [N, bytes of a row] in uint8.
    """

    kind: str
    shape: tuple[int, int]
    raw: Tensor

    def __post_init__(self) -> None:
        block = BLOCKS[self.kind]
        num_rows, num_columns = self.shape
        assert self.raw.shape == (num_rows, num_columns // block.num_elements * block.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.raw.nbytes

    def to(self, device: torch.device | str) -> "GgmlMatrix":
        return replace(self, raw=self.raw.to(device))

    def rows(self, start: int, stop: int) -> "GgmlMatrix":
        return replace(self, shape=(stop - start, self.shape[1]), raw=self.raw[start:stop])

    def select_rows(self, rows: Tensor) -> "GgmlMatrix":
        return replace(self, shape=(len(rows), self.shape[1]), raw=self.raw[rows])

    def columns(self, start: int, stop: int) -> "GgmlMatrix":
        """Return a copy of columns [start, stop), which begin and end at blocks."""
        block = BLOCKS[self.kind]
        assert start % block.num_elements == 0 == stop % block.num_elements, (start, stop)
        first, last = (at // block.num_elements * block.num_bytes for at in (start, stop))
        shape = (self.shape[0], stop - start)
        return replace(self, shape=shape, raw=self.raw[:, first:last].contiguous())

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the dequantized rows, a few at a time."""
        for start, stop in strip_rows(self.shape):
            rows = decode_blocks(self.raw[start:stop], self.kind, (stop - start, self.shape[1]))
            yield rows.to(dtype)


def stack_ggml(parts: Sequence[GgmlMatrix]) -> GgmlMatrix:
    """Concatenate the rows of matrices of one type and width."""
    raw = torch.cat([each.raw for each in parts])
    return replace(parts[0], shape=(len(raw), parts[0].shape[1]), raw=raw)


def from_ggml_blocks(
    raw: Tensor, kind: str, shape: tuple[int, int]
) -> QuantizedMatrix | GgmlMatrix:
    """Convert raw blocks, uint8 of any shape, into a matrix of equal values and equal size."""
    num_rows, num_columns = shape
    if kind not in GGUF_SCHEMES:
        return GgmlMatrix(kind, shape, raw.reshape(num_rows, -1))
    scheme = Scheme.parse(GGUF_SCHEMES[kind])
    blocks = raw.reshape(num_rows, num_columns // 32, BLOCKS[kind].num_bytes)
    scales = f16_at(blocks, 0)
    minima = f16_at(blocks, 2) if scheme.zero else None
    stored = blocks[..., 4 if scheme.zero else 2 :]
    if scheme.bits == 8:
        codes = stored.contiguous().view(torch.int8)
    else:  # byte j holds columns j and j + 16: reorder so that a byte holds neighbors
        nibbles = torch.stack((stored & 15, stored >> 4), -2).flatten(-2)
        codes = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return QuantizedMatrix(scheme, shape, codes.reshape(num_rows, -1), scales, minima)


def f16_at(blocks: Tensor, start: int) -> Tensor:
    """Return the f16 at byte `start` of every block [N, G, bytes]: [N, G]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]
