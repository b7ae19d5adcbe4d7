"""Converting any model that can be read to a Hugging Face folder, verified by reloading it and
comparing logits."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.huggingface.write_folder import check_vacant, write_folder
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import (
    ModelSource,
    open_source,
    read_config,
    source_kind,
    source_path,
)
from shardwise.formats.reader import Reader, read_param
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.params import ParamSpec, model_specs, num_params

Progress = Callable[[str, float], None]
"""progress(phase, fraction): the fraction of the phase that is done, from 0 to 1."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
PROMPT_TOKENS = 32
TOLERANCE = 1e-4
"""The largest difference of logits, relative to the largest logit."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        files: their names.
        params: number of parameters.
        checked_logits: the largest difference between logits of source and destination.
    """

    files: tuple[str, ...]
    params: int
    checked_logits: float


def convert(
    source: str | Path,
    destination: str | Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write a model (a folder, a `.gguf` file or a run) as a Hugging Face folder.

    `dtype` defaults to the source's; quantized weights become bf16. The tokenizer is written too.
    Both models are then loaded and their logits compared in fp32. Raises ValueError for a source
    that cannot be read, a destination that exists, or logits that differ by more than 1e-4 of the
    largest; the destination is then removed.
    """
    destination = Path(destination)
    report = progress or (lambda phase, fraction: None)
    opened = open_source(source)
    config = read_config(opened)
    specs = model_specs(config)
    check_vacant(destination)
    tokenizer, tokenizer_files = find_tokenizer(opened)
    with closing(open_weights(opened, config)) as reader:
        dtype = dtype or reader.dtype
        tensors = full_tensors(reader, specs, dtype, report)
        files = write_folder(destination, config, specs, tensors, dtype, tokenizer, tokenizer_files)
    try:
        difference = compare_models(opened, destination, dtype, report)
    except ValueError:
        shutil.rmtree(destination)
        raise
    return Converted(files, num_params(specs), difference)


def find_tokenizer(source: ModelSource) -> tuple[Tokenizer | None, list[Path]]:
    """Return the source's tokenizer, if it has one that can be read, and the files to copy instead
    of saving it."""
    if isinstance(source, Gguf) or source_kind(source) == "gguf":
        return load_tokenizer(source), []
    folder = source_path(source)
    if source_kind(source) == "run":
        folder = folder / "model"
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    is_readable = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return load_tokenizer(folder) if is_readable else None, files


def full_tensors(
    reader: Reader, specs: tuple[ParamSpec, ...], dtype: torch.dtype, report: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and unsharded tensor of every stored parameter."""
    num_read = 0
    total = num_params(specs)
    for spec in specs:
        if spec.tied_to is None:
            yield spec.name, read_param(reader, spec, Layout(), Layout().coord(0), dtype)
            num_read += spec.numel
            report("writing", num_read / total)


def compare_models(
    source: ModelSource, destination: Path, dtype: torch.dtype, report: Progress
) -> float:
    """Return the largest difference between the logits of two models for a random prompt.

    Weights of the first are rounded to `dtype`; both compute in fp32. Raises ValueError above the
    tolerance.
    """
    expected = prompt_logits(source, read_config(source), dtype)
    report("checking", 0.5)
    logits = prompt_logits(destination, read_config(destination), dtype)
    report("checking", 1.0)
    return largest_difference(logits, expected, source_path(source), destination)


def largest_difference(logits: Tensor, expected: Tensor, source: Path, destination: Path) -> float:
    """Return the largest difference of logits. Raises ValueError above the tolerance."""
    difference = (logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"{destination} does not compute the same as {source} and has been removed: logits "
            f"differ by {difference:.3g}, and the largest is {largest:.3g}"
        )
    return difference


@torch.no_grad()
def prompt_logits(source: ModelSource, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return logits [1, T, V] in fp32 of a random prompt, with weights rounded to `dtype`."""
    tokens = random_prompt(config)
    with closing(open_weights(source, config)) as reader:
        weights = StreamedWeights(reader, model_specs(config), dtype)
        return Transformer(config, REFERENCE).forward(
            weights, tokens, torch.arange(tokens.shape[1])[None], Causal(config, causal_attention)
        )


def random_prompt(config: ModelConfig) -> Tensor:
    """Return token ids [1, T] that depend only on the model's size."""
    num_tokens = min(PROMPT_TOKENS, config.max_positions)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, num_tokens), generator=generator)


class StreamedWeights(Mapping[str, Tensor]):
    """The weights of a model, each read when it is used, rounded to `dtype` and widened to fp32.

    Only the block that computes is in memory, however large the model.
    """

    def __init__(self, reader: Reader, specs: tuple[ParamSpec, ...], dtype: torch.dtype) -> None:
        self._reader = reader
        self._dtype = dtype
        self._specs = {spec.name: spec for spec in specs if spec.tied_to is None}

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        layout = Layout()
        return read_param(self._reader, spec, layout, layout.coord(0), self._dtype).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
