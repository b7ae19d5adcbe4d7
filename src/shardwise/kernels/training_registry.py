"""The choice of training kernels by device and dtype."""

import torch

from shardwise.kernels.interface import TrainingKernels
from shardwise.kernels.native.library import chosen_cpu_kernels
from shardwise.kernels.native.training import NativeTraining
from shardwise.kernels.reference.training import REFERENCE_TRAINING


def training_kernels(device: torch.device, dtype: torch.dtype) -> TrainingKernels:
    """Return the fastest kernels for a device and dtype: native for bf16 on CPUs, torch otherwise.

    Raises ValueError if SHARDWISE_KERNELS names kernels that this processor does not have.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return REFERENCE_TRAINING
    name = chosen_cpu_kernels()
    return REFERENCE_TRAINING if name == "torch" else native_training_kernels(name)


def native_training_kernels(name: str) -> TrainingKernels:
    """Return the native kernels of an instruction set."""
    native = NativeTraining.of(name)
    return TrainingKernels(
        name=f"native {name}",
        rms_norm=native.rms_norm,
        gated=native.gated,
        apply_rope=native.apply_rope,
        attention=native.attention,
        cross_entropy_grad=native.cross_entropy_grad_,
    )
