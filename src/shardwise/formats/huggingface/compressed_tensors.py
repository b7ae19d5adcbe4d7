"""Quantized matrices as folders store them for other engines: the format compressed-tensors.

    pack-quantized   weight_packed [N, ceil(K b / 32)] in int32, codes without a sign, b bits each, from the lowest bit
                     on; weight_scale [N, G]; weight_zero_point [ceil(N b / 32), G], packed along N; weight_shape
    float-quantized  weight [N, K] in float8_e4m3fn, weight_scale [N, G]

Weights alone are quantized, whose integers engines read packed, those of 8 bits too. Format:
https://github.com/vllm-project/compressed-tensors (3 bits are packed without gaps, as its version
0.20 does)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.format import SCALE_DTYPE, QuantizedMatrix, codes_of, pack
from shardwise.quant.scheme import Scheme


def stored_tensors(quantized: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix, by the ends of their names; they share no memory with it."""
    scheme = quantized.scheme
    num_rows, num_columns = quantized.shape
    scales = quantized.scales.clone(memory_format=torch.contiguous_format)
    if scheme.kind == "fp8":
        return {"weight": quantized.codes.clone(), "weight_scale": scales}
    codes = codes_of(quantized)
    unsigned = codes if scheme.zero else (codes.short() + scheme.levels // 2).to(torch.uint8)
    found = {"weight_packed": words(unsigned, scheme.bits), "weight_scale": scales}
    if quantized.zeros is not None:
        assert quantized.zeros.dtype == torch.uint8, "zero points, not minima"
        found["weight_zero_point"] = words(quantized.zeros.t(), scheme.bits).t().contiguous()
    return found | {"weight_shape": torch.tensor([num_rows, num_columns])}


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] of uint8 in int32 words [N, ceil(K bits / 32)], zeros at the end."""
    packed = pack(codes.contiguous(), bits)
    return (
        F.pad(packed, (0, -packed.shape[1] % 4))
        .flatten()
        .clone()
        .view(torch.int32)
        .view(len(codes), -1)
    )


def stored_bytes(scheme: Scheme, shape: tuple[int, int]) -> dict[str, int]:
    """How many bytes each of `stored_tensors` has."""
    num_rows, num_columns = shape
    num_groups = scheme.num_groups(num_columns)
    scales = {"weight_scale": num_rows * num_groups * SCALE_DTYPE.itemsize}
    if scheme.kind == "fp8":
        return {"weight": num_rows * num_columns} | scales
    found = {"weight_packed": 4 * num_rows * math.ceil(num_columns * scheme.bits / 32)} | scales
    if scheme.zero:
        found["weight_zero_point"] = 4 * num_groups * math.ceil(num_rows * scheme.bits / 32)
    return found | {"weight_shape": 16}


def quantization_config(scheme: Scheme, unquantized: Sequence[str]) -> dict[str, Any]:
    """What `config.json` says; `unquantized` are linear layers that are as they were, by the names
    of the folder."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": not scheme.zero,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    form = "float-quantized" if scheme.kind == "fp8" else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
