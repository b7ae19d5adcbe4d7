"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): columns that are not rounded yet
compensate for the rounding errors of the others.

Columns are rounded one at a time. The error e of column j is subtracted from the later columns as
far as their inputs correlate on the calibration text: with C the second moment of the inputs and U
the upper Cholesky factor of C^-1, w_k -= e / U_jj U_jk. Columns are processed in blocks: within a
block each error is subtracted at once, and from the columns after the block with one matmul. Scales
and zero points of a group are chosen when its first column is reached, from its weights at that
time. Columns keep their order (no act-order).
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
"""The fraction of its mean that is added to the diagonal, as in the paper, so that the inverse
exists even for a short text."""


def gptq(
    weight: Tensor, scheme: Scheme, second_moment: Tensor, choose: ChooseScales = choose_scales
) -> QuantizedMatrix:
    """Quantize a matrix [N, K] to integers, minimizing the change of its products with inputs that
    have this second moment [K, K]."""
    assert scheme.kind == "int"
    factor = inverse_factor(weight, second_moment)
    weight = weight.float().clone()
    weight[:, second_moment.diagonal() == 0] = 0  # their inputs are always zero
    group = scheme.group or weight.shape[1]
    column_scheme = replace(scheme, group=None)
    scales, zeros = choose(weight, scheme)
    codes = torch.empty_like(weight)
    for start in range(0, weight.shape[1], block_columns(scheme)):
        stop = min(start + block_columns(scheme), weight.shape[1])
        errors = torch.empty_like(weight[:, start:stop])
        for column in range(start, stop):
            if scheme.group and column % group == 0:
                group_scales, group_zeros = choose(weight[:, column : column + group], scheme)
                scales[:, column // group] = group_scales[:, 0]
                if zeros is not None and group_zeros is not None:
                    zeros[:, column // group] = group_zeros[:, 0]
            at = slice(column // group, column // group + 1)
            params = scales[:, at], None if zeros is None else zeros[:, at]
            current = weight[:, column : column + 1]
            rounded = nearest_codes(current, column_scheme, *params)
            codes[:, column : column + 1] = rounded
            change = current - dequantize_codes(rounded, column_scheme, *params)
            error = change[:, 0] / factor[column, column]
            weight[:, column:stop] -= error[:, None] * factor[column, column:stop]
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return from_codes(codes, scheme, scales, zeros)


def block_columns(scheme: Scheme) -> int:
    """Return the columns of a block: whole groups, so that all weights of a group are up to date
    when its scale is chosen."""
    if scheme.group is None:
        return BLOCK_COLUMNS
    return max(1, BLOCK_COLUMNS // scheme.group) * scheme.group


def inverse_factor(weight: Tensor, second_moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor [K, K] of the inverse second moment, computed in fp64."""
    damped = second_moment.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.to(weight.device, torch.float32)
