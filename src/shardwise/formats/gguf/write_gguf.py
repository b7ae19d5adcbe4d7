"""Writing GGUF files: the inverse of `gguf_reader.py`.

Matrices of blocks are quantized, norms and biases fp32, as llama.cpp expects; embedding and head
keep their dtype. Names: gguf-py/gguf/constants.py of llama.cpp.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.families import family_of
from shardwise.formats.gguf.gguf_blocks import to_blocks
from shardwise.formats.gguf.gguf_config import config_metadata
from shardwise.formats.gguf.gguf_rope import ROPE_FREQS, rope_divisors
from shardwise.formats.gguf.rope_order import interleave
from shardwise.formats.safetensors import DTYPE_NAMES
from shardwise.formats.tensor_names import distinct_parts
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.format import QuantizedMatrix
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.scheme import quantizable
from shardwise.writing.atomic import written_aside


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
    kind: str,
    dtype: torch.dtype,
    tokenizer: Mapping[str, Any],
) -> None:
    """Write a model as one GGUF file, with the matrices of its blocks quantized to `kind`.

    `tensors` come in the order of `model_specs`, one in memory at a time; `tokenizer` is metadata.
    The file is written under a temporary name and renamed when complete. Raises ValueError for what
    GGUF cannot store.
    """
    import gguf  # half a second, which reading does without

    metadata = config_metadata(config)
    metadata["general.file_type"] = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            writer = gguf.GGUFWriter(aside, family_of(config).gguf_architecture)
            _add_metadata(writer, metadata | dict(tokenizer))
            for name, shape, stored_kind in _tensor_infos(config, kind, dtype):
                block = BLOCKS[stored_kind]
                num_bytes = math.prod(shape) // block.num_elements * block.num_bytes
                number = gguf.GGMLQuantizationType[stored_kind]
                writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for raw in _tensor_bytes(config, tensors, dtype):
                writer.write_tensor_data(raw)
            writer.close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def _add_metadata(writer: Any, metadata: Mapping[str, Any]) -> None:
    """Add values by their Python type: integers as u32 and floats as f32, as llama.cpp expects."""
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


def _tensor_infos(
    config: ModelConfig, kind: str, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and kind of every tensor, in the order in which they are written."""
    if rope_divisors(config) is not None:
        yield ROPE_FREQS, (config.head_dim // 2,), "F32"
    for spec in _stored_specs(config):
        float_kind = "F32" if len(spec.shape) == 1 else DTYPE_NAMES[dtype]
        for part in distinct_parts(spec, family_of(config).gguf):
            yield part.name, part.shape, kind if quantizable(spec) else float_kind


def _tensor_bytes(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]], dtype: torch.dtype
) -> Iterator[Any]:
    """Yield the bytes of every tensor as a numpy array, in the same order."""
    if (divisors := rope_divisors(config)) is not None:
        yield divisors
    for spec, (name, tensor) in zip(_stored_specs(config), tensors, strict=True):
        assert name == spec.name
        for part in distinct_parts(spec, family_of(config).gguf):
            rows = torch.arange(part.rows.start, part.rows.stop)
            rows = interleave(rows, spec.head_dim) if part.interleaved else rows
            if isinstance(tensor, QuantizedMatrix):
                raw = to_blocks(tensor.select_rows(rows))
            else:
                raw = tensor[rows].to(dtype)
                raw = raw.float() if raw.dim() == 1 else raw
            yield raw.contiguous().view(torch.uint8).numpy()


def _stored_specs(config: ModelConfig) -> list[ParamSpec]:
    return [spec for spec in model_specs(config) if spec.tied_to is None]
