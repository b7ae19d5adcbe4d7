"""Which version of each operation a model is trained with, forward and backward, chosen once at the start: native
kernels for bf16 on CPUs, torch's own operations elsewhere. `choice.py` does the same for serving.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.attention import causal_attention
from shardwise.kernels.choice import chosen
from shardwise.kernels.cross_entropy import Aims, softmax_less_one_
from shardwise.kernels.gated import gated
from shardwise.kernels.native_training import NativeTraining
from shardwise.kernels.norm import rms_norm
from shardwise.kernels.rotary import rotate

CausalAttention = Callable[[Tensor, Tensor, Tensor, int | None, Tensor | None], Tensor]
"""A version of `causal_attention`: (q, k, v, window, documents)."""


@dataclass(frozen=True)
class TrainingKernels:
    """One version of each, which keeps for its backward what that in plain torch keeps (plan/activations.py)."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated: Callable[[Tensor, str], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    attention: CausalAttention
    softmax: Callable[[Tensor, Aims, bool], Tensor]
    """Of the loss: `softmax_less_one_`."""


TRAINING_IN_TORCH = TrainingKernels("torch", rms_norm, gated, rotate, causal_attention, softmax_less_one_)


def training_kernels(device: torch.device, dtype: torch.dtype) -> TrainingKernels:
    """The fastest that there is for a device and a precision. Raises ValueError for a choice that is not there."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return TRAINING_IN_TORCH
    name = chosen()
    return TRAINING_IN_TORCH if name == "torch" else native_training(name)


def native_training(name: str) -> TrainingKernels:
    """Those of an instruction set."""
    native = NativeTraining.of(name)
    return TrainingKernels(
        f"native {name}", native.rms_norm, native.gated, native.rotate, native.attention, native.softmax_less_one_
    )
