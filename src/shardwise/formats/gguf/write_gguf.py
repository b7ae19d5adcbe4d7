"""Writing GGUF files: the way back of what `config.py`, `families.py` and `vocabulary.py` read out
of them.

Matrices of blocks are quantized, norms and biases fp32, as llama.cpp wants them; embedding and head
keep their dtype. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names:
gguf-py/gguf/constants.py of llama.cpp.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.atomic import written_aside
from shardwise.config import ModelConfig
from shardwise.formats.families import GGUF_NAMES, Source, sources
from shardwise.formats.gguf.gguf_blocks import to_blocks
from shardwise.formats.gguf.gguf_config import llama3_divisors, llama3_of
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.format import Quantized
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.scheme import quantizable

KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZATION_VERSION = 2
ROPE_FREQS = "rope_freqs.weight"


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor | Quantized]],
    kind: str,
    dtype: torch.dtype,
    tokenizer: Mapping[str, Any],
) -> None:
    """Write a model whose matrices of blocks are quantized to that kind as one GGUF file.

    `tensors` come in the order of `model_specs`, one in memory at a time; `tokenizer` are metadata,
    by their keys. It is written aside and renamed when complete. Raises ValueError where the
    package gguf is missing and for what GGUF has no place for.
    """
    gguf = package()
    arch = architecture(config)
    keys = model_keys(config)
    stored = list(stored_as(config, kind, dtype))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            writer = gguf.GGUFWriter(aside, arch)
            add_metadata(
                writer,
                keys
                | {"general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{kind}"])}
                | dict(tokenizer),
            )
            for name, shape, each in stored:
                block = BLOCKS[each]
                num_bytes = math.prod(shape) // block.num_elements * block.num_bytes
                writer.add_tensor_info(
                    name, shape, np.dtype(np.float32), num_bytes, gguf.GGMLQuantizationType[each]
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for raw in stored_forms(config, tensors, dtype):
                writer.write_tensor_data(raw)
            writer.close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError(
            "writing GGUF files needs the package gguf: pip install 'shardwise[gguf]'"
        ) from None
    return gguf


def architecture(config: ModelConfig) -> str:
    """llama.cpp has Mistral's models as llama."""
    return "llama" if config.family == "mistral" else config.family


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """The shape as metadata. Raises ValueError for what they cannot say."""
    gpt2 = config.family == "gpt2"
    windowed = len(config.windowed_layers)
    if config.activation != ("gelu_tanh" if gpt2 else "silu"):
        raise ValueError(
            f"GGUF has no key for the activation {config.activation} in a model of {config.family}"
        )
    if windowed not in (0, config.num_layers):
        raise ValueError("GGUF has no key for a window in some layers alone")
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        f"attention.layer_norm_{'' if gpt2 else 'rms_'}epsilon": config.norm_eps,
    }
    if not gpt2:
        keys |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": config.rope_theta,
        }
    if windowed:
        keys["attention.sliding_window"] = config.sliding_window
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    divisors = rope_divisors(config)
    if divisors is not None and llama3_of(divisors, config.head_dim, config.rope_theta) is None:
        raise ValueError(
            "a GGUF file has no place for rope scaling of the kind llama3 with other constants than Llama 3.1's; a "
            "folder has: --quant int8 or int4-g32"
        )
    found = {f"{architecture(config)}.{key}": value for key, value in keys.items()}
    return found | {"general.quantization_version": QUANTIZATION_VERSION}


def add_metadata(writer: Any, metadata: Mapping[str, Any]) -> None:
    """Values by their type in Python; whole numbers as u32, other numbers as f32, as llama.cpp
    expects."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)


def stored_as(
    config: ModelConfig, kind: str, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind of every tensor, in the order in which they are written."""
    if rope_divisors(config) is not None:
        yield ROPE_FREQS, (config.head_dim // 2,), "F32"
    for spec in stored_specs(config):
        for source in distinct(spec, config):
            plain = "F32" if len(spec.shape) == 1 else KINDS[dtype]
            yield source.name, source.shape, kind if quantizable(spec) else plain


def stored_forms(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor | Quantized]], dtype: torch.dtype
) -> Iterator[Any]:
    """The bytes of every tensor, as numpy has them, in the same order."""
    if (divisors := rope_divisors(config)) is not None:
        yield divisors
    for spec, (name, tensor) in zip(stored_specs(config), tensors, strict=True):
        assert name == spec.name
        for source in distinct(spec, config):
            rows = torch.arange(source.rows.start, source.rows.stop)
            rows = halves_together(rows, spec.head_dim) if source.interleaved else rows
            if isinstance(tensor, Quantized):
                raw = to_blocks(tensor.picked(rows))
            else:
                raw = tensor[rows].to(dtype)
                raw = raw.float() if raw.dim() == 1 else raw
            yield raw.contiguous().view(torch.uint8).numpy()


def rope_divisors(config: ModelConfig) -> NDArray[np.float32] | None:
    """How Llama 3's scaling of rotary positions is stored, as a tensor."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    return llama3_divisors(config.rope_scaling, config.head_dim, config.rope_theta).astype("<f4")


def stored_specs(config: ModelConfig) -> Sequence[ParamSpec]:
    return [spec for spec in model_specs(config) if spec.tied_to is None]


def distinct(spec: ParamSpec, config: ModelConfig) -> Iterable[Source]:
    """Parts that are stored fused share a tensor."""
    return {
        source.name: source for source in sources(spec, GGUF_NAMES[architecture(config)]).values()
    }.values()


def halves_together(rows: Tensor, head_dim: int) -> Tensor:
    """The order in which llama.cpp keeps the rows of q and k, see `load.halves_apart`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten()
