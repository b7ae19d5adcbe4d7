"""The choice of serving kernels by device and dtype, made once when a model is loaded.

`reference/` defines what each operation computes; the others are faster implementations of it.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch

from shardwise.kernels.native.decoder import native_decoder
from shardwise.kernels.native.library import chosen_cpu_kernels
from shardwise.kernels.native.sampling import NativeSampling
from shardwise.kernels.native.serving import NativeServing
from shardwise.kernels.reference.serving import REFERENCE, ReferenceAttention
from shardwise.kernels.serving_interface import AttentionShape, PagedAttention, ServingKernels


def serving_kernels(device: torch.device, dtype: torch.dtype) -> ServingKernels:
    """Return the fastest kernels for a device and dtype: Triton on GPUs, native for bf16 on CPUs,
    torch otherwise.

    Raises ValueError if SHARDWISE_KERNELS names kernels that this processor does not have.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        return triton_kernels()
    name = chosen_cpu_kernels()
    is_native = device.type == "cpu" and dtype == torch.bfloat16 and name != "torch"
    return native_kernels(name) if is_native else REFERENCE


def native_kernels(name: str) -> ServingKernels:
    """Return the native kernels of an instruction set, with torch's attention for shapes that they
    do not support."""
    native = NativeServing.of(name)
    sampling = NativeSampling.of(name)

    def paged_attention(shape: AttentionShape) -> PagedAttention:
        if native.supports_attention(shape):
            return native.paged_attention(shape)
        return ReferenceAttention.of(shape)

    return replace(
        REFERENCE,
        name=f"native {name}",
        multiplies_codes=True,
        rms_norm=native.rms_norm,
        gated=native.gated,
        paged_attention=paged_attention,
        pack_weights=native.pack_weights,
        pack_head=native.pack_head,
        decoder_blocks=native_decoder,
        sample=sampling.sample,
        log_probabilities=sampling.log_probabilities,
    )


def triton_kernels() -> ServingKernels:
    """Return the kernels for GPUs. They need the package triton, which torch's CUDA builds
    bring."""
    from shardwise.kernels.triton import attention, linear, pointwise

    return replace(
        REFERENCE,
        name="Triton",
        multiplies_codes=True,
        rms_norm=pointwise.rms_norm,
        gated=pointwise.gated,
        paged_attention=attention.TritonAttention.of,
        pack_weights=linear.pack_weights,
        pack_head=linear.pack_head,
    )
