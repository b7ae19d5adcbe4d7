"""The metadata of GGUF files, to `ModelConfig` and back.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from typing import Any

from shardwise.config import MAX_LAYERS, ModelConfig
from shardwise.formats.config_files import config_errors
from shardwise.formats.families import Family, family_of, find_gguf_family, windowed_family
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.gguf.gguf_keys import Keys
from shardwise.formats.gguf.gguf_rope import rope_metadata, rope_of_keys

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
        keys = Keys(file.metadata, family.gguf_architecture)
        keys.check(source)
        return _config_from_metadata(file, family, keys)


def _config_from_metadata(file: Gguf, family: Family, keys: Keys) -> ModelConfig:
    hidden = keys.size("embedding_length")
    heads = keys.size("attention.head_count")
    layers = keys.size("block_count", most=MAX_LAYERS)
    head_dim = keys.size("attention.key_length", hidden // heads)
    value_size = keys.size("attention.value_length", head_dim)
    if value_size != head_dim:
        raise ValueError(
            f"{keys.architecture}.attention.value_length is {value_size}, but only values as wide "
            f"as keys, {head_dim}, are supported"
        )
    context = keys.size("context_length")
    positions: dict[str, Any] = {"max_positions": context}
    if family.positions == "rope":
        positions |= rope_of_keys(file, keys, head_dim, context)
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
        vocab_size=keys.get("vocab_size", len(tokens)),
        tied=not _stores(file, family, "head", "weight"),
        norm=family.norm,
        norm_eps=keys.number(NORM_EPS_KEYS[family.norm]),
        activation=family.activation,
        gated=family.gated,
        positions=family.positions,
        **positions,
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
            **rope_metadata(config),
        }
    if num_windowed:
        keys["attention.sliding_window"] = config.sliding_window
    metadata = {f"{family.gguf_architecture}.{key}": value for key, value in keys.items()}
    return metadata | {"general.quantization_version": QUANTIZATION_VERSION}
