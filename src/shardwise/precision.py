"""Names of floating-point precisions. Imports no torch."""

from typing import Literal, get_args

Precision = Literal["bf16", "fp32"]
"""The dtype of weights and activations, in training and in serving."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

GradientPrecision = Literal["same", "fp32"]
"""The dtype that accumulates gradients: that of the weights, or fp32."""

FP32_BYTES = 4
