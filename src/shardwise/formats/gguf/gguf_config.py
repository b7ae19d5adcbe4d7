"""Model configs from the metadata of GGUF files."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config import ModelConfig, RopeScaling, check_positive, check_size
from shardwise.formats.config_errors import reading
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.huggingface.hf_config import ARCHITECTURES


def from_gguf(file: Gguf, source: str) -> ModelConfig:
    """Translate the metadata of a GGUF file; what its keys leave out (ties, biases) is read off the
    tensor names."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(
            f"{source}: architecture {arch!r} is not known; known are {', '.join(ARCHITECTURES)}"
        )
    with reading(source):
        return gguf_config(file, arch)


def gguf_config(file: Gguf, arch: str) -> ModelConfig:
    names = file.tensors.keys()
    gpt2 = arch == "gpt2"
    keys = {
        key.removeprefix(f"{arch}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{arch}.")
    }

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

    hidden = size("embedding_length")
    heads = size("attention.head_count")
    layers = size("block_count")
    head_dim = size("attention.key_length", hidden // heads)
    theta = number("rope.freq_base", 10000.0)
    if not gpt2 and size("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{arch}.rope.dimension_count is {keys['rope.dimension_count']}, and only rotary positions over the whole "
            f"head of {head_dim} are supported"
        )
    window = (
        size("attention.sliding_window") if keys.get("attention.sliding_window", 0) != 0 else None
    )
    return ModelConfig(
        family=arch,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=size("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=keys.get("vocab_size") or len(file.metadata.get("tokenizer.ggml.tokens", ())),
        max_positions=size("context_length"),
        tied="output.weight" not in names,
        norm="layer" if gpt2 else "rms",
        norm_eps=number(
            "attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"
        ),
        activation="gelu_tanh" if gpt2 else "silu",
        gated=not gpt2,
        positions="learned" if gpt2 else "rope",
        rope_theta=theta,
        rope_scaling=None if gpt2 else gguf_rope_scaling(file, arch, keys, head_dim, theta),
        qkv_bias=gpt2 or "blk.0.attn_q.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_window=window,
        windowed_layers=frozenset(range(layers)) if window else frozenset(),
    )


def gguf_rope_scaling(
    file: Gguf, arch: str, keys: Mapping[str, Any], head_dim: int, theta: float
) -> RopeScaling | None:
    """As llama.cpp reads it: a factor without a type is linear, and a tensor of divisors is how
    Llama 3.1 is stored."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling {kind!r} is not known; known are linear, llama3")
    factor = check_positive(f"{arch}.rope.scaling.factor", keys.get("rope.scaling.factor", 1.0))
    linear = RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None
    if "rope_freqs.weight" not in file.tensors:
        return linear
    if linear:
        raise ValueError(
            "rotary positions scaled both by rope_freqs.weight and by a linear factor are not supported"
        )
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"rope_freqs.weight is {tensor.kind} of shape {tensor.shape}, and should be F32 of shape ({head_dim // 2},)"
        )
    stored = file.raw_rows(tensor.name, 0, tensor.shape[0]).view("<f4")
    check_positive("the largest value of rope_freqs.weight", float(stored.max()))
    scaling = llama3_of(stored, head_dim, theta)
    if scaling is None:
        raise ValueError(
            "this file's rope frequencies (rope_freqs.weight) are not Llama 3.1's, which alone are known"
        )
    return scaling


def llama3_of(divisors: NDArray[np.float32], head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling that these divisors stand for, as far as its constants are Llama 3.1's: they do
    not say others."""
    scaling = RopeScaling("llama3", float(divisors.max()))
    is_known = np.allclose(divisors, llama3_divisors(scaling, head_dim, theta), rtol=1e-3, atol=0)
    return scaling if is_known else None


def llama3_divisors(scaling: RopeScaling, head_dim: int, theta: float) -> NDArray[np.float64]:
    """What Llama 3.1 divides the frequency of each pair of elements by, [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / (kept + (1 - kept) / scaling.factor)
    return divisors
