"""RoPE in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of
transformers 4, to the fields of `ModelConfig` and back.

Source: RotaryEmbeddingConfigMixin and ROPE_INIT_FUNCTIONS of transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.config import (
    ModelConfig,
    RopeScaling,
    RopeScalingKind,
    check_positive,
    check_size,
    yarn_attention_factor,
)
from shardwise.formats.config_files import get_flag, get_object

DEFAULT_THETA = 10000.0
KINDS: tuple[RopeScalingKind, ...] = ("linear", "dynamic", "llama3", "yarn")
UNSUPPORTED = {
    "longrope": "LongRoPE has a table of frequencies for short contexts and another for long ones",
    "su": "LongRoPE has a table of frequencies for short contexts and another for long ones",
    "mrope": "multimodal RoPE has positions of several axes",
}
"""Kinds of scaling that are refused, and why."""


def read_rope(raw: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and `max_positions` of a config.json whose context length
    is `max_positions`.

    The context of `dynamic` and `yarn` is `factor` times the original one, as in vLLM; config.json
    often states the original one. Raises ValueError for what is malformed or not supported, and if
    both spellings are given and contradict each other.
    """
    new = get_object(raw, "rope_parameters")
    old = get_object(raw, "rope_scaling")
    rope = _read_spelling(new or old, raw, max_positions)
    if new and old and _read_spelling(old, raw, max_positions) != rope:
        raise ValueError(
            "rope_parameters and rope_scaling contradict each other; keep the one that is meant, "
            "with rope_theta in it"
        )
    return rope


def _read_spelling(
    rope: Mapping[str, Any], raw: Mapping[str, Any], max_positions: int
) -> dict[str, Any]:
    theta = rope.get("rope_theta", raw.get("rope_theta", DEFAULT_THETA))
    original = rope.get("original_max_position_embeddings")
    stated = raw.get("original_max_position_embeddings", original)  # the outer one wins
    scaling = _read_scaling(rope, max_positions, max_positions if stated is None else stated)
    if scaling is not None and scaling.kind in ("dynamic", "yarn"):
        max_positions = max(max_positions, scaling.scaled_max_positions)
    return {
        "rope_theta": check_positive("rope_theta", theta),
        "rope_scaling": scaling,
        "max_positions": max_positions,
    }


def _read_scaling(rope: Mapping[str, Any], max_positions: int, original: Any) -> RopeScaling | None:
    """Read the scaling of a context of `original` positions, extended to `max_positions`."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in KINDS:
        reason = f": {UNSUPPORTED[kind]}" if isinstance(kind, str) and kind in UNSUPPORTED else ""
        raise ValueError(
            f"unknown or unsupported rope scaling {kind!r}{reason}; known are {', '.join(KINDS)}"
        )
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor"))
    if kind == "dynamic":
        return RopeScaling("dynamic", _number(rope, "factor"), original_max_positions=max_positions)
    check_size("original_max_position_embeddings", original)
    if kind == "llama3":
        factor, low, high = (
            _number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        return RopeScaling("llama3", factor, low, high, original)
    has_factor = rope.get("factor") is not None
    factor = _number(rope, "factor") if has_factor else max_positions / original
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        beta_slow=_number(rope, "beta_slow") if rope.get("beta_slow") else 1.0,
        beta_fast=_number(rope, "beta_fast") if rope.get("beta_fast") else 32.0,
        attention_factor=_attention_factor(rope, factor),
        truncate=get_flag(rope, "truncate", True),
    )


def _number(rope: Mapping[str, Any], key: str) -> float:
    value = rope.get(key)
    if value is None:
        raise KeyError(key)
    return check_positive(f"rope scaling: {key}", value)


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines under YaRN: the one stated, or the one that follows
    from `mscale` and `mscale_all_dim`."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return yarn_attention_factor(factor)
    numerator = yarn_attention_factor(factor, _number(rope, "mscale"))
    return numerator / yarn_attention_factor(factor, _number(rope, "mscale_all_dim"))


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for the RoPE of a model, its context length not included."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is None:
        return raw
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        rope |= {
            "beta_slow": scaling.beta_slow,
            "beta_fast": scaling.beta_fast,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    return raw | {"rope_scaling": rope}


def written_max_positions(config: ModelConfig) -> int:
    """Return the context length to state in config.json: the original one for `dynamic`."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        return scaling.original_max_positions
    return config.max_positions
