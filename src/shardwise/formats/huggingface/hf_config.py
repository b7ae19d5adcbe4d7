"""config.json of Hugging Face folders, to `ModelConfig` and back."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwise.config import Activation, ModelConfig, RopeScaling, check_positive, check_size
from shardwise.formats.config_files import config_errors, get_flag, get_object, read_json_object
from shardwise.formats.families import Family, family_of, find_family

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
MAX_WINDOW_LAYERS = 28
"""The default of transformers for `max_window_layers`."""


def from_hugging_face(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate the content of a config.json, of transformers 4 or 5.

    Raises ValueError, in one sentence that begins with `source`, for what is malformed or not
    supported.
    """
    family = find_family(raw.get("model_type"), source)
    with config_errors(source):
        for key, supported in family.required.items():
            if get_flag(raw, key, supported) != supported:
                raise ValueError(f"{key} = {str(not supported).lower()} is not supported")
        return _model_config(raw, family)


def _model_config(raw: dict[str, Any], family: Family) -> ModelConfig:
    keys = family.keys
    layers = check_size(keys.num_layers, raw[keys.num_layers])
    hidden = check_size(keys.hidden_size, raw[keys.hidden_size])
    heads = check_size(keys.num_heads, raw[keys.num_heads])
    max_positions = raw.get(keys.max_positions, keys.default_max_positions)
    if max_positions is None:
        raise KeyError(keys.max_positions)
    norm_eps = raw.get(keys.norm_eps, keys.default_norm_eps)
    window, windowed_layers = _sliding_window(raw, family, layers)
    return ModelConfig(
        family=family.model_type,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=_ffn_size(raw, family, hidden),
        num_heads=heads,
        num_kv_heads=(raw.get(keys.num_kv_heads) if keys.num_kv_heads else None) or heads,
        head_dim=(raw.get(keys.head_dim) if keys.head_dim else None) or hidden // heads,
        vocab_size=raw["vocab_size"],
        max_positions=max_positions,
        tied=get_flag(raw, "tie_word_embeddings", family.tied),
        norm=family.norm,
        norm_eps=check_positive(keys.norm_eps, norm_eps),
        activation=_activation(raw.get(keys.activation, ACTIVATION_NAMES[family.activation])),
        gated=family.gated,
        positions=family.positions,
        **(_rope(raw) if family.positions == "rope" else {}),
        qkv_bias=_bias(raw, family.qkv_bias),
        out_bias=_bias(raw, family.out_bias),
        mlp_bias=_bias(raw, family.mlp_bias),
        qk_norm=family.qk_norm,
        sliding_window=window,
        windowed_layers=windowed_layers,
    )


def _ffn_size(raw: dict[str, Any], family: Family, hidden: int) -> Any:
    keys = family.keys
    if keys.default_ffn_ratio is None:
        return raw[keys.ffn_size]
    return raw.get(keys.ffn_size) or keys.default_ffn_ratio * hidden


def _bias(raw: dict[str, Any], rule: bool | str) -> bool:
    return get_flag(raw, rule) if isinstance(rule, str) else rule


def _activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _sliding_window(
    raw: dict[str, Any], family: Family, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """Return the window in tokens and the layers that have it."""
    window = raw.get("sliding_window")
    is_optional = family.window == "optional"
    if not window or family.window == "never":
        return None, frozenset()
    if is_optional and not get_flag(raw, "use_sliding_window"):
        return None, frozenset()
    check_size("sliding_window", window)
    if types := raw.get("layer_types"):
        layers = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    else:
        first = raw.get("max_window_layers", MAX_WINDOW_LAYERS) if is_optional else 0
        layers = list(range(first, num_layers))
    return (window, frozenset(layers)) if layers else (None, frozenset())


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Read base and scaling of RoPE: transformers 5 has both under `rope_parameters`."""
    rope = get_object(raw, "rope_parameters")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    return {
        "rope_theta": check_positive("rope_theta", theta),
        "rope_scaling": _rope_scaling(rope or get_object(raw, "rope_scaling")),
    }


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", check_positive("rope scaling: factor", raw["factor"]))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (check_positive(f"rope scaling: {key}", raw[key]) for key in keys)
        return RopeScaling("llama3", factor, low, high, raw["original_max_position_embeddings"])
    raise ValueError(f"unknown rope scaling {kind!r}; known are linear, llama3")


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """Return the content of the config.json that transformers (4 and 5) reads as this model."""
    family = family_of(config)
    keys = family.keys
    raw: dict[str, Any] = {
        "architectures": [family.transformers_class],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        keys.num_layers: config.num_layers,
        keys.hidden_size: config.hidden_size,
        keys.ffn_size: config.ffn_size,
        keys.num_heads: config.num_heads,
        keys.max_positions: config.max_positions,
        keys.norm_eps: config.norm_eps,
        keys.activation: ACTIVATION_NAMES[config.activation],
    }
    if keys.num_kv_heads:
        raw[keys.num_kv_heads] = config.num_kv_heads
    if keys.head_dim:
        raw[keys.head_dim] = config.head_dim
    if config.positions == "rope":
        raw["rope_theta"] = config.rope_theta
    if config.rope_scaling:
        raw["rope_scaling"] = _rope_scaling_to_hugging_face(config.rope_scaling)
    for rule, has_bias in (
        (family.out_bias, config.out_bias),
        (family.mlp_bias, config.mlp_bias),
        (family.qkv_bias, config.qkv_bias),
    ):
        if isinstance(rule, str):
            raw[rule] = has_bias
    return raw | _sliding_window_to_hugging_face(config, family)


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError if a config.json cannot describe the model: nothing could load it again."""
    loaded = from_hugging_face(to_hugging_face(config))
    for field in fields(config):
        ours = getattr(config, field.name)
        theirs = getattr(loaded, field.name)
        if ours != theirs:
            raise ValueError(
                f"{field.name} of a {config.family} model cannot be {ours!r}; {theirs!r} works"
            )


def _sliding_window_to_hugging_face(config: ModelConfig, family: Family) -> dict[str, Any]:
    if family.window == "every layer":
        return {"sliding_window": config.sliding_window}
    if not config.sliding_window:
        return {}
    kinds = [
        "sliding_attention" if layer in config.windowed_layers else "full_attention"
        for layer in range(config.num_layers)
    ]
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(config.windowed_layers),
        "layer_types": kinds,
    }


def _rope_scaling_to_hugging_face(scaling: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw


def read_folder_config(folder: Path) -> ModelConfig:
    """Read the config of a Hugging Face folder. Raises ValueError without a readable
    config.json."""
    return from_hugging_face(read_config_json(folder), str(folder / "config.json"))


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder. Raises ValueError if it is missing or malformed."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    return read_json_object(path)
