"""AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): inputs that are large matter more, so
their weights are scaled up before rounding and the inputs down by as much. Where what makes the
inputs is linear it takes the scales in, and nothing else changes.

Scales are magnitude^a of the inputs; a is tried from 0, which is rounding to nearest, to below 1.
Then each group's range is tried narrower: clipping a few large weights can leave the others finer
steps.

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
NARROWER = tuple(1 - step / 20 for step in range(11))
"""From the whole range of a group to half of it."""
SMALLEST = 1e-4

Foldable = Callable[[Tensor], Tensor]
"""The scales [K] nearest to those given that can be taken in without loss."""


def input_scales(
    weight: Tensor,
    scheme: Scheme,
    inputs: InputStatistics,
    foldable: Foldable,
    choose: ChooseScales = choose_scales,
) -> Tensor:
    """By what to multiply the columns of a matrix [N, K], and divide its inputs: [K]."""
    best = torch.ones_like(inputs.magnitude)
    least = float("inf")
    for step in range(NUM_EXPONENTS):
        scales = foldable(powers(inputs.magnitude, step / NUM_EXPONENTS))
        made = dequantize(round_to_nearest(weight * scales, scheme, choose), torch.float32) / scales
        error = inputs.output_error(made - weight)
        if error < least:
            best = scales
            least = error
    return best


def powers(magnitude: Tensor, exponent: float) -> Tensor:
    """magnitude^exponent, around 1: divided by the geometric mean of the largest and the
    smallest."""
    scales = magnitude.pow(exponent).clamp(min=SMALLEST)
    return scales / (scales.max() * scales.min()).sqrt()


def clipped(
    weight: Tensor, scheme: Scheme, second_moment: Tensor, choose: ChooseScales = choose_scales
) -> QuantizedMatrix:
    """A matrix [N, K] rounded to nearest, the range of each group as wide as makes the outputs
    change least."""
    inner = within_groups(second_moment, scheme)
    scales, zeros = choose(weight, scheme)
    least = torch.full((1, 1), torch.inf, device=weight.device)
    for share in NARROWER:
        narrow, narrow_zeros = choose(weight * share, scheme)
        difference = (
            dequantize(encode(weight, scheme, narrow, narrow_zeros), torch.float32) - weight
        )
        by_group = grouped(difference, scheme).transpose(0, 1)  # [G, N, columns of a group]
        error = ((by_group @ inner) * by_group).sum(-1).t().contiguous()
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, narrow, scales)
        if zeros is not None and narrow_zeros is not None:
            zeros = torch.where(better, narrow_zeros, zeros)
    return encode(weight, scheme, scales, zeros)


def within_groups(second_moment: Tensor, scheme: Scheme) -> Tensor:
    """Its blocks on the diagonal, [G, columns of a group, columns of a group]."""
    size = len(second_moment) // scheme.num_groups(len(second_moment))
    return (
        second_moment.unflatten(0, (-1, size))
        .unflatten(2, (-1, size))
        .diagonal(dim1=0, dim2=2)
        .permute(2, 0, 1)
    )
