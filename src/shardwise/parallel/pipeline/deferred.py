"""Deferred weight gradients. The backward of a product y = x W^T has two halves: dx = dy W, which
the previous stage waits for, and dW = dy^T x, which nothing waits for. A zero-bubble schedule (Qi
et al. 2023) computes the second where a rank would idle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.layers import RecomputedInput, recompute_input


class DeferredGradient(NamedTuple):
    """The factors of a weight gradient dy^T x that is still to be computed."""

    name: str
    x: Tensor
    dy: Tensor

    def gradient(self) -> Tensor:
        return self.dy.flatten(0, -2).t() @ self.x.flatten(0, -2)


@dataclass(frozen=True)
class Deferred:
    """A weight whose backward in `linear` returns dx and appends the factors of its own gradient to
    `tape`."""

    name: str
    weight: Tensor
    tape: list[DeferredGradient]

    def apply(self, x: Tensor | RecomputedInput) -> Tensor:
        make, inputs = (x.make, x.inputs) if isinstance(x, RecomputedInput) else (identity, (x,))
        y: Tensor = DeferredLinear.apply(make, self, *inputs)
        return y


def identity(x: Tensor) -> Tensor:
    return x


class DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[..., Tensor], owner: Deferred, *inputs: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(owner.weight, *inputs)
        ctx.make = make
        ctx.owner = owner
        return make(*inputs) @ owner.weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        (dy,) = grads
        x, d_inputs = recompute_input(ctx.make, inputs, dy @ weight)
        ctx.owner.tape.append(DeferredGradient(ctx.owner.name, x, dy))
        return None, None, *d_inputs
