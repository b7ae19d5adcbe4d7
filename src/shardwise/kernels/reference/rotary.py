"""Rotary embedding (Su et al. 2021): pairs of elements of a head turned by an angle that grows with
the position."""

from typing import Any

import torch
from torch import Tensor


def rotate_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., T, heads, C], cos and sin [..., T, 1, C/2]: element i pairs with i + C/2, as in
    Hugging Face's files."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same. Turning back needs nothing of x, so none of it is kept. The result lies in memory
    head by head, as attention wants it."""
    if not torch.is_grad_enabled():
        return turned(x, cos, sin, 1)
    y: Tensor = Rotate.apply(x, cos, sin)
    return y


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    *leading, num_tokens, num_heads, size = x.shape
    y = x.new_empty(*leading, num_heads, num_tokens, size).transpose(-3, -2)
    a, b = x.chunk(2, -1)
    first, second = y.chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=second).addcmul_(a, sin, value=direction)
    return y
