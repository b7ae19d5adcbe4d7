"""The metadata of GGUF files, to `ModelConfig` and back.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config import ModelConfig, RopeScaling, check_positive, check_size
from shardwise.formats.config_files import config_errors
from shardwise.formats.families import Family, family_of, find_gguf_family, windowed_family
from shardwise.formats.gguf.gguf_file import Gguf

ROPE_FREQS = "rope_freqs.weight"
"""The tensor with the divisors of RoPE frequencies: llama.cpp's form of Llama 3.1's scaling."""
QUANTIZATION_VERSION = 2
NORM_EPS_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}


def config_from_gguf(file: Gguf, source: str) -> ModelConfig:
    """Translate the metadata of a GGUF file; ties and biases, which have no keys, follow from the
    names of its tensors.

    Raises ValueError, in one sentence that begins with `source`, for what is malformed or not
    supported.
    """
    family = find_gguf_family(file.metadata.get("general.architecture"), source)
    with config_errors(source):
        return _config_from_metadata(file, family)


class _Keys:
    """The metadata of one architecture, `llama.block_count` and so on."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        return check_size(f"{self.architecture}.{key}", self._required(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        return check_positive(f"{self.architecture}.{key}", self._required(key, default))

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value


def _config_from_metadata(file: Gguf, family: Family) -> ModelConfig:
    keys = _Keys(file.metadata, family.gguf_architecture)
    hidden = keys.size("embedding_length")
    heads = keys.size("attention.head_count")
    layers = keys.size("block_count")
    head_dim = keys.size("attention.key_length", hidden // heads)
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    has_window = keys.get("attention.sliding_window", 0) != 0
    return ModelConfig(
        family=(windowed_family(family) if has_window else family).model_type,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=keys.size("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=keys.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=keys.get("vocab_size") or len(tokens),
        max_positions=keys.size("context_length"),
        tied=not _stores(file, family, "head", "weight"),
        norm=family.norm,
        norm_eps=keys.number(NORM_EPS_KEYS[family.norm]),
        activation=family.activation,
        gated=family.gated,
        positions=family.positions,
        **(_rope_from_metadata(file, keys, head_dim) if family.positions == "rope" else {}),
        qkv_bias=_stores(file, family, "qkv", "bias"),
        out_bias=_stores(file, family, "out", "bias"),
        mlp_bias=_stores(file, family, "down", "bias"),
        qk_norm=_stores(file, family, "q_norm", "weight"),
        sliding_window=keys.size("attention.sliding_window") if has_window else None,
        windowed_layers=frozenset(range(layers)) if has_window else frozenset(),
    )


def _stores(file: Gguf, family: Family, parameter: str, kind: str) -> bool:
    """Return True if the file has that weight or bias of the first block, or of the head."""
    stems = family.gguf.stems
    stem = stems.get(parameter) or stems[f"{parameter}.q"]
    return f"{stem.format(0)}.{kind}" in file.tensors


def _rope_from_metadata(file: Gguf, keys: _Keys, head_dim: int) -> dict[str, Any]:
    rotated = keys.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{keys.architecture}.rope.dimension_count is {rotated}, but only RoPE over the whole "
            f"head of {head_dim} is supported"
        )
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "rope_theta": theta,
        "rope_scaling": _scaling_from_metadata(file, keys, head_dim, theta),
    }


def _scaling_from_metadata(
    file: Gguf, keys: _Keys, head_dim: int, theta: float
) -> RopeScaling | None:
    """Read the scaling as llama.cpp does: a factor without a type is linear, and Llama 3.1's is a
    tensor of divisors."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"unknown rope scaling {kind!r}; known are linear, llama3")
    factor = keys.number("rope.scaling.factor", 1.0)
    linear = RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None
    if ROPE_FREQS not in file.tensors:
        return linear
    if linear:
        raise ValueError(f"RoPE scaled both by {ROPE_FREQS} and by a linear factor is unsupported")
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


def config_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return a config as metadata. Raises ValueError for what GGUF has no key for."""
    family = family_of(config)
    num_windowed = len(config.windowed_layers)
    if config.activation != family.activation:
        raise ValueError(
            f"GGUF has no key for the activation {config.activation} in a model of {config.family}"
        )
    if num_windowed not in (0, config.num_layers):
        raise ValueError("GGUF has no key for a sliding window in only some layers")
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        NORM_EPS_KEYS[config.norm]: config.norm_eps,
    }
    if config.positions == "rope":
        keys |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": config.rope_theta,
        }
    if num_windowed:
        keys["attention.sliding_window"] = config.sliding_window
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    divisors = rope_divisors(config)
    if divisors is not None and _has_other_constants(divisors, config):
        raise ValueError(
            "GGUF cannot store llama3 RoPE scaling with constants other than Llama 3.1's; a folder "
            "can: --quant int8 or int4-g32"
        )
    metadata = {f"{family.gguf_architecture}.{key}": value for key, value in keys.items()}
    return metadata | {"general.quantization_version": QUANTIZATION_VERSION}


def _has_other_constants(divisors: NDArray[np.float32], config: ModelConfig) -> bool:
    return scaling_of_divisors(divisors, config.head_dim, config.rope_theta) is None
