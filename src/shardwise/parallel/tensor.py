"""Tensor parallel (Megatron-LM, Shoeybi et al. 2019): in Y = XW, W is sharded over the ranks of an
axis.

The first linear of a layer is column-parallel (each rank has its heads, its part of the MLP), the
second row-parallel, with one sum behind it. The model calls the TP hooks `enter` before and `leave`
after (Megatron's f and g), and every linear stays a local product. `params.RULES` says which dims
are sharded. Embedding and head are sharded over the vocabulary: each rank looks up, and scores, its
own ids.

Sequence parallel (Korthikanti et al. 2022) shards the rest, norms and residuals, along the
sequence. The all-reduce splits in two: `leave` reduce-scatters the sequence, `enter` all-gathers
it: the same bytes, and 1/t of the activations in between.

Shape letters: B batch, T tokens, D model, t tensor ranks.
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
    """forward(x, axis), whose gradient is backward(dy, axis): Megatron's f and g. Copy and
    all-reduce are each other's backward, and so are all-gather and reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, axis: Axis) -> Tensor:
        ctx.back = back
        ctx.axis = axis
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def copied(x: Tensor, axis: Axis) -> Tensor:
    """Return x, which is the same on every rank."""
    return x.view_as(x)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [B, T/t, D] along the sequence to [B, T, D]."""
    parts = x.new_empty(axis.size, *x.shape)
    axis.all_gather(x.contiguous().view(-1), parts.view(-1)).wait()
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter [B, T, D] along the sequence to [B, T/t, D], summed in fp32."""
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    local = torch.empty_like(parts[0])
    axis.reduce_scatter(parts.view(axis.size, -1), local.view(-1), torch.float32).wait()
    return local


def summed(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce x into a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total).wait()
    return total


@dataclass(frozen=True)
class TensorSeams(Seams):
    """TP hooks (Megatron's f and g) of a model that is sharded over `axis`; with `sequence`, norms
    and residuals are sharded along the sequence."""

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
