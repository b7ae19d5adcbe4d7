"""W8A8: weights in int8 with a scale for each output, activations in int8 with a scale for each row, found as they
come. The product is one of integers; what a kernel for it has to compute.

    y = sx sw (qx qw^T),  qx = round(x / sx),  sx = max|x| / 127

Weights as `format.quantize` makes them of "int8". LLM.int8() (Dettmers et al. 2022) and SmoothQuant (Xiao et al. 2022)
call it vector-wise and per-token. Shapes: N outputs, K inputs.
"""

import torch
from torch import Tensor

from shardwise.quant.format import Quantized, codes_of, strip_rows

LARGEST = 127


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 codes of its shape and fp32 scales [..., 1]. A row of zeros has the scale 1."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST)
    return (x.float() / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def dynamic_matmul(x: Tensor, quantized: Quantized) -> Tensor:
    """x [..., K] -> [..., N] in the dtype of x. Sums of integers are exact, scaled in fp32 and rounded once."""
    scheme = quantized.scheme
    assert (scheme.kind, scheme.bits, scheme.group, scheme.zero) == ("int", 8, None, False), scheme
    codes, scales = quantize_rows(x)
    strips = [
        integer_product(codes, codes_of(rows)).float().mul_(scales).mul_(rows.scales.float()[:, 0])
        for rows in (quantized.rows(*strip) for strip in strip_rows(quantized.shape))
    ]
    return torch.cat(strips, -1).to(x.dtype)


def integer_product(left: Tensor, right: Tensor) -> Tensor:
    """[..., K] times [N, K]^T of int8, in int32: exact, since doubles hold every such sum up to K = 2^31 / 2^14."""
    assert left.shape[-1] <= 1 << 17
    return (left.double() @ right.double().t()).to(torch.int32)
