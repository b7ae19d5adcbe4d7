"""Weights of GGUF files: any box of a parameter, decoded or as it is stored."""

import math
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.families import family_of
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.gguf.rope_order import deinterleave
from shardwise.formats.safetensors import DTYPES
from shardwise.formats.storage_formats import gguf_formats
from shardwise.formats.tensor_names import check_stored, stored_parts
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.format import QuantizedMatrix
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.ggml_blocks import GgmlMatrix, from_ggml_blocks
from shardwise.quant.ggml_decode import block_slices, decode_blocks, decode_slice
from shardwise.shards import Box


class GgufReader:
    """The weights of a GGUF file; a `ModelReader` (see `load.py`).

    Raises ValueError unless the file stores exactly the parameters of `config`.
    """

    def __init__(self, file: Gguf | Path, config: ModelConfig) -> None:
        self._gguf = file if isinstance(file, Gguf) else read_gguf(file)
        self._names = family_of(config).gguf
        shapes = {name: tensor.shape for name, tensor in self._gguf.tensors.items()}
        check_stored(shapes, model_specs(config), self._names, self._gguf.path)
        self.dtype = _common_dtype(self._gguf)
        self.formats = gguf_formats(self._gguf, config)

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        """Return a box in fp32; of a parameter that is sharded by heads, a box of whole heads."""
        part = stored_parts(spec, self._names)[box.part]
        rows, *columns = part.slices(box)
        if columns and columns[0] != slice(0, part.shape[1]):
            tensor = _read_columns(self._gguf, part.name, rows, columns[0])
        else:
            tensor = read_tensor(self._gguf, part.name, rows.start, rows.stop)
        return deinterleave(tensor, spec.head_dim) if part.interleaved else tensor

    def read_quantized(self, spec: ParamSpec, box: Box) -> QuantizedMatrix | GgmlMatrix:
        """Return a box of a part that is stored in quantized blocks, without decoding it.

        Blocks lie along rows, so rows can be reordered whole.
        """
        part = stored_parts(spec, self._names)[box.part]
        rows, columns = part.slices(box)
        num_rows, num_columns = box.shape
        stored = self._gguf.raw_rows(part.name, rows.start, rows.stop)
        raw = torch.from_numpy(stored.copy()).view(num_rows, -1)
        raw = deinterleave(raw, spec.head_dim) if part.interleaved else raw
        kind = self._gguf.tensor(part.name).kind
        blocks = from_ggml_blocks(raw, kind, (num_rows, part.shape[1]))
        if num_columns == part.shape[1]:
            return blocks
        return blocks.columns(columns.start, columns.stop)

    def close(self) -> None:
        """Do nothing: the file is unmapped with its last view."""


def _common_dtype(gguf: Gguf) -> torch.dtype:
    """Return the dtype of most elements; quantized ones count as bf16."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in gguf.tensors.values():
        elements[DTYPES.get(tensor.kind, torch.bfloat16)] += math.prod(tensor.shape)
    return elements.most_common(1)[0][0]


def read_tensor(
    gguf: Gguf,
    name: str,
    start: int = 0,
    stop: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return rows [start, stop) of a tensor, decoded: [stop - start, ...] in `dtype`.

    No other row is read, and temporaries are bounded. Raises ValueError for an unknown name and for
    rows that do not exist.
    """
    tensor = gguf.tensor(name)
    stop = tensor.shape[0] if stop is None else stop
    raw = gguf.raw_rows(name, start, stop)
    out = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype)
    flat = out.view(-1)
    for elements, stored in block_slices(flat.numel(), tensor.kind):
        # torch has no read-only tensors, so each slice is copied from the memory map
        flat[elements] = decode_slice(torch.from_numpy(raw[stored].copy()), tensor.kind)
    return out


def _read_columns(gguf: Gguf, name: str, rows: slice, columns: slice) -> Tensor:
    """Return a rectangle of a stored matrix, decoding only the blocks that it touches."""
    kind = gguf.tensor(name).kind
    block = BLOCKS[kind]
    first = columns.start // block.num_elements
    last = -(-columns.stop // block.num_elements)
    num_rows = rows.stop - rows.start
    raw = gguf.raw_rows(name, rows.start, rows.stop).reshape(num_rows, -1, block.num_bytes)
    touched = torch.from_numpy(raw[:, first:last].copy())
    decoded = decode_blocks(touched, kind, (num_rows, (last - first) * block.num_elements))
    offset = first * block.num_elements
    return decoded[:, columns.start - offset : columns.stop - offset]
