"""Gated activation of an MLP (Shazeer 2020): activation(gate) * up; SwiGLU with silu.

Shapes: F ffn; leading dims are free.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.activation_functions import ACTIVATIONS

ACTIVATIONS_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""(dy, x) -> dx."""


def gated_naive(inner: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up [..., F] of inner [..., gate | up]: the definition."""
    gate, up = inner.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def gated(inner: Tensor, activation: str) -> Tensor:
    """Compute `gated_naive` with less memory: the backward saves only `inner`, and writes both
    halves of its gradient in place."""
    if not torch.is_grad_enabled():
        return multiply_halves(inner, activation)
    y: Tensor = Gated.apply(inner, activation)
    return y


def multiply_halves(inner: Tensor, activation: str) -> Tensor:
    gate, up = inner.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.activation = activation
        return multiply_halves(inner, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        (dy,) = grads
        gate, up = inner.chunk(2, -1)
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, -1)
        torch.mul(dy, ACTIVATIONS[ctx.activation](gate), out=d_up)
        d_gate.copy_(ACTIVATIONS_BACKWARD[ctx.activation](dy * up, gate))
        return d_inner, None
