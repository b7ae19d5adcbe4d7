"""Matrices of GGUF files, kept as they are stored. Q8_0, Q4_0 and Q4_1 are one scale for 32 columns
and become what `format.py` has, byte for byte; the others, whose scales have scales of their own,
stay the raw blocks of the file.

Shapes: N rows, K columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, strip_rows
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.ggml_decode import dequantize
from shardwise.quant.scheme import GGUF_SCHEMES, Scheme


@dataclass(frozen=True, eq=False)
class GgmlMatrix:
    """A matrix [N, K] in blocks of a kind that GGUF has; raw: [N, bytes of a row] of uint8."""

    kind: str
    shape: tuple[int, int]
    raw: Tensor

    def __post_init__(self) -> None:
        block = BLOCKS[self.kind]
        assert self.raw.shape == (
            self.shape[0],
            self.shape[1] // block.num_elements * block.num_bytes,
        )

    @property
    def num_bytes(self) -> int:
        return self.raw.nbytes

    def to(self, device: torch.device | str) -> "GgmlMatrix":
        return replace(self, raw=self.raw.to(device))

    def rows(self, start: int, stop: int) -> "GgmlMatrix":
        return replace(self, shape=(stop - start, self.shape[1]), raw=self.raw[start:stop])

    def select_rows(self, rows: Tensor) -> "GgmlMatrix":
        """Some rows."""
        return replace(self, shape=(len(rows), self.shape[1]), raw=self.raw[rows])

    def columns(self, start: int, stop: int) -> "GgmlMatrix":
        """Columns [start, stop), copied; they begin and end with blocks."""
        block = BLOCKS[self.kind]
        assert start % block.num_elements == 0 == stop % block.num_elements, (start, stop)
        first, last = (at // block.num_elements * block.num_bytes for at in (start, stop))
        return replace(
            self, shape=(self.shape[0], stop - start), raw=self.raw[:, first:last].contiguous()
        )

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Its rows as plain numbers, a few at a time."""
        for start, stop in strip_rows(self.shape):
            yield dequantize(self.raw[start:stop], self.kind, (stop - start, self.shape[1])).to(
                dtype
            )


def stack_ggml(pieces: Sequence[GgmlMatrix]) -> GgmlMatrix:
    """One matrix of the rows of several of the same kind and width."""
    raw = torch.cat([each.raw for each in pieces])
    return replace(pieces[0], shape=(len(raw), pieces[0].shape[1]), raw=raw)


def from_ggml_blocks(
    raw: Tensor, kind: str, shape: tuple[int, int]
) -> QuantizedMatrix | GgmlMatrix:
    """What is stored as `raw`, uint8 of any shape, without loss and in as many bytes."""
    num_rows, num_columns = shape
    if kind not in GGUF_SCHEMES:
        return GgmlMatrix(kind, shape, raw.reshape(num_rows, -1))
    scheme = Scheme.parse(GGUF_SCHEMES[kind])
    blocks = raw.reshape(num_rows, num_columns // 32, BLOCKS[kind].num_bytes)
    scales, *minima = (
        blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]
        for at in ((0, 2) if scheme.zero else (0,))
    )
    stored = blocks[..., 4 if scheme.zero else 2 :]
    if scheme.bits == 8:
        codes = stored.contiguous().view(torch.int8)
    else:  # byte j holds columns j and j + 16: put neighbours together
        nibbles = torch.stack((stored & 15, stored >> 4), -2).flatten(-2)
        codes = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return QuantizedMatrix(
        scheme, shape, codes.reshape(num_rows, -1), scales, minima[0] if minima else None
    )
