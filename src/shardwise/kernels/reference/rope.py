"""Rotary position embedding, RoPE (Su et al. 2021): each pair of elements of a head is rotated by
an angle proportional to the position."""

from typing import Any

import torch
from torch import Tensor


def apply_rope_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, heads, C] with cos and sin [..., T, 1, C/2]: the definition.

    Element i pairs with i + C/2, as in Hugging Face's files.
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `apply_rope_naive`. The backward is the inverse rotation, so it saves nothing of x.

    The memory of the result is in the order [..., heads, T, C], which attention reads.
    """
    if not torch.is_grad_enabled():
        return rotate_pairs(x, cos, sin, 1)
    y: Tensor = ApplyRope.apply(x, cos, sin)
    return y


class ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_pairs(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_pairs(grads[0], cos, sin, -1), None, None


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate by the angles (`direction` 1) or back (-1)."""
    *leading, num_tokens, num_heads, head_dim = x.shape
    y = x.new_empty(*leading, num_heads, num_tokens, head_dim).transpose(-3, -2)
    a, b = x.chunk(2, -1)
    first, second = y.chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=second).addcmul_(a, sin, value=direction)
    return y
