"""AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): large inputs matter more, so the weights
of such an input are multiplied by a scale before rounding, and the input is divided by it. The
scales are folded into the operation that produces the inputs, where that is linear.

Scales are magnitude^a of the inputs; a is searched from 0, which is round-to-nearest, up to 1. Then
the range of each group is searched: clipping a few large weights can give the others finer steps.

Shapes: N outputs, K inputs, G groups of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.quant.format import (
    ChooseScales,
    QuantizedMatrix,
    choose_scales,
    dequantize,
    encode,
    grouped,
    round_to_nearest,
)
from shardwise.quant.scheme import Scheme
from shardwise.quantize.statistics import InputStatistics

NUM_EXPONENTS = 20
CLIP_RATIOS = tuple(1 - step / 20 for step in range(11))
"""Fractions of a group's range that are tried, from all of it to half of it."""
MIN_SCALE = 1e-4

Foldable = Callable[[Tensor], Tensor]
"""Returns the scales [K] nearest to the given ones that can be folded without loss."""


def input_scales(
    weight: Tensor,
    scheme: Scheme,
    inputs: InputStatistics,
    foldable: Foldable,
    choose: ChooseScales = choose_scales,
) -> Tensor:
    """Return the scales [K] that multiply the columns of a matrix [N, K] and divide its inputs."""
    best = torch.ones_like(inputs.magnitude)
    min_error = float("inf")
    for step in range(NUM_EXPONENTS):
        scales = foldable(powers(inputs.magnitude, step / NUM_EXPONENTS))
        quantized = round_to_nearest(weight * scales, scheme, choose)
        error = inputs.output_error(dequantize(quantized, torch.float32) / scales - weight)
        if error < min_error:
            best = scales
            min_error = error
    return best


def powers(magnitude: Tensor, exponent: float) -> Tensor:
    """Return magnitude^exponent, divided by the geometric mean of its maximum and minimum."""
    scales = magnitude.pow(exponent).clamp(min=MIN_SCALE)
    return scales / (scales.max() * scales.min()).sqrt()


def clipped(
    weight: Tensor, scheme: Scheme, second_moment: Tensor, choose: ChooseScales = choose_scales
) -> QuantizedMatrix:
    """Round a matrix [N, K] to nearest, with the range of each group that changes the outputs
    least."""
    group_moments = within_groups(second_moment, scheme)
    scales, zeros = choose(weight, scheme)
    min_error = torch.full((1, 1), torch.inf, device=weight.device)
    for ratio in CLIP_RATIOS:
        narrow, narrow_zeros = choose(weight * ratio, scheme)
        quantized = encode(weight, scheme, narrow, narrow_zeros)
        difference = dequantize(quantized, torch.float32) - weight
        by_group = grouped(difference, scheme).transpose(0, 1)  # [G, N, columns of a group]
        error = ((by_group @ group_moments) * by_group).sum(-1).t().contiguous()
        better = error < min_error
        min_error = torch.where(better, error, min_error)
        scales = torch.where(better, narrow, scales)
        if zeros is not None and narrow_zeros is not None:
            zeros = torch.where(better, narrow_zeros, zeros)
    return encode(weight, scheme, scales, zeros)


def within_groups(second_moment: Tensor, scheme: Scheme) -> Tensor:
    """Return the diagonal blocks of a second moment [K, K], one per group: [G, K / G, K / G]."""
    size = len(second_moment) // scheme.num_groups(len(second_moment))
    blocks = second_moment.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
