"""Model configs of the Hugging Face format: config.json to ModelConfig and back."""

import json
from pathlib import Path
from typing import Any

from shardwise.config import (
    Activation,
    ModelConfig,
    RopeScaling,
    check_flag,
    check_positive,
    check_size,
)
from shardwise.formats.config_errors import reading

ARCHITECTURES = {  # model_type in config.json -> architecture that transformers names for it
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def from_hugging_face(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate a Hugging Face `config.json`, of transformers 4 or 5. Raises ValueError for what is
    not supported."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ValueError(
            f"{source}: architecture {family!r} is not known; known are {', '.join(ARCHITECTURES)}"
        )
    with reading(source):
        return gpt2_config(raw) if family == "gpt2" else llama_config(raw, family)


def flag(raw: dict[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    return default if value is None else check_flag(key, value)


def table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, not {value!r:.60}")
    return value or {}


def gpt2_config(raw: dict[str, Any]) -> ModelConfig:
    if flag(raw, "scale_attn_by_inverse_layer_idx") or not flag(raw, "scale_attn_weights", True):
        raise ValueError(
            "GPT-2 with another scale of attention than 1 / sqrt(head size) is not supported"
        )
    hidden = check_size("n_embd", raw["n_embd"])
    heads = check_size("n_head", raw["n_head"])
    return ModelConfig(
        family="gpt2",
        num_layers=raw["n_layer"],
        hidden_size=hidden,
        ffn_size=raw.get("n_inner") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=raw["vocab_size"],
        max_positions=raw["n_positions"],
        tied=flag(raw, "tie_word_embeddings", True),
        norm="layer",
        norm_eps=check_positive("layer_norm_epsilon", raw.get("layer_norm_epsilon", 1e-5)),
        activation=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def llama_config(raw: dict[str, Any], family: str) -> ModelConfig:
    """Llama and the families that differ from it by a flag: biases, q/k norm, a window."""
    hidden = check_size("hidden_size", raw["hidden_size"])
    heads = check_size("num_attention_heads", raw["num_attention_heads"])
    layers = check_size("num_hidden_layers", raw["num_hidden_layers"])
    rope = table(raw, "rope_parameters")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    bias = family in ("llama", "qwen3") and flag(raw, "attention_bias")
    window, windowed = sliding_window(raw, family, layers)
    return ModelConfig(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        vocab_size=raw["vocab_size"],
        max_positions=raw.get("max_position_embeddings", 2048),
        tied=flag(raw, "tie_word_embeddings"),
        norm_eps=check_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        activation=activation(raw.get("hidden_act", "silu")),
        rope_theta=check_positive("rope_theta", theta),
        rope_scaling=rope_scaling(rope or table(raw, "rope_scaling")),
        qkv_bias=family == "qwen2" or bias,
        out_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and flag(raw, "mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=window,
        windowed_layers=windowed,
    )


def activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def sliding_window(
    raw: dict[str, Any], family: str, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """The window and its layers: Mistral windows all; Qwen only on request, from layer
    `max_window_layers` on."""
    window = raw.get("sliding_window")
    if (
        not window
        or family == "llama"
        or (family != "mistral" and not flag(raw, "use_sliding_window"))
    ):
        return None, frozenset()
    check_size("sliding_window", window)
    if types := raw.get("layer_types"):
        layers = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    else:
        layers = list(
            range(0 if family == "mistral" else raw.get("max_window_layers", 28), num_layers)
        )
    return (window, frozenset(layers)) if layers else (None, frozenset())


def rope_scaling(raw: dict[str, Any]) -> RopeScaling | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", check_positive("rope scaling: factor", raw["factor"]))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (check_positive(f"rope scaling: {key}", raw[key]) for key in keys)
        return RopeScaling("llama3", factor, low, high, raw["original_max_position_embeddings"])
    raise ValueError(f"rope scaling {kind!r} is not known; known are linear, llama3")


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers (4 and 5) reads as this model."""
    common = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
    }
    activation_name = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
    if config.family == "gpt2":
        return common | {
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_inner": config.ffn_size,
            "n_head": config.num_heads,
            "n_positions": config.max_positions,
            "activation_function": activation_name,
            "layer_norm_epsilon": config.norm_eps,
        }
    raw = common | {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_name,
        "rope_theta": config.rope_theta,
    }
    if config.rope_scaling:
        raw["rope_scaling"] = rope_scaling_to_hugging_face(config.rope_scaling)
    if config.family in ("llama", "qwen3"):
        raw["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        raw["sliding_window"] = config.sliding_window
    elif config.sliding_window:
        first = min(config.windowed_layers)
        kinds = [
            "sliding_attention" if i in config.windowed_layers else "full_attention"
            for i in range(config.num_layers)
        ]
        raw |= {
            "use_sliding_window": True,
            "sliding_window": config.sliding_window,
            "max_window_layers": first,
            "layer_types": kinds,
        }
    return raw


def rope_scaling_to_hugging_face(scaling: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw


def read_folder_config(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder. Raises ValueError when it has no readable
    `config.json`."""
    return from_hugging_face(read_config_json(folder), str(folder / "config.json"))


def read_config_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return raw
