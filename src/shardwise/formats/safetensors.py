"""Writing safetensors files as a stream, a few megabytes in memory at a time.

A file is the length of its header in 8 bytes, the header in JSON (dtype, shape and offsets of every
tensor), then the bytes of the tensors one after the other. Format:
https://huggingface.co/docs/safetensors
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.formats.dtype_names import TORCH_NAMES
from shardwise.writing.json_text import json_text

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each) for name, each in TORCH_NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SLICE_BYTES = 4 << 20

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of every tensor, by name, in the order of the file."""


def write_safetensors(path: Path, shapes: Shapes, tensors: Iterable[Tensor]) -> str:
    """Write `tensors`, in the order of `shapes`, and return the SHA-256 of the file.

    Each tensor is requested when the one before is written, and the file is on disk at the end.
    Raises OSError, which leaves an incomplete file.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for buffer in _file_buffers(shapes, tensors):
            digest.update(buffer)
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _file_buffers(shapes: Shapes, tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the bytes of the file in buffers."""
    yield _encode_header(shapes)
    for (name, expected), tensor in zip(shapes.items(), tensors, strict=True):
        assert expected == (tensor.dtype, tuple(tensor.shape)), name
        for block in [tensor] if tensor.is_contiguous() else tensor.unbind():
            flat = block.detach().reshape(-1)
            step = SLICE_BYTES // tensor.itemsize
            for start in range(0, flat.numel(), step):
                yield flat[start : start + step].cpu().view(torch.uint8).numpy()


def _encode_header(shapes: Shapes) -> bytes:
    """Return the length and the header, padded so that the first tensor begins at a multiple of
    8."""
    entries = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        assert start % dtype.itemsize == 0, f"{name} is not aligned: wider dtypes come first"
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, stop)}
        start = stop
    text = json_text(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
