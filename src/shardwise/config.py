"""What a model is: its shape and the few choices in which decoder families differ, from whatever describes one."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(f"rope scaling: {name}", getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling: high_freq_factor must be above low_freq_factor {self.low_freq_factor}, "
                f"not {self.high_freq_factor}"
            )
        check_size("rope scaling: original_max_positions", self.original_max_positions)


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
            check_size(f"model config: {name}", getattr(self, name))
        for name in ("tied", "gated", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"):
            check_flag(f"model config: {name}", getattr(self, name))
        for name in ("norm_eps", "rope_theta"):
            check_positive(f"model config: {name}", getattr(self, name))
        if self.sliding_window is not None:
            check_size("model config: sliding_window", self.sliding_window)
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

    def window(self, layer: int) -> int | None:
        """How many tokens back attention of a layer sees, its own included; None: all."""
        return self.sliding_window if layer in self.windowed_layers else None

    def kv_bytes_per_token(self, element_bytes: int = 2, scale_bytes: int = 0) -> int:
        """Bytes of keys and values that one token keeps in the cache over all layers and heads, each with its scale."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)


def check_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r:.60}")
    return value


def check_positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r:.60}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r:.60}")
    return value


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Whatever is wrong with the values of a config, say it in a sentence that begins with the file."""
    try:
        yield
    except KeyError as missing:
        raise ValueError(f"{source}: {missing.args[0]} is missing, so the model's shape is unknown") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{source} is malformed: {error}") from None


def from_hugging_face(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate a Hugging Face `config.json`, of transformers 4 or 5. Raises ValueError for what is not supported."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture {family!r} is not known; known are {', '.join(ARCHITECTURES)}")
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
        raise ValueError("GPT-2 with another scale of attention than 1 / sqrt(head size) is not supported")
    hidden, heads = check_size("n_embd", raw["n_embd"]), check_size("n_head", raw["n_head"])
    return ModelConfig(
        family="gpt2", num_layers=raw["n_layer"], hidden_size=hidden, ffn_size=raw.get("n_inner") or 4 * hidden,
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads,
        vocab_size=raw["vocab_size"], max_positions=raw["n_positions"], tied=flag(raw, "tie_word_embeddings", True),
        norm="layer", norm_eps=check_positive("layer_norm_epsilon", raw.get("layer_norm_epsilon", 1e-5)),
        activation=activation(raw.get("activation_function", "gelu_new")), gated=False, positions="learned",
        qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip


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
        family=family, num_layers=layers, hidden_size=hidden, ffn_size=raw["intermediate_size"],
        num_heads=heads, num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads, vocab_size=raw["vocab_size"],
        max_positions=raw.get("max_position_embeddings", 2048), tied=flag(raw, "tie_word_embeddings"),
        norm_eps=check_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        activation=activation(raw.get("hidden_act", "silu")), rope_theta=check_positive("rope_theta", theta),
        rope_scaling=rope_scaling(rope or table(raw, "rope_scaling")),
        qkv_bias=family == "qwen2" or bias, out_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and flag(raw, "mlp_bias"), qk_norm=family == "qwen3",
        sliding_window=window, windowed_layers=windowed,
    )  # fmt: skip


def activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def sliding_window(raw: dict[str, Any], family: str, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """The window and its layers: Mistral windows all; Qwen only on request, from layer `max_window_layers` on."""
    window = raw.get("sliding_window")
    if not window or family == "llama" or (family != "mistral" and not flag(raw, "use_sliding_window")):
        return None, frozenset()
    check_size("sliding_window", window)
    if types := raw.get("layer_types"):
        layers = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    else:
        layers = list(range(0 if family == "mistral" else raw.get("max_window_layers", 28), num_layers))
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
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture {arch!r} is not known; known are {', '.join(ARCHITECTURES)}")
    with reading(source):
        return gguf_config(file, arch)


def gguf_config(file: Gguf, arch: str) -> ModelConfig:
    names, gpt2 = file.tensors.keys(), arch == "gpt2"
    keys = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}

    def size(key: str, default: int | None = None) -> int:
        value = keys.get(key, default)
        if value is None:
            raise KeyError(f"{arch}.{key}")
        return check_size(f"{arch}.{key}", value)

    def number(key: str, default: float | None = None) -> float:
        value = keys.get(key, default)
        if value is None:
            raise KeyError(f"{arch}.{key}")
        return check_positive(f"{arch}.{key}", value)

    hidden, heads, layers = size("embedding_length"), size("attention.head_count"), size("block_count")
    head_dim, theta = size("attention.key_length", hidden // heads), number("rope.freq_base", 10000.0)
    if not gpt2 and size("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{arch}.rope.dimension_count is {keys['rope.dimension_count']}, and only rotary positions over the whole "
            f"head of {head_dim} are supported"
        )
    window = size("attention.sliding_window") if keys.get("attention.sliding_window", 0) != 0 else None
    return ModelConfig(
        family=arch, num_layers=layers, hidden_size=hidden, ffn_size=size("feed_forward_length"), num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads), head_dim=head_dim,
        vocab_size=keys.get("vocab_size") or len(file.metadata.get("tokenizer.ggml.tokens", ())),
        max_positions=size("context_length"), tied="output.weight" not in names,
        norm="layer" if gpt2 else "rms",
        norm_eps=number("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gpt2 else "silu", gated=not gpt2, positions="learned" if gpt2 else "rope",
        rope_theta=theta, rope_scaling=None if gpt2 else gguf_rope_scaling(file, arch, keys, head_dim, theta),
        qkv_bias=gpt2 or "blk.0.attn_q.bias" in names, out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names, qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_window=window, windowed_layers=frozenset(range(layers)) if window else frozenset(),
    )  # fmt: skip


def gguf_rope_scaling(
    file: Gguf, arch: str, keys: Mapping[str, Any], head_dim: int, theta: float
) -> RopeScaling | None:
    """As llama.cpp reads it: a factor without a type is linear, and a tensor of divisors is how Llama 3.1 is stored."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling {kind!r} is not known; known are linear, llama3")
    factor = check_positive(f"{arch}.rope.scaling.factor", keys.get("rope.scaling.factor", 1.0))
    linear = RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None
    if "rope_freqs.weight" not in file.tensors:
        return linear
    if linear:
        raise ValueError("rotary positions scaled both by rope_freqs.weight and by a linear factor are not supported")
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"rope_freqs.weight is {tensor.kind} of shape {tensor.shape}, and should be F32 of shape ({head_dim // 2},)"
        )
    stored = file.raw_rows(tensor.name, 0, tensor.shape[0]).view("<f4")
    check_positive("the largest value of rope_freqs.weight", float(stored.max()))
    scaling = llama3_of(stored, head_dim, theta)
    if scaling is None:
        raise ValueError("this file's rope frequencies (rope_freqs.weight) are not Llama 3.1's, which alone are known")
    return scaling


def llama3_of(divisors: NDArray[np.float32], head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling that these divisors stand for, as far as its constants are Llama 3.1's: they do not say others."""
    scaling = RopeScaling("llama3", float(divisors.max()))
    is_known = np.allclose(divisors, llama3_divisors(scaling, head_dim, theta), rtol=1e-3, atol=0)
    return scaling if is_known else None


def llama3_divisors(scaling: RopeScaling, head_dim: int, theta: float) -> NDArray[np.float64]:
    """What Llama 3.1 divides the frequency of each pair of elements by, [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / (kept + (1 - kept) / scaling.factor)
    return divisors


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
