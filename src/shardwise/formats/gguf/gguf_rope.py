"""RoPE in GGUF files, `llama.rope.*`, to the fields of `ModelConfig` and back.

The meaning of the keys is llama.cpp's (src/llama-context.cpp), with two differences: it ignores
`yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow` in files of our architectures, although
convert_hf_to_gguf.py writes them.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config import ModelConfig, RopeScaling, check_positive, yarn_attention_factor
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.gguf.gguf_keys import Keys

ROPE_FREQS = "rope_freqs.weight"
"""The tensor with the divisors of RoPE frequencies: llama.cpp's form of Llama 3.1's scaling."""
KINDS = ("none", "linear", "yarn")
TOLERANCE = 1e-6
"""The error of a factor that was stored in fp32."""


def rope_of_keys(file: Gguf, keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and `max_positions` of a file whose context length is
    `context`. Raises ValueError for what is malformed or not supported."""
    rotated = keys.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{keys.architecture}.rope.dimension_count is {rotated}, but only RoPE over the whole "
            f"head of {head_dim} is supported"
        )
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling_of_keys(keys, context)
    if ROPE_FREQS in file.tensors:
        if scaling is not None:
            raise ValueError(
                f"RoPE scaled both by {ROPE_FREQS} and by a {scaling.kind} factor is unsupported"
            )
        scaling = _scaling_from_tensor(file, head_dim, theta)
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, scaling.scaled_max_positions)
    return {"rope_theta": theta, "rope_scaling": scaling, "max_positions": context}


def _scaling_of_keys(keys: Keys, context: int) -> RopeScaling | None:
    """Read the scaling that keys state; a factor without a type is linear."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in KINDS:
        raise ValueError(
            f"unknown or unsupported rope scaling {kind!r}; known are {', '.join(KINDS)}"
        )
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear") or 1.0)
    multiplier = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original_max_positions=keys.size("rope.scaling.original_context_length", context),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            attention_factor=multiplier
            * keys.number("rope.scaling.yarn_attn_factor", yarn_attention_factor(factor)),
        )
    if multiplier != 1:
        raise ValueError(
            f"{keys.architecture}.rope.scaling.attn_factor = {multiplier} is supported with the "
            f"type yarn only, not {kind}"
        )
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None


def _scaling_from_tensor(file: Gguf, head_dim: int, theta: float) -> RopeScaling:
    tensor = file.tensors[ROPE_FREQS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{ROPE_FREQS} is {tensor.kind} of shape {tensor.shape}, and should be F32 of shape "
            f"({head_dim // 2},)"
        )
    divisors = file.raw_rows(tensor.name, 0, tensor.shape[0]).view("<f4")
    check_positive(f"the largest value of {ROPE_FREQS}", float(divisors.max()))
    scaling = scaling_of_divisors(divisors, head_dim, theta)
    if scaling is None:
        raise ValueError(
            f"this file's RoPE frequencies ({ROPE_FREQS}) are not Llama 3.1's, the only ones that "
            "are supported"
        )
    return scaling


def scaling_of_divisors(
    divisors: NDArray[np.float32], head_dim: int, theta: float
) -> RopeScaling | None:
    """Return the scaling with these divisors, or None if its constants are not Llama 3.1's: the
    divisors do not determine others."""
    scaling = RopeScaling("llama3", float(divisors.max()))
    is_known = np.allclose(divisors, llama3_divisors(scaling, head_dim, theta), rtol=1e-3, atol=0)
    return scaling if is_known else None


def llama3_divisors(scaling: RopeScaling, head_dim: int, theta: float) -> NDArray[np.float64]:
    """Return the divisors [head_dim / 2] that Llama 3.1 applies to RoPE frequencies."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    num_rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    unscaled = np.clip((num_rotations - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / (unscaled + (1 - unscaled) / scaling.factor)
    return divisors


def rope_divisors(config: ModelConfig) -> NDArray[np.float32] | None:
    """Return the content of the tensor `ROPE_FREQS` for a config, or None if it needs none."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    return llama3_divisors(config.rope_scaling, config.head_dim, config.rope_theta).astype("<f4")


def rope_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return the keys for the RoPE of a config, without architecture. Raises ValueError for what
    GGUF has no key for."""
    keys: dict[str, Any] = {
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
    }
    scaling = config.rope_scaling
    if scaling is None:
        return keys
    if scaling.kind == "dynamic" or not scaling.truncate:
        what = "dynamic RoPE scaling" if scaling.kind == "dynamic" else "YaRN without truncate"
        raise ValueError(f"GGUF cannot store {what}; a folder can: --quant int8 or int4-g32")
    divisors = rope_divisors(config)
    if divisors is not None:
        if scaling_of_divisors(divisors, config.head_dim, config.rope_theta) is None:
            raise ValueError(
                "GGUF cannot store llama3 RoPE scaling with constants other than Llama 3.1's; a "
                "folder can: --quant int8 or int4-g32"
            )
        return keys
    keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    return keys | _yarn_metadata(scaling) if scaling.kind == "yarn" else keys


def _yarn_metadata(scaling: RopeScaling) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rope.scaling.original_context_length": scaling.original_max_positions,
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }
    multiplier = scaling.attention_factor / yarn_attention_factor(scaling.factor)
    if abs(multiplier - 1) > TOLERANCE:
        keys["rope.scaling.attn_factor"] = multiplier
    return keys
