"""A weight that stays quantized: what `model.layers.linear` takes in the place of a matrix.

It is frozen: gradients flow through it to what it is multiplied with, as a low-rank adapter beside
it needs, and none to itself. Products are those of plain numbers, made from a strip of rows at a
time.

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
    """Rows that are not quantized, beside others that are."""

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
    """What is cheap to make and so made again in the backward (`model.layers.RecomputedInput`): x =
    make(*inputs)."""

    @property
    def make(self) -> Callable[..., Tensor]: ...

    @property
    def inputs(self) -> tuple[Tensor | None, ...]: ...


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [N, K] in pieces of rows: q, k and v may be stored in different ways."""

    pieces: tuple[MatrixPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def integers(self, columns: int) -> QuantizedMatrix | None:
        """What it is held as, if that is one piece of integers of 8 or 4 bits, whose groups are
        whole runs of so many columns: what products of integers take."""
        held = self.pieces[0]
        if len(self.pieces) > 1 or not isinstance(held, QuantizedMatrix):
            return None
        scheme = held.scheme
        whole = scheme.group is None or scheme.group % columns == 0
        return held if scheme.kind == "int" and scheme.bits in (4, 8) and whole else None

    def apply(self, x: Tensor | Recomputed) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        if not isinstance(
            x, Tensor
        ):  # the product itself needs no x in its backward, so only what makes x is kept
            x = checkpoint(x.make, *x.inputs, use_reentrant=False, preserve_rng_state=False)
        y: Tensor = FrozenProduct.apply(x, self)
        return y

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        return QuantizedWeight(tuple(piece.to(device) for piece in self.pieces))

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Its rows as plain numbers, a few at a time."""
        for piece in self.pieces:
            yield from piece.strips(dtype)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix as plain numbers."""
        return torch.cat(list(self.strips(dtype)))

    def like(self, weight: Tensor) -> "QuantizedWeight":
        """FloatMatrix numbers in the same strips, so that a product with them adds up in the same
        order."""
        return QuantizedWeight(
            tuple(
                FloatMatrix(rows)
                for rows in weight.split([piece.shape[0] for piece in self.pieces])
            )
        )


@dataclass(frozen=True, eq=False)
class QuantizedTable(QuantizedWeight):
    """A quantized embedding [V, D], whose rows are looked up in `dtype`. Where it is tied it makes
    logits too."""

    dtype: torch.dtype

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows [..., D]."""
        (piece,) = self.pieces
        return torch.cat(list(piece.select_rows(ids.flatten()).strips(self.dtype))).view(
            *ids.shape, -1
        )


class FrozenProduct(torch.autograd.Function):
    """y = x W^T, and dx = dy W, of strips of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Added up in fp32 and rounded once, as one product is."""
        (dy,) = grads
        start = 0
        dx = dy.new_zeros(*dy.shape[:-1], ctx.weight.shape[1], dtype=torch.float32)
        for strip in ctx.weight.strips(dy.dtype):
            dx += dy[..., start : start + len(strip)] @ strip
            start += len(strip)
        return dx.to(dy.dtype), None
