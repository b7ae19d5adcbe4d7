"""A quantized weight: what `model.layers.linear` accepts in place of a matrix.

It is frozen: gradients flow through it to its input, as a low-rank adapter needs, but it has none
itself. A matmul dequantizes the weight one strip of rows at a time.

Shapes: N rows (outputs), K columns (inputs).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.quant.format import QuantizedMatrix, matmul, matrix_shape, strip_rows
from shardwise.quant.ggml_blocks import GgmlMatrix


@dataclass(frozen=True, eq=False)
class FloatMatrix:
    """Rows that are not quantized, of a weight whose other rows are."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return matrix_shape(self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def to(self, device: torch.device | str) -> "FloatMatrix":
        return replace(self, weight=self.weight.to(device))

    def rows(self, start: int, stop: int) -> "FloatMatrix":
        return FloatMatrix(self.weight[start:stop])

    def select_rows(self, rows: Tensor) -> "FloatMatrix":
        return FloatMatrix(self.weight[rows])

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        for start, stop in strip_rows(self.shape):
            yield self.weight[start:stop].to(dtype)


MatrixPart = QuantizedMatrix | GgmlMatrix | FloatMatrix


class Recomputed(Protocol):
    """The interface of `model.layers.RecomputedInput`, which this layer cannot import: the backward
    recomputes make(*inputs)."""

    @property
    def make(self) -> Callable[..., Tensor]: ...

    @property
    def inputs(self) -> tuple[Tensor | None, ...]: ...


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [N, K] in parts of rows, each in its own format: a file may store q, k and v
    differently."""

    parts: tuple[MatrixPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def integers(self, columns: int) -> QuantizedMatrix | None:
        """Return the matrix if integer kernels support it: one part, integers of 8 or 4 bits, in
        groups of a multiple of `columns`. None otherwise."""
        part = self.parts[0]
        if len(self.parts) > 1 or not isinstance(part, QuantizedMatrix):
            return None
        scheme = part.scheme
        aligned = scheme.group is None or scheme.group % columns == 0
        return part if scheme.kind == "int" and scheme.bits in (4, 8) and aligned else None

    def apply(self, x: Tensor | Recomputed) -> Tensor:
        """Return x [..., K] @ W^T: [..., N] in the dtype of x."""
        if not isinstance(x, Tensor):
            # dx = dy W needs no x, so only what x is computed from has to be saved
            x = checkpoint(x.make, *x.inputs, use_reentrant=False, preserve_rng_state=False)
        y: Tensor = FrozenMatmul.apply(x, self)
        return y

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        return QuantizedWeight(tuple(part.to(device) for part in self.parts))

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the dequantized rows, one strip at a time."""
        for part in self.parts:
            yield from part.strips(dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the whole matrix in `dtype`."""
        return torch.cat(list(self.strips(dtype)))

    def like(self, weight: Tensor) -> "QuantizedWeight":
        """Return an unquantized weight in the same strips, whose matmuls add in the same order."""
        rows = weight.split([part.shape[0] for part in self.parts])
        return QuantizedWeight(tuple(FloatMatrix(each) for each in rows))


@dataclass(frozen=True, eq=False)
class QuantizedTable(QuantizedWeight):
    """A quantized embedding [V, D], whose rows are looked up in `dtype`. A tied one also computes
    the logits."""

    dtype: torch.dtype

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows [..., D] of `ids` [...]."""
        (part,) = self.parts
        rows = torch.cat(list(part.select_rows(ids.flatten()).strips(self.dtype)))
        return rows.view(*ids.shape, -1)


class FrozenMatmul(torch.autograd.Function):
    """y = x W^T and dx = dy W, one strip of W at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the strips in fp32 and round once, as a single matmul does."""
        (dy,) = grads
        start = 0
        dx = dy.new_zeros(*dy.shape[:-1], ctx.weight.shape[1], dtype=torch.float32)
        for strip in ctx.weight.strips(dy.dtype):
            dx += dy[..., start : start + len(strip)] @ strip
            start += len(strip)
        return dx.to(dy.dtype), None
