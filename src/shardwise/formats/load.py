"""`open_weights`: the reader for a Hugging Face folder, a GGUF file or a run."""

import warnings
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.gguf.gguf_reader import GgufReader
from shardwise.formats.huggingface.folder_reader import FolderReader
from shardwise.formats.model_source import ModelSource, source_kind, source_path
from shardwise.formats.reader import Reader
from shardwise.formats.run_checkpoint import newest_checkpoint
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.format import QuantizedMatrix
from shardwise.quant.ggml_blocks import GgmlMatrix
from shardwise.quant.scheme import StorageFormats
from shardwise.shards import Box


class ModelReader(Reader, Protocol):
    """A reader of weights of which some may be stored quantized, with their storage formats."""

    formats: StorageFormats

    def read_quantized(self, spec: ParamSpec, box: Box) -> QuantizedMatrix | GgmlMatrix:
        """Return a box of a part that is stored quantized, without dequantizing it."""
        ...


def open_weights(source: ModelSource, config: ModelConfig) -> ModelReader:
    """Open the weights of a model. Raises ValueError unless they are those of `config`."""
    kind = source_kind(source)
    if kind == "gguf":
        return GgufReader(source if isinstance(source, Gguf) else source_path(source), config)
    return (RunReader if kind == "run" else FolderReader)(source_path(source), config)


class RunReader:
    """The weights of a training run: the fp32 master weights of its newest intact checkpoint.

    Raises ValueError unless they are the parameters of `config`.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._checkpoint = newest_checkpoint(path, warnings.warn)
        self._checkpoint.check_model(model_specs(config))
        self.dtype = torch.float32
        self.formats: StorageFormats = {}

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        return self._checkpoint.read(spec, "master", box)

    def read_quantized(self, spec: ParamSpec, box: Box) -> NoReturn:
        raise AssertionError("master weights are not quantized")

    def close(self) -> None:
        """Do nothing: the files are unmapped with the reader."""
