"""Root-mean-square norm (Zhang & Sennrich 2019): its definition, and one that keeps only its input
for the backward."""

from typing import Any

import torch
from torch import Tensor


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, in fp32, times weight [D]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same. Kept are x and one fp32 number a row; autograd would keep x again in fp32, and what
    it is times."""
    if not torch.is_grad_enabled():
        return normed(x, weight, eps)[0]
    y: Tensor = RMSNorm.apply(x, weight, eps)
    return y


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and one over the root mean square of each row."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight), scale


class RMSNorm(torch.autograd.Function):
    """With n = x r normed, r = 1 / root mean square and g = dy weight: dx = r (g - n mean(g n)),
    dweight = sum dy n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = normed(x, weight, eps)
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
