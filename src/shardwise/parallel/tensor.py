"""Tensor parallel (Shoeybi et al. 2019, Megatron-LM): Y = XW where W is too big, so W is cut over the ranks of an axis.

By columns into a layer (each rank its heads, its part of the MLP), by rows out of it, and one sum in between: the
model calls `enter` before and `leave` after, and every linear stays a local product. What is cut, and where, the
parameter table says (`params.RULES`). Embedding and head are cut over the vocabulary: each rank looks up, and scores,
the ids that it holds.

Sequence parallel (Korthikanti et al. 2022) cuts what is left, norms and residuals, along the sequence. The sum splits
in two: `leave` sums and scatters the sequence, `enter` gathers it. As many bytes, 1/t of the activations in between.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.model.layers import look_up
from shardwise.model.seams import Seams
from shardwise.parallel.mesh import Axis


class Copy(torch.autograd.Function):
    """The same x for the columns of every rank; each gives a term of its gradient, which are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.axis), None


class Reduce(torch.autograd.Function):
    """The sum of what every rank's rows gave; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return summed(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """Every rank's part [B, T/t, D] of the sequence, together; each gives a term of the gradient of all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scattered(grads[0], ctx.axis), None


class Scatter(torch.autograd.Function):
    """The sum over ranks of x [B, T, D], of which each takes its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.axis), None


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """[B, T/t, D] of every rank -> [B, T, D]."""
    parts = x.new_empty(axis.size, *x.shape)
    axis.all_gather(x.contiguous().view(-1), parts.view(-1)).wait()
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """[B, T, D] -> this rank's part [B, T/t, D] of the sum."""
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    axis.reduce_scatter(parts.view(axis.size, -1), mine.view(-1), torch.float32).wait()
    return mine


def summed(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total).wait()
    return total


@dataclass(frozen=True)
class TensorSeams(Seams):
    """The seams of a model that is cut over `axis`; with `sequence` what lies between is cut along the sequence."""

    axis: Axis
    sequence: bool = False

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.axis.rank

    def enter(self, x: Tensor) -> Tensor:
        y: Tensor = (Gather if self.sequence else Copy).apply(x, self.axis)
        return y

    def leave(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = (Scatter if self.sequence else Reduce).apply(x, self.axis)
        return y if bias is None else y + bias

    def look_up(self, ids: Tensor, weight: Tensor, sparse_grad: bool = False) -> Tensor:
        local = ids - self.rank * weight.shape[0]
        is_here = (local >= 0) & (local < weight.shape[0])
        rows = look_up(local.where(is_here, 0), weight, sparse_grad)
        return self.leave(rows * is_here[..., None])

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.axis.size, 1)[self.rank] if self.sequence else x

    def total(self, x: Tensor) -> Tensor:
        self.axis.all_reduce(x).wait()
        return x

    def highest(self, x: Tensor) -> Tensor:
        self.axis.all_reduce(x, "max").wait()
        return x
