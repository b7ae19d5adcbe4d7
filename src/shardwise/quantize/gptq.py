"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): what rounding a column does to the
outputs is made up for by the columns that are still to come.

Columns are rounded one after the other. The error e of column j is taken off the later ones in the
proportions in which they are most like it on the calibration text: with C the second moment of the
inputs and U the upper Cholesky factor of C^-1, w_k -= e / U_jj U_jk. Columns go in blocks, within
which every column is updated at once and behind which all the rest are, with one product. Scales
and zero points of a group are chosen when its first column comes up, from the weights as they are
by then. Columns keep their order (no act-order).
"""

from dataclasses import replace

import torch
from torch import Tensor

from shardwise.quant.format import (
    ChooseScales,
    QuantizedMatrix,
    choose_scales,
    dequantize_codes,
    from_codes,
    nearest_codes,
)
from shardwise.quant.scheme import Scheme

BLOCK_COLUMNS = 128
DAMPING = 0.01
"""Of the mean of the diagonal, added to it: the paper's, so that the inverse exists however short
the text."""


def gptq(
    weight: Tensor, scheme: Scheme, second_moment: Tensor, choose: ChooseScales = choose_scales
) -> QuantizedMatrix:
    """A matrix [N, K] quantized to integers so that its products with inputs of that second moment
    [K, K] change little."""
    assert scheme.kind == "int"
    weight, factor = weight.float().clone(), inverse_factor(weight, second_moment)
    weight[:, second_moment.diagonal() == 0] = 0  # never multiplied with anything
    group = scheme.group or weight.shape[1]
    a_row = replace(scheme, group=None)
    scales, zeros = choose(weight, scheme)
    codes = torch.empty_like(weight)
    for start in range(0, weight.shape[1], block_columns(scheme)):
        stop = min(start + block_columns(scheme), weight.shape[1])
        errors = torch.empty_like(weight[:, start:stop])
        for column in range(start, stop):
            if scheme.group and column % group == 0:
                fresh, fresh_zeros = choose(weight[:, column : column + group], scheme)
                scales[:, column // group] = fresh[:, 0]
                if zeros is not None and fresh_zeros is not None:
                    zeros[:, column // group] = fresh_zeros[:, 0]
            at = slice(column // group, column // group + 1)
            chosen = scales[:, at], None if zeros is None else zeros[:, at]
            mine = weight[:, column : column + 1]
            codes[:, column : column + 1] = rounded = nearest_codes(mine, a_row, *chosen)
            error = (mine - dequantize_codes(rounded, a_row, *chosen))[:, 0] / factor[
                column, column
            ]
            weight[:, column:stop] -= error[:, None] * factor[column, column:stop]
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return from_codes(codes, scheme, scales, zeros)


def block_columns(scheme: Scheme) -> int:
    """Whole groups, so that a group's weights are all up to date when its scale is chosen."""
    if scheme.group is None:
        return BLOCK_COLUMNS
    return max(1, BLOCK_COLUMNS // scheme.group) * scheme.group


def inverse_factor(weight: Tensor, second_moment: Tensor) -> Tensor:
    """The upper Cholesky factor [K, K] of the inverse, worked out in fp64."""
    damped = second_moment.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.to(weight.device, torch.float32)
