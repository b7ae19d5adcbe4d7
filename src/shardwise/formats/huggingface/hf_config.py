"""config.json of Hugging Face folders, to `ModelConfig` and back."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwise.config import MAX_LAYERS, Activation, ModelConfig, check_positive, check_size
from shardwise.formats.config_files import config_errors, get_flag, read_json_object
from shardwise.formats.families import Family, family_of, find_family
from shardwise.formats.huggingface.config_fields import check_fields, own_spelling
from shardwise.formats.huggingface.rope_parameters import (
    read_rope,
    write_rope,
    written_max_positions,
)

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
MAX_WINDOW_LAYERS = 28
DEFAULT_WINDOW = 4096
"""The defaults of transformers for `max_window_layers` and `sliding_window`."""
SLIDING = "sliding_attention"
FULL = "full_attention"
"""The entries of `layer_types`."""


def from_hugging_face(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate the content of a config.json, of transformers 4 or 5.

    Raises ValueError, in one sentence that begins with `source`, for what is malformed or not
    supported.
    """
    family = find_family(raw.get("model_type"), source)
    with config_errors(source):
        check_fields(raw, family, source)
        return _model_config(own_spelling(raw, family.keys), family)


def _model_config(raw: dict[str, Any], family: Family) -> ModelConfig:
    keys = family.keys
    layers = check_size(keys.num_layers, raw[keys.num_layers], MAX_LAYERS)
    hidden = check_size(keys.hidden_size, raw[keys.hidden_size])
    heads = check_size(keys.num_heads, raw[keys.num_heads])
    max_positions = raw.get(keys.max_positions, keys.default_max_positions)
    if max_positions is None:
        raise KeyError(keys.max_positions)
    check_size(keys.max_positions, max_positions)
    positions = {"max_positions": max_positions}
    if family.positions == "rope":
        positions |= read_rope(raw, max_positions)
    norm_eps = raw.get(keys.norm_eps, keys.default_norm_eps)
    window, windowed_layers = _sliding_window(raw, family, layers)
    return ModelConfig(
        family=family.model_type,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=_ffn_size(raw, family, hidden),
        num_heads=heads,
        num_kv_heads=_optional(raw, keys.num_kv_heads, keys.default_num_kv_heads, heads),
        head_dim=_optional(raw, keys.head_dim, keys.default_head_dim, hidden // heads),
        vocab_size=raw["vocab_size"],
        tied=get_flag(raw, "tie_word_embeddings", family.tied),
        norm=family.norm,
        norm_eps=check_positive(keys.norm_eps, norm_eps),
        activation=_activation(raw.get(keys.activation, ACTIVATION_NAMES[family.activation])),
        gated=family.gated,
        positions=family.positions,
        **positions,
        qkv_bias=_bias(raw, family.qkv_bias),
        out_bias=_bias(raw, family.out_bias),
        mlp_bias=_bias(raw, family.mlp_bias),
        qk_norm=family.qk_norm,
        sliding_window=window,
        windowed_layers=windowed_layers,
    )


def _optional(raw: dict[str, Any], key: str | None, default: int | None, derived: int) -> Any:
    """Return the value of a key that a family may lack: `default` if the file leaves it out, and
    `derived` from other sizes if it is null or the family has no such key."""
    value = None if key is None else raw.get(key, default)
    return derived if value is None else value


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
    types = _layer_types(raw, num_layers)
    is_optional = family.window == "optional"
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if family.window == "never" or (is_optional and not get_flag(raw, "use_sliding_window")):
        window = None
    if not window:
        if types and SLIDING in types:
            raise ValueError(f"layer_types has {SLIDING}, but the other fields state no window")
        return None, frozenset()
    check_size("sliding_window", window)
    if types is None:
        first = raw.get("max_window_layers", MAX_WINDOW_LAYERS) if is_optional else 0
        layers = list(range(first, num_layers))
    else:
        layers = [layer for layer, kind in enumerate(types) if kind == SLIDING]
    if not is_optional and len(layers) != num_layers:
        raise ValueError(
            f"layer_types states windows in {len(layers)} of {num_layers} layers, but models of "
            f"{family.model_type} have them in all or none"
        )
    return (window, frozenset(layers)) if layers else (None, frozenset())


def _layer_types(raw: dict[str, Any], num_layers: int) -> list[str] | None:
    """Return the kind of attention of each layer, if the config states it."""
    types = raw.get("layer_types")
    if types is None:
        return None
    kinds = (SLIDING, FULL)
    if not isinstance(types, list) or not all(each in kinds for each in types):
        raise ValueError(f"layer_types must be a list of {' and '.join(kinds)}, not {types!r:.80}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return types


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
        keys.max_positions: written_max_positions(config),
        keys.norm_eps: config.norm_eps,
        keys.activation: ACTIVATION_NAMES[config.activation],
    }
    if keys.num_kv_heads:
        raw[keys.num_kv_heads] = config.num_kv_heads
    if keys.head_dim:
        raw[keys.head_dim] = config.head_dim
    if config.positions == "rope":
        raw |= write_rope(config)
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
    if family.window == "never" or not config.sliding_window:
        return {}
    kinds = [
        SLIDING if layer in config.windowed_layers else FULL for layer in range(config.num_layers)
    ]
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(config.windowed_layers),
        "layer_types": kinds,
    }


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
