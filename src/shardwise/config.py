"""What a model is: its shape and the few choices in which decoder families differ, from whatever describes one."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.gguf import Gguf

Positions = Literal["rope", "learned"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

ARCHITECTURES = {  # model_type in config.json -> architecture that transformers names for it
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies. `linear` divides positions by `factor`; `llama3` leaves high frequencies as they
    are, divides low ones and blends between (Llama 3.1)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes are counts of elements; `windowed_layers` are those with attention limited to
    `sliding_window` tokens (Mistral: all)."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
                 "max_positions")  # fmt: skip
        for name in sizes:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"model config: {name} must be a whole number of at least 1, not {size!r}")
        if self.num_heads % self.num_kv_heads:
            works = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"model config: {self.num_kv_heads} kv heads do not divide {self.num_heads} heads; {works} do"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"model config: rotary positions need an even head size, not {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of keys and values that one token keeps in the cache, over all layers and heads."""
        return 2 * self.num_layers * self.kv_size * element_bytes


def from_hugging_face(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate a Hugging Face `config.json`, of transformers 4 or 5. Raises ValueError for what is not supported."""
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture {family!r} is not known; known are {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        raise ValueError(f"{source}: quantized folders cannot be read yet; use the unquantized model or a GGUF file")
    try:
        return gpt2_config(raw) if family == "gpt2" else llama_config(raw, family, source)
    except KeyError as missing:
        raise ValueError(f"{source}: {missing.args[0]} is missing, so the model's shape is unknown") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{source}: a size in it is not a whole number above 0 ({error})") from None
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None


def gpt2_config(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise ValueError("GPT-2 with another scale of attention than 1 / sqrt(head size) is not supported")
    hidden = raw["n_embd"]
    return ModelConfig(
        family="gpt2", num_layers=raw["n_layer"], hidden_size=hidden, ffn_size=raw.get("n_inner") or 4 * hidden,
        num_heads=raw["n_head"], num_kv_heads=raw["n_head"], head_dim=hidden // raw["n_head"],
        vocab_size=raw["vocab_size"], max_positions=raw["n_positions"], tied=raw.get("tie_word_embeddings", True),
        norm="layer", norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=activation(raw.get("activation_function", "gelu_new")), gated=False, positions="learned",
        qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip


def llama_config(raw: dict[str, Any], family: str, source: str) -> ModelConfig:
    """Llama and the families that differ from it by a flag: biases, q/k norm, a window."""
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    rope = raw.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    window, windowed = sliding_window(raw, family, layers)
    return ModelConfig(
        family=family, num_layers=layers, hidden_size=raw["hidden_size"], ffn_size=raw["intermediate_size"],
        num_heads=heads, num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, vocab_size=raw["vocab_size"],
        max_positions=raw.get("max_position_embeddings", 2048), tied=raw.get("tie_word_embeddings", False),
        norm_eps=raw.get("rms_norm_eps", 1e-6), activation=activation(raw.get("hidden_act", "silu")),
        rope_theta=float(theta), rope_scaling=rope_scaling(rope or raw.get("rope_scaling") or {}, source),
        qkv_bias=family == "qwen2" or bias, out_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)), qk_norm=family == "qwen3",
        sliding_window=window, windowed_layers=windowed,
    )  # fmt: skip


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def sliding_window(raw: dict[str, Any], family: str, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """The window and its layers: Mistral windows all; Qwen only on request, from layer `max_window_layers` on."""
    window = raw.get("sliding_window")
    if not window or family == "llama" or (family != "mistral" and not raw.get("use_sliding_window")):
        return None, frozenset()
    if types := raw.get("layer_types"):
        layers = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    else:
        layers = list(range(0 if family == "mistral" else raw.get("max_window_layers", 28), num_layers))
    return (window, frozenset(layers)) if layers else (None, frozenset())


def rope_scaling(raw: dict[str, Any], source: str) -> RopeScaling | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(raw["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3", float(raw["factor"]), float(raw["low_freq_factor"]), float(raw["high_freq_factor"]),
            int(raw["original_max_position_embeddings"]),
        )  # fmt: skip
    raise ValueError(f"{source}: rope scaling {kind!r} is not known; known are linear, llama3")


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers (4 and 5) reads as this model."""
    common = {
        "architectures": [ARCHITECTURES[config.family]], "model_type": config.family, "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
    }  # fmt: skip
    activation_name = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
    if config.family == "gpt2":
        return common | {
            "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_inner": config.ffn_size,
            "n_head": config.num_heads, "n_positions": config.max_positions, "activation_function": activation_name,
            "layer_norm_epsilon": config.norm_eps,
        }  # fmt: skip
    raw = common | {
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.norm_eps, "hidden_act": activation_name,
        "rope_theta": config.rope_theta,
    }  # fmt: skip
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
            "sliding_attention" if i in config.windowed_layers else "full_attention" for i in range(config.num_layers)
        ]
        raw |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "max_window_layers": first,
                "layer_types": kinds}  # fmt: skip
    return raw


def rope_scaling_to_hugging_face(scaling: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        raw |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions}  # fmt: skip
    return raw


def from_gguf(file: Gguf, source: str) -> ModelConfig:
    """Translate the metadata of a GGUF file; what its keys leave out (ties, biases) is read off the tensor names."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture {arch!r} is not known; known are {', '.join(ARCHITECTURES)}")
    try:
        return gguf_config(file, arch, source)
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{source}: a size in its metadata is not a whole number above 0 ({error})") from None


def gguf_config(file: Gguf, arch: str, source: str) -> ModelConfig:
    metadata, names = file.metadata, file.tensors.keys()

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ValueError(f"{source}: {arch}.{key} is missing, so the model's shape is unknown")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    vocab = metadata.get(f"{arch}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    gpt2 = arch == "gpt2"
    window = get("attention.sliding_window", 0)
    layers = get("block_count")
    return ModelConfig(
        family=arch, num_layers=layers, hidden_size=hidden, ffn_size=get("feed_forward_length"), num_heads=heads,
        num_kv_heads=kv_heads, head_dim=get("attention.key_length", hidden // heads), vocab_size=vocab,
        max_positions=get("context_length"), tied="output.weight" not in names,
        norm="layer" if gpt2 else "rms",
        norm_eps=get("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gpt2 else "silu", gated=not gpt2, positions="learned" if gpt2 else "rope",
        rope_theta=float(get("rope.freq_base", 10000.0)), rope_scaling=gguf_rope_scaling(file, arch, source),
        qkv_bias=gpt2 or "blk.0.attn_q.bias" in names, out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names, qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_window=window or None, windowed_layers=frozenset(range(layers)) if window else frozenset(),
    )  # fmt: skip


def gguf_rope_scaling(file: Gguf, arch: str, source: str) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1: what divides each frequency; the largest is the factor
        divisors = file.raw_rows("rope_freqs.weight", 0, file.tensors["rope_freqs.weight"].shape[0]).view("<f4")
        return RopeScaling("llama3", float(divisors.max()))
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(file.metadata.get(f"{arch}.rope.scaling.factor", 1.0)))
    raise ValueError(f"{source}: rope scaling {kind!r} is not known; known are linear, llama3")


LLAMA_WIDTHS = (  # hidden sizes with the number of layers that models of that width have
    (32, 2), (64, 2), (128, 4), (256, 6), (512, 8), (768, 12), (1024, 16), (2048, 16), (3072, 28), (4096, 32),
    (5120, 40), (6144, 48), (8192, 80), (12288, 96), (16384, 126), (20480, 128), (25600, 128), (32768, 160),
    (49152, 200),
)  # fmt: skip


def from_count(count: int) -> ModelConfig:
    """A Llama shape of `count` parameters to within 0.05 %: usual width and depth, the ffn size makes up the count."""
    vocab = 32000 if count >= 100_000_000 else 256
    shapes = [shape for hidden, layers in LLAMA_WIDTHS if (shape := shape_of_count(count, hidden, layers, vocab))]
    if not shapes or count > 10**13:
        raise ValueError(f"a model of {count} parameters is too small or too large to draw; 1M to 10T work")
    return min(shapes, key=lambda shape: abs(math.log(shape.ffn_size / shape.hidden_size / 3.5)))


def shape_of_count(count: int, hidden: int, layers: int, vocab: int) -> ModelConfig | None:
    heads = hidden // 128 if hidden >= 512 else max(1, hidden // 32)
    kv_heads = 8 if heads % 8 == 0 else heads
    head_dim = hidden // heads
    fixed = 2 * vocab * hidden + hidden + layers * (2 * hidden + 2 * hidden * (heads + kv_heads) * head_dim)
    per_ffn = 3 * hidden * layers
    for step in (256, 64, 8, 1):
        ffn = round((count - fixed) / per_ffn / step) * step
        if 4 * ffn >= hidden and abs(fixed + per_ffn * ffn - count) <= 0.0005 * count:
            return ModelConfig("llama", layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions=131072)
    return None


def parse_count(text: str) -> int | None:
    """`7.5B` -> 7500000000; None when the text is not a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", text.upper())
    if not match:
        return None
    return round(float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]])


def read_folder_config(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder. Raises ValueError when it has no readable `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return from_hugging_face(raw, str(path))
