"""Quantized matrices in the format compressed-tensors, which vLLM and others load.

    pack-quantized   weight_packed [N, ceil(K b / 32)] in int32: unsigned codes of b bits from the
                     lowest bit; weight_scale [N, G]; weight_zero_point [ceil(N b / 32), G], packed
                     along N; weight_shape
    float-quantized  weight [N, K] in float8_e4m3fn, weight_scale [N, G]

Only weights are quantized. Engines expect the integers of such models packed, even 8-bit ones.
Format: https://github.com/vllm-project/compressed-tensors (3 bits are packed without gaps, as
in its version 0.20)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.format import SCALE_DTYPE, QuantizedMatrix, codes_of, pack
from shardwise.quant.scheme import Scheme


def compress(matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """Return the tensors of a matrix by their suffixes; they share no memory with it."""
    scheme = matrix.scheme
    num_rows, num_columns = matrix.shape
    scales = matrix.scales.clone(memory_format=torch.contiguous_format)
    if scheme.kind == "fp8":
        return {"weight": matrix.codes.clone(), "weight_scale": scales}
    codes = codes_of(matrix)
    unsigned = codes if scheme.zero else (codes.short() + scheme.levels // 2).to(torch.uint8)
    tensors = {"weight_packed": _pack_words(unsigned, scheme.bits), "weight_scale": scales}
    if matrix.zeros is not None:
        assert matrix.zeros.dtype == torch.uint8, "zero points, not minima"
        packed = _pack_words(matrix.zeros.t(), scheme.bits)
        tensors["weight_zero_point"] = packed.t().contiguous()
    return tensors | {"weight_shape": torch.tensor([num_rows, num_columns])}


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [N, K] into int32 words [N, ceil(K bits / 32)], padded with zeros."""
    packed = pack(codes.contiguous(), bits)
    padded = F.pad(packed, (0, -packed.shape[1] % 4))
    return padded.flatten().clone().view(torch.int32).view(len(codes), -1)


def compressed_bytes(scheme: Scheme, shape: tuple[int, int]) -> dict[str, int]:
    """Return the bytes of each tensor that `compress` returns."""
    num_rows, num_columns = shape
    num_groups = scheme.num_groups(num_columns)
    scales = {"weight_scale": num_rows * num_groups * SCALE_DTYPE.itemsize}
    if scheme.kind == "fp8":
        return {"weight": num_rows * num_columns} | scales
    sizes = {"weight_packed": 4 * num_rows * math.ceil(num_columns * scheme.bits / 32)} | scales
    if scheme.zero:
        sizes["weight_zero_point"] = 4 * num_groups * math.ceil(num_rows * scheme.bits / 32)
    return sizes | {"weight_shape": 16}


def quantization_config(scheme: Scheme, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json; `unquantized` names the linear layers of the
    folder that are not quantized."""
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
    format = "float-quantized" if scheme.kind == "fp8" else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
