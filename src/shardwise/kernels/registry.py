"""The choice of kernels by device and dtype, made once: native kernels on CPUs, Triton's on GPUs,
torch otherwise.

`reference/` defines what an operation computes; the others are faster implementations of the same.
"""

import os
from dataclasses import replace
from importlib.util import find_spec

import torch

from shardwise.kernels.interface import Attention, Heads, Kernels, TrainingKernels
from shardwise.kernels.native.decoder import native_blocks
from shardwise.kernels.native.library import instruction_sets
from shardwise.kernels.native.sampling import NativeSampling
from shardwise.kernels.native.serving import Native
from shardwise.kernels.native.training import NativeTraining
from shardwise.kernels.reference.bundle import TORCH, TRAINING_IN_TORCH, TorchAttention

CHOICE = "SHARDWISE_KERNELS"
"""The environment may name the kernels for CPUs: torch, or an instruction set."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest that there is for a device and a precision. Raises ValueError for a choice that
    is not there."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return triton_kernels()
    name = chosen()
    takes = device.type == "cpu" and dtype == torch.bfloat16
    return TORCH if name == "torch" or not takes else native_kernels(name)


def chosen() -> str:
    """The kernels for CPUs that the environment names, or the fastest: an instruction set, or
    torch."""
    known = (*instruction_sets(), "torch")
    name = os.environ.get(CHOICE) or known[0]
    if name not in known:
        raise ValueError(
            f"{CHOICE} is {name!r}, but the kernels for this processor are {', '.join(known)}"
        )
    return name


def native_kernels(name: str) -> Kernels:
    """Those of an instruction set."""
    kernels = Native.of(name)

    def attention(heads: Heads) -> Attention:
        return kernels.attention(heads) if kernels.attends(heads) else TorchAttention.of(heads)

    sampling = NativeSampling.of(name)
    return replace(
        TORCH,
        name=f"native {name}",
        rms_norm=kernels.rms_norm,
        gated=kernels.gated,
        attention=attention,
        weights=kernels.weights,
        head=kernels.head,
        blocks=native_blocks,
        choose=sampling.choose,
        log_probabilities=sampling.log_probabilities,
    )


def triton_kernels() -> Kernels:
    """Those for GPUs, which need the package triton; torch's builds for CUDA bring it along."""
    from shardwise.kernels.triton import attention, linear, pointwise

    return replace(
        TORCH,
        name="Triton",
        rms_norm=pointwise.rms_norm,
        gated=pointwise.gated,
        attention=attention.TritonAttention.of,
        weights=linear.weights,
        head=linear.head,
    )


def training_kernels(device: torch.device, dtype: torch.dtype) -> TrainingKernels:
    """The fastest that there is for a device and a precision. Raises ValueError for a choice that
    is not there."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return TRAINING_IN_TORCH
    name = chosen()
    return TRAINING_IN_TORCH if name == "torch" else native_training(name)


def native_training(name: str) -> TrainingKernels:
    """Those of an instruction set."""
    native = NativeTraining.of(name)
    return TrainingKernels(
        f"native {name}",
        native.rms_norm,
        native.gated,
        native.rotate,
        native.attention,
        native.softmax_less_one_,
    )
