"""Weights of one rank, from whatever holds a model: each source is a small reader, chosen by its
path.

Tensors arrive one after the other, in strips of a few megabytes, so that a rank needs no more
memory than for what it holds itself.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_config import config_from_gguf
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.gguf.gguf_reader import GgufReader
from shardwise.formats.huggingface.folder import FolderReader
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.run_checkpoint import newest
from shardwise.layout import Coord, Layout
from shardwise.params import Box, ParamSpec, block_of, boxes, local_shape, model_specs
from shardwise.quant.format import Quantized
from shardwise.quant.ggml_blocks import Blocks
from shardwise.quant.scheme import Forms

STRIP_ELEMENTS = 1 << 20


class Reader(Protocol):
    """An open source of weights. `dtype` is what it stores most elements in, or bf16 where that is
    no plain number; `forms` are those of the matrices that it stores quantized."""

    dtype: torch.dtype
    forms: Forms

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        """A box of a parameter on the CPU, in any floating dtype, perhaps read-only."""
        ...

    def read_piece(self, spec: ParamSpec, box: Box) -> Quantized | Blocks:
        """A box of a part that is stored quantized, as it is stored."""
        ...

    def close(self) -> None: ...


def open_weights(path: str | Path, config: ModelConfig) -> Reader:
    """The reader for what is at `path`. Raises ValueError if it is not the model of `config`."""
    path = Path(path)
    readers: dict[str, type[FolderReader] | type[GgufReader] | type[RunReader]]
    readers = {"folder": FolderReader, "gguf": GgufReader, "run": RunReader}
    return readers[kind_of(path)](path, config)


def read_config(path: str | Path) -> ModelConfig:
    """The config of the model at `path`."""
    path = Path(path)
    kind = kind_of(path)
    if kind == "gguf":
        return config_from_gguf(read_gguf(path), str(path))
    return read_folder_config(path / "model" if kind == "run" else path)


def kind_of(path: Path) -> Literal["folder", "gguf", "run"]:
    """What a path with weights is: a Hugging Face folder, a `.gguf` file, or the folder of a
    training run."""
    if path.is_dir():
        return "run" if (path / "model" / "config.json").is_file() else "folder"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; a model is a Hugging Face folder, a .gguf file or a run"
        )
    if path.suffix != ".gguf":
        raise ValueError(
            f"{path} is not a model; a model is a Hugging Face folder, a .gguf file or a run"
        )
    return "gguf"


def load_weights(
    path: str | Path,
    config: ModelConfig,
    specs: Iterable[ParamSpec],
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The local tensors, by name, of the parameters `specs` on the rank at `coord`; a tied one has
    no entry.

    Reads only what that rank holds; padding is zero. `specs` may be part of the model, as on a
    pipeline stage. Raises ValueError for a file that does not hold exactly the model of `config`.
    """
    with closing(open_weights(path, config)) as reader:
        held = (spec for spec in specs if spec.tied_to is None)
        return {spec.name: read_param(reader, spec, layout, coord, dtype, device) for spec in held}


def read_param(
    reader: Reader,
    spec: ParamSpec,
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """One parameter as the rank at `coord` holds it."""
    shape = local_shape(spec, layout, coord)
    held = boxes(spec, layout, coord)
    padded = sum(math.prod(box.shape) for box in held) < math.prod(shape)
    local = (torch.zeros if padded else torch.empty)(shape, dtype=dtype, device=device)
    for box in held:
        read_box(reader, spec, box, local[box.local_slices])
    return local


def read_box(reader: Reader, spec: ParamSpec, box: Box, out: Tensor) -> None:
    """Read a box of a parameter into `out`, which has its shape."""
    start = box.start[0]
    stop = box.start[0] + box.shape[0]
    head = max(block_of(spec, part.dim) for part in spec.rows)
    first = start // head * head
    last = min(-(-stop // head) * head, spec.shape[0])  # some files permute within heads
    whole = replace(box, start=(first, *box.start[1:]), shape=(last - first, *box.shape[1:]))
    for strip in strips(whole, head):
        values = reader.read(spec, strip)
        a = max(strip.start[0], start)
        b = min(strip.start[0] + strip.shape[0], stop)
        out[a - start : b - start].copy_(values[a - strip.start[0] : b - strip.start[0]])


def strips(box: Box, block: int) -> Iterator[Box]:
    """A box in pieces of about STRIP_ELEMENTS, each of whole rows and whole blocks of `block`
    rows."""
    num_rows, *columns = box.shape
    row_elements = math.prod(columns)
    step = max(1, STRIP_ELEMENTS // max(1, row_elements) // block) * block
    for row in range(0, num_rows if row_elements else 0, step):
        yield replace(
            box,
            start=(box.start[0] + row, *box.start[1:]),
            local=(box.local[0] + row, *box.local[1:]),
            shape=(min(step, num_rows - row), *columns),
        )


class RunReader:
    """The weights of a training run: the fp32 masters of its newest whole checkpoint."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        self._checkpoint = newest(Path(path), warnings.warn)
        self._checkpoint.check_model(model_specs(config))
        self.dtype = torch.float32
        self.forms: Forms = {}

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        return self._checkpoint.read(spec, "master", box)

    def read_piece(self, spec: ParamSpec, box: Box) -> Quantized:
        raise AssertionError("masters are fp32")

    def close(self) -> None:
        """Nothing to do: the maps close with the reader."""
