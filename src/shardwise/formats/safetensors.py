"""Writing safetensors files as a stream: what is written passes through memory a few megabytes at a
time.

The file is the length of its header in 8 bytes, the header in JSON (dtype, shape and place of every
tensor), then the bytes of the tensors one after the other. Format:
https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.formats.dtype_names import TORCH_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each) for name, each in TORCH_NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SLICE_BYTES = 4 << 20

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_safetensors(path: Path, shapes: Shapes, tensors: Iterable[Tensor]) -> str:
    """Write `tensors`, which come in the order of `shapes`, and return the SHA-256 of
    the file.

    The next tensor is asked for when the one before is written, and all is on the disk at the end.
    Raises OSError, and then leaves a part of the file.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces(shapes, tensors):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def pieces(shapes: Shapes, tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The file's bytes, in buffers."""
    yield header(shapes)
    for (name, expected), tensor in zip(shapes.items(), tensors, strict=True):
        assert expected == (tensor.dtype, tuple(tensor.shape)), name
        for block in [tensor] if tensor.is_contiguous() else tensor.unbind():
            flat = block.detach().reshape(-1)
            step = SLICE_BYTES // tensor.itemsize
            for start in range(0, flat.numel(), step):
                yield flat[start : start + step].cpu().view(torch.uint8).numpy()


def header(shapes: Shapes) -> bytes:
    """The length and the header, which spaces fill so that the first tensor begins at a multiple of
    8."""
    entries = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        assert start % dtype.itemsize == 0, f"{name} is not aligned: wider dtypes come first"
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
