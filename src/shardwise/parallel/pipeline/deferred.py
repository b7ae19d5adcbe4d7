"""Weights whose gradient waits. The backward of a product y = x W^T has two halves: dx = dy W, for
which the stage before waits, and dW = dy^T x, for which nobody does. A zero-bubble schedule (Qi et
al. 2023) does the second where a rank would idle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.layers import Light, made_again


class Owed(NamedTuple):
    """What the gradient of a weight is made of: dy^T x."""

    name: str
    x: Tensor
    dy: Tensor

    def gradient(self) -> Tensor:
        return self.dy.flatten(0, -2).t() @ self.x.flatten(0, -2)


@dataclass(frozen=True)
class Deferred:
    """Stands in for a weight in `linear`. Its backward gives dx and puts on `tape` what its own
    gradient is made of."""

    name: str
    weight: Tensor
    tape: list[Owed]

    def apply(self, x: Tensor | Light) -> Tensor:
        make, inputs = (x.make, x.inputs) if isinstance(x, Light) else (as_it_is, (x,))
        y: Tensor = DeferredLinear.apply(make, self, *inputs)
        return y


def as_it_is(x: Tensor) -> Tensor:
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
        x, d_inputs = made_again(ctx.make, inputs, dy @ weight)
        ctx.owner.tape.append(Owed(ctx.owner.name, x, dy))
        return None, None, *d_inputs
