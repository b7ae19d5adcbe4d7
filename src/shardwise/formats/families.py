"""The families of models: one record each, with everything in which their files differ.

A new family with the same math is one more record, listed in `FAMILIES`; all other code asks the
record. Names of GGUF tensors follow gguf-py/gguf/tensor_mapping.py of
https://github.com/ggml-org/llama.cpp. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import Activation, ModelConfig, Positions
from shardwise.formats.tensor_names import TensorNames

WindowRule = Literal["never", "every layer", "optional"]


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of config.json for the sizes of a model, and the defaults of absent ones, which are
    those of transformers.

    Attributes:
        num_kv_heads: None if there are as many KV heads as heads.
        head_dim: None if it is always hidden size / heads.
        default_num_kv_heads: KV heads if the key is absent; None if as many as heads.
        default_head_dim: head size if the key is absent; None if it is hidden size / heads.
        default_norm_eps: epsilon of norms if the key is absent.
        default_max_positions: context length if the key is absent; None if the key is required.
        default_ffn_ratio: FFN size / hidden size if the key is absent; None if it is required.
    """

    num_layers: str
    hidden_size: str
    ffn_size: str
    num_heads: str
    max_positions: str
    norm_eps: str
    activation: str
    num_kv_heads: str | None = None
    head_dim: str | None = None
    default_num_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_norm_eps: float = 1e-5
    default_max_positions: int | None = None
    default_ffn_ratio: int | None = None


@dataclass(frozen=True)
class Family:
    """The files of one family of models: how they describe and store a decoder.

    Attributes:
        model_type: the family's name here (`ModelConfig.family`) and in config.json.
        transformers_class: the class of transformers, under `architectures` in config.json.
        folder: tensor names in Hugging Face folders.
        gguf: tensor names in GGUF files.
        gguf_architecture: `general.architecture` of GGUF files; families may share one, and the
            first in `FAMILIES` then reads it.
        keys: the keys of config.json.
        norm, gated, positions, qk_norm: as in `ModelConfig`, the same for every model.
        activation, tied: as in `ModelConfig`, where config.json does not state them.
        qkv_bias, out_bias, mlp_bias: True or False, or the key of config.json that states it.
        window: which layers have a sliding window: never any, every layer, or layers from
            `max_window_layers` on if `use_sliding_window` is set.
        tokenizer_class: the class of tokenizer that goes with vocab.json and merges.txt, if any.
        pre_tokenizer: the name of its pre-tokenizer, in `tokenizers/bpe.py`.
    """

    model_type: str
    transformers_class: str
    folder: TensorNames
    gguf: TensorNames
    gguf_architecture: str
    keys: ConfigKeys
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    positions: Positions = "rope"
    qk_norm: bool = False
    activation: Activation = "silu"
    tied: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    window: WindowRule = "never"
    tokenizer_class: str = ""
    pre_tokenizer: str = ""


GGUF_STEMS = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm1": "blk.{}.attn_norm",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "out": "blk.{}.attn_output",
    "norm2": "blk.{}.ffn_norm",
    "down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}
GGUF_SPLIT = TensorNames(
    GGUF_STEMS
    | {
        "qkv.q": "blk.{}.attn_q",
        "qkv.k": "blk.{}.attn_k",
        "qkv.v": "blk.{}.attn_v",
        "gate_up.gate": "blk.{}.ffn_gate",
        "gate_up.up": "blk.{}.ffn_up",
    }
)

LLAMA = Family(
    model_type="llama",
    transformers_class="LlamaForCausalLM",
    folder=TensorNames(
        {
            "embed": "model.embed_tokens",
            "norm1": "model.layers.{}.input_layernorm",
            "qkv.q": "model.layers.{}.self_attn.q_proj",
            "qkv.k": "model.layers.{}.self_attn.k_proj",
            "qkv.v": "model.layers.{}.self_attn.v_proj",
            "q_norm": "model.layers.{}.self_attn.q_norm",
            "k_norm": "model.layers.{}.self_attn.k_norm",
            "out": "model.layers.{}.self_attn.o_proj",
            "norm2": "model.layers.{}.post_attention_layernorm",
            "gate_up.gate": "model.layers.{}.mlp.gate_proj",
            "gate_up.up": "model.layers.{}.mlp.up_proj",
            "down": "model.layers.{}.mlp.down_proj",
            "norm": "model.norm",
            "head": "lm_head",
        },
        prefix="model.",
    ),
    gguf=replace(GGUF_SPLIT, interleaved=frozenset({"qkv.q", "qkv.k"})),
    gguf_architecture="llama",
    keys=ConfigKeys(
        num_layers="num_hidden_layers",
        hidden_size="hidden_size",
        ffn_size="intermediate_size",
        num_heads="num_attention_heads",
        num_kv_heads="num_key_value_heads",
        head_dim="head_dim",
        max_positions="max_position_embeddings",
        norm_eps="rms_norm_eps",
        activation="hidden_act",
        default_norm_eps=1e-6,
        default_max_positions=2048,
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
)

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    transformers_class="MistralForCausalLM",
    keys=replace(LLAMA.keys, default_num_kv_heads=8, default_max_positions=131072),
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    window="every layer",
)

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    transformers_class="Qwen2ForCausalLM",
    gguf=GGUF_SPLIT,
    gguf_architecture="qwen2",
    keys=replace(LLAMA.keys, default_num_kv_heads=32, default_max_positions=32768),
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    window="optional",
    tokenizer_class="Qwen2Tokenizer",
    pre_tokenizer="qwen2",
)

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    transformers_class="Qwen3ForCausalLM",
    gguf_architecture="qwen3",
    keys=replace(QWEN2.keys, default_head_dim=128),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
)

GPT2 = Family(
    model_type="gpt2",
    transformers_class="GPT2LMHeadModel",
    folder=TensorNames(
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "norm1": "transformer.h.{}.ln_1",
            "qkv": "transformer.h.{}.attn.c_attn",
            "out": "transformer.h.{}.attn.c_proj",
            "norm2": "transformer.h.{}.ln_2",
            "gate_up": "transformer.h.{}.mlp.c_fc",
            "down": "transformer.h.{}.mlp.c_proj",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        prefix="transformer.",
        transposed=frozenset({"qkv", "out", "gate_up", "down"}),
    ),
    gguf=TensorNames(GGUF_STEMS | {"qkv": "blk.{}.attn_qkv", "gate_up": "blk.{}.ffn_up"}),
    gguf_architecture="gpt2",
    keys=ConfigKeys(
        num_layers="n_layer",
        hidden_size="n_embd",
        ffn_size="n_inner",
        num_heads="n_head",
        max_positions="n_positions",
        norm_eps="layer_norm_epsilon",
        activation="activation_function",
        default_max_positions=1024,
        default_ffn_ratio=4,
    ),
    norm="layer",
    gated=False,
    positions="learned",
    activation="gelu_tanh",
    tied=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tokenizer_class="GPT2Tokenizer",
    pre_tokenizer="gpt-2",
)

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
}


def family_of(config: ModelConfig) -> Family:
    """Return the record of a model's family."""
    return FAMILIES[config.family]


def find_family(model_type: object, source: str) -> Family:
    """Return the family with that `model_type` in config.json. Raises ValueError if there is
    none."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnknownArchitecture(source, model_type, FAMILIES)
    return FAMILIES[model_type]


def find_gguf_family(architecture: object, source: str) -> Family:
    """Return the first family with that `general.architecture` in GGUF files. Raises ValueError if
    there is none."""
    by_architecture: dict[str, Family] = {}
    for family in FAMILIES.values():
        by_architecture.setdefault(family.gguf_architecture, family)
    if not isinstance(architecture, str) or architecture not in by_architecture:
        raise UnknownArchitecture(source, architecture, by_architecture)
    return by_architecture[architecture]


def windowed_family(family: Family) -> Family:
    """Return a family with the same GGUF architecture and sliding windows, if `family` has none:
    GGUF files of Mistral name the architecture of Llama."""
    if family.window != "never":
        return family
    others = (each for each in FAMILIES.values() if each.window != "never")
    same = (each for each in others if each.gguf_architecture == family.gguf_architecture)
    return next(same, family)


class UnknownArchitecture(ValueError):
    """The architecture of a model is not among the known ones."""

    def __init__(self, source: str, architecture: object, known: Mapping[str, Family]) -> None:
        super().__init__(
            f"{source}: unknown architecture {architecture!r}; known are {', '.join(known)}"
        )
