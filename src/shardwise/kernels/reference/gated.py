"""The gated activation of an MLP (Shazeer 2020): activation(gate) * up; with silu SwiGLU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATE_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""(dy, x) -> dx."""


def gated_naive(inner: Tensor, activation: str) -> Tensor:
    """inner [..., gate | up], each of F -> [..., F]."""
    gate, up = inner.chunk(2, -1)
    return ACTIVATE[activation](gate) * up


def gated(inner: Tensor, activation: str) -> Tensor:
    """The same. Only `inner` is kept, of whose gradient both halves are written in their places."""
    if not torch.is_grad_enabled():
        return product_of_halves(inner, activation)
    y: Tensor = Gated.apply(inner, activation)
    return y


def product_of_halves(inner: Tensor, activation: str) -> Tensor:
    gate, up = inner.chunk(2, -1)
    return ACTIVATE[activation](gate).mul_(up)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.activation = activation
        return product_of_halves(inner, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        (dy,) = grads
        gate, up = inner.chunk(2, -1)
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, -1)
        torch.mul(dy, ACTIVATE[ctx.activation](gate), out=d_up)
        d_gate.copy_(ACTIVATE_BACKWARD[ctx.activation](dy * up, gate))
        return d_inner, None
