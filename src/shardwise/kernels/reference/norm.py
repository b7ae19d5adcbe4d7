"""RMS norm (Zhang & Sennrich 2019): the definition, and a version that saves only its input for the
backward.

Shapes: D model; leading dims are free.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., D] by its root mean square, in fp32, and multiply by weight [D]: the
    definition."""
    x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm_naive` with less memory.

    The backward saves x and one fp32 number per row. Autograd would also save x in fp32 and the
    factor that it is multiplied by.
    """
    if not torch.is_grad_enabled():
        return norm_and_scale(x, weight, eps)[0]
    y: Tensor = RMSNorm.apply(x, weight, eps)
    return y


def norm_and_scale(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm [..., D] and the reciprocal root mean square of each row, [..., 1] in
    fp32."""
    x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x_fp32 * scale).to(x.dtype).mul_(weight), scale


class RMSNorm(torch.autograd.Function):
    """RMS norm with its own backward. With n = x r, r = 1 / root mean square and g = dy weight: dx
    = r (g - n mean(g n)), dweight = sum of dy n over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = norm_and_scale(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (dy,) = grads
        normed = x.to(scale.dtype) * scale
        g = dy.to(scale.dtype)
        d_weight = (g * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        g = g * weight.to(g.dtype)
        mean = (g * normed).mean(-1, keepdim=True)
        return g.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), d_weight, None
