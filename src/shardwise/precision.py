"""Names of floating-point precisions. Imports no torch."""

from typing import Literal, get_args

Precision = Literal["bf16", "fp32"]
"""The dtype of weights and activations, in training and in serving."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

GradientPrecision = Literal["auto", "same", "fp32"]
"""The dtype that accumulates gradients: that of the weights, or fp32; auto is fp32 where more than
MOST_BF16_SUMS micro-batches add up."""
ReductionPrecision = Literal["same", "fp32"]
"""The dtype that adds up gradients across ranks: that which accumulates them, or fp32."""

MOST_BF16_SUMS = 4
"""Micro-batches that bf16 adds up with little loss. Each sum rounds to 8 bits, so errors grow with
their number: the norm is off by 0.3 % at 64 micro-batches and by up to a quarter at 512."""


def accumulates_in_fp32(gradients: GradientPrecision, microbatches: int) -> bool:
    """Return whether gradients are accumulated in fp32 whatever the dtype of the weights."""
    return gradients == "fp32" or (gradients == "auto" and microbatches > MOST_BF16_SUMS)


FP32_BYTES = 4
