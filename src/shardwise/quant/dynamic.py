"""Products of weights in small integers with activations in int8, found as they come: "dynamic"
quantization of activations (W8A8 where weights have 8 bits), as llama.cpp does it too. What a
kernel for it has to compute.

    x ~ sx qx,   qx = round(127 x / max|x|),   sx = max|x| / 127,   of every 32 neighbours of a row (a stretch)
    y = sum over stretches of  sx (s (q . qx) + m sum(qx))

for weights s q + m (or s (q - z): m = -s z). LLM.int8() (Dettmers et al. 2022) and SmoothQuant
(Xiao et al. 2022) have one scale a row, which a few large activations spoil; and a rank that holds
part of a row would find another.

Shapes: N outputs, K inputs, G stretches of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.format import QuantizedMatrix, codes_of, strip_rows

ACTIVATION_GROUP = 32
"""Activations that share a scale."""
CODE_MAX = 127
MIN_ABSMAX = 2.0**-100
"""A stretch of nothing larger counts as zeros: 127 divided by it might be no number."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 codes [..., G, 32], filled up with zeros, and fp32 scales [..., G, 1].
    What is no number makes its whole scale none."""
    stretches = F.pad(x.float(), (0, -x.shape[-1] % ACTIVATION_GROUP)).unflatten(
        -1, (-1, ACTIVATION_GROUP)
    )
    largest = stretches.abs().amax(-1, keepdim=True)
    counts = ~(largest < MIN_ABSMAX)
    inverse = torch.where(counts, largest.new_tensor(CODE_MAX) / largest, 0.0)
    codes = (stretches * inverse).nan_to_num_(0.0).round_().to(torch.int8)
    return codes, torch.where(counts, largest / CODE_MAX, 0.0)


def dynamic_matmul(x: Tensor, quantized: QuantizedMatrix) -> Tensor:
    """x [..., K] -> [..., N] in the dtype of x: in fp64, rounded once. Groups of weights are whole
    stretches."""
    scheme = quantized.scheme
    assert scheme.kind == "int" and (scheme.group or ACTIVATION_GROUP) % ACTIVATION_GROUP == 0, (
        scheme
    )
    codes, scales = quantize_activations(x)
    activations = (codes.double() * scales.double()).flatten(-2)[..., : x.shape[-1]]
    strips = []
    for start, stop in strip_rows(quantized.shape):
        rows = quantized.rows(start, stop)
        strips.append(activations @ dequantize_fp64(rows).t())
    return torch.cat(strips, -1).to(x.dtype)


def dequantize_fp64(quantized: QuantizedMatrix) -> Tensor:
    """The weights [N, K] that it stands for."""
    scheme = quantized.scheme
    num_rows, num_columns = quantized.shape
    shape = num_rows, scheme.num_groups(num_columns), -1
    codes = codes_of(quantized).double().view(shape)
    scales = quantized.scales.double()[..., None]
    if quantized.zeros is None:
        plain = scales * codes
    elif quantized.zeros.dtype == torch.uint8:
        plain = scales * (codes - quantized.zeros.double()[..., None])
    else:
        plain = scales * codes + quantized.zeros.double()[..., None]
    return plain.view(quantized.shape)
