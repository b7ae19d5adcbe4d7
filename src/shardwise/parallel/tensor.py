"""Tensor parallel (Shoeybi et al. 2019, Megatron-LM): Y = XW where W is too big, so W is cut over
the ranks of an axis.

By columns into a layer (each rank its heads, its part of the MLP), by rows out of it, and one sum
in between: the model calls `enter` before and `leave` after, and every linear stays a local
product. What is cut, and where, the parameter table says (`params.RULES`). Embedding and head are
cut over the vocabulary: each rank looks up, and scores, the ids that it holds.

Sequence parallel (Korthikanti et al. 2022) cuts what is left, norms and residuals, along the
sequence. The sum splits in two: `leave` sums and scatters the sequence, `enter` gathers it. As many
bytes, 1/t of the activations in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.model.layers import AppliedTable, look_up
from shardwise.model.seams import Seams
from shardwise.parallel.mesh import Axis

Move = Callable[[Tensor, Axis], Tensor]


class Conjugate(torch.autograd.Function):
    """there(x, axis), whose gradient is back(dy, axis): Megatron's f and g. What is copied to all
    ranks on the way there has the sum of their gradients on the way back, and the other way round;
    so have gather and scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, axis: Axis) -> Tensor:
        ctx.back = back
        ctx.axis = axis
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def copied(x: Tensor, axis: Axis) -> Tensor:
    """The same x on every rank."""
    return x.view_as(x)


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
    """The sum of every rank's x, on all of them."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total).wait()
    return total


@dataclass(frozen=True)
class TensorSeams(Seams):
    """The seams of a model that is cut over `axis`; with `sequence` what lies between is cut along
    the sequence."""

    axis: Axis
    sequence: bool = False

    @property
    def vocab_rank(self) -> int:  # type: ignore[override]
        return self.axis.rank

    def enter(self, x: Tensor) -> Tensor:
        there, back = (gathered, scattered) if self.sequence else (copied, summed)
        y: Tensor = Conjugate.apply(x, there, back, self.axis)
        return y

    def leave(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        there, back = (scattered, gathered) if self.sequence else (summed, copied)
        y: Tensor = Conjugate.apply(x, there, back, self.axis)
        return y if bias is None else y + bias

    def look_up(
        self, ids: Tensor, weight: Tensor | AppliedTable, sparse_grad: bool = False
    ) -> Tensor:
        local = ids - self.vocab_rank * weight.shape[0]
        is_here = (local >= 0) & (local < weight.shape[0])
        rows = look_up(local.where(is_here, 0), weight, sparse_grad)
        return self.leave(rows * is_here[..., None])

    def local_tokens(self, x: Tensor) -> Tensor:
        return x.chunk(self.axis.size, 1)[self.axis.rank] if self.sequence else x

    def sum(self, x: Tensor) -> Tensor:
        self.axis.all_reduce(x).wait()
        return x

    def max(self, x: Tensor) -> Tensor:
        self.axis.all_reduce(x, "max").wait()
        return x
