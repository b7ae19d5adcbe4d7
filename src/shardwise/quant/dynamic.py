"""Dynamic quantization of activations to int8 (W8A8 for weights of 8 bits), as in llama.cpp: the
definition of what kernels for it compute.

    x ~ sx qx,  qx = round(127 x / max|x|),  sx = max|x| / 127,  per group of 32 neighbors of a row
    y = sum over groups of  sx (s (q . qx) + m sum(qx))

for weights s q + m, or s (q - z) with m = -s z. LLM.int8() (Dettmers et al. 2022) and SmoothQuant
(Xiao et al. 2022) have one scale per row. A few large activations spoil such a scale, and a rank
that holds part of a row would compute another one.

Shapes: N outputs, K inputs, G groups of activations of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, codes_of, strip_rows

ACTIVATION_GROUP = 32
"""The number of activations that share a scale."""
CODE_MAX = 127
MIN_ABSMAX = 2.0**-100
"""A group without a larger activation is rounded to zeros: 127 / max|x| could overflow."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [..., G, 32], padded with zeros, and fp32 scales [..., G, 1] of x [..., K].
    A NaN or an infinity makes the scale of its group NaN or infinite."""
    padding = -x.shape[-1] % ACTIVATION_GROUP
    groups = F.pad(x.float(), (0, padding)).unflatten(-1, (-1, ACTIVATION_GROUP))
    absmax = groups.abs().amax(-1, keepdim=True)
    is_nonzero = ~(absmax < MIN_ABSMAX)
    inverse = torch.where(is_nonzero, absmax.new_tensor(CODE_MAX) / absmax, 0.0)
    codes = (groups * inverse).nan_to_num_(0.0).round_().to(torch.int8)
    return codes, torch.where(is_nonzero, absmax / CODE_MAX, 0.0)


def dynamic_matmul(x: Tensor, quantized: QuantizedMatrix) -> Tensor:
    """Return x [..., K] @ W^T with quantized activations: [..., N] in the dtype of x, computed in
    fp64 and rounded once. Groups of weights are a multiple of groups of activations."""
    scheme = quantized.scheme
    assert scheme.kind == "int", scheme
    assert (scheme.group or ACTIVATION_GROUP) % ACTIVATION_GROUP == 0, scheme
    codes, scales = quantize_activations(x)
    activations = (codes.double() * scales.double()).flatten(-2)[..., : x.shape[-1]]
    strips = [
        activations @ dequantize_fp64(quantized.rows(start, stop)).t()
        for start, stop in strip_rows(quantized.shape)
    ]
    return torch.cat(strips, -1).to(x.dtype)


def dequantize_fp64(quantized: QuantizedMatrix) -> Tensor:
    """Return the weights [N, K] in fp64."""
    scheme = quantized.scheme
    num_rows, num_columns = quantized.shape
    codes = codes_of(quantized).double().view(num_rows, scheme.num_groups(num_columns), -1)
    scales = quantized.scales.double()[..., None]
    if quantized.zeros is None:
        weights = scales * codes
    elif quantized.zeros.dtype == torch.uint8:
        weights = scales * (codes - quantized.zeros.double()[..., None])
    else:
        weights = scales * codes + quantized.zeros.double()[..., None]
    return weights.view(quantized.shape)
