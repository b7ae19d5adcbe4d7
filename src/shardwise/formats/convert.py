"""Any model that can be read, written as a Hugging Face folder: and then proven, by reading it back
and comparing."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.huggingface.folder import check_vacant, write_folder
from shardwise.formats.load import Reader, kind_of, open_weights, read_config, read_param
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.params import ParamSpec, model_specs, num_params

Progress = Callable[[str, float], None]
"""progress(what is being done, how much of it is done from 0 to 1)."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
PROMPT_TOKENS = 32
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Converted:
    """What was written: file names, number of parameters, and the largest difference found between
    logits."""

    files: tuple[str, ...]
    params: int
    checked_logits: float


def convert(
    source: str | Path,
    destination: str | Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write the model at `source`, a folder, a `.gguf` file or a run, as the Hugging Face folder
    `destination`.

    `dtype` of None keeps the source's; quantized weights become bf16. The tokenizer comes along.
    Ends by loading both and comparing logits in fp32. Raises ValueError for a source that cannot be
    read, a destination that is in use, or logits that differ by more than 1e-4 of the largest; then
    the destination is removed again.
    """
    source = Path(source)
    destination = Path(destination)
    report = progress or (lambda what, done: None)
    config = read_config(source)
    specs = model_specs(config)
    check_vacant(destination)
    tokenizer, tokenizer_files = find_tokenizer(source)
    with closing(open_weights(source, config)) as reader:
        dtype = dtype or reader.dtype
        tensors = whole_tensors(reader, specs, dtype, report)
        files = write_folder(destination, config, specs, tensors, dtype, tokenizer, tokenizer_files)
    try:
        checked = compare_logits(source, destination, dtype, report)
    except ValueError:
        shutil.rmtree(destination)
        raise
    return Converted(files, num_params(specs), checked)


def find_tokenizer(source: Path) -> tuple[Tokenizer | None, list[Path]]:
    """The source's tokenizer, as far as it has one that can be read, and the files to copy instead
    of saving it."""
    if kind_of(source) == "gguf":
        return load_tokenizer(source), []
    if kind_of(source) == "run":
        source = source / "model"
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    readable = any((source / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return load_tokenizer(source) if readable else None, files


def whole_tensors(
    reader: Reader, specs: tuple[ParamSpec, ...], dtype: torch.dtype, report: Progress
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    total = num_params(specs)
    for spec in specs:
        if spec.tied_to is None:
            yield spec.name, read_param(reader, spec, Layout(), Layout().coord(0), dtype)
            done += spec.numel
            report("writing", done / total)


def compare_logits(source: Path, destination: Path, dtype: torch.dtype, report: Progress) -> float:
    """The largest difference between the logits of two models, the first rounded to `dtype`, for a
    drawn prompt.

    Both are computed in fp32. Raises ValueError above the tolerance.
    """
    expected = prompt_logits(source, read_config(source), dtype)
    report("checking", 0.5)
    logits = prompt_logits(destination, read_config(destination), dtype)
    report("checking", 1.0)
    return agreed(logits, expected, source, destination)


def agreed(logits: Tensor, expected: Tensor, source: Path, destination: Path) -> float:
    """The largest difference. Raises ValueError above the tolerance."""
    difference = (logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"{destination} was written but does not compute what {source} does: logits differ by {difference:.3g}, "
            f"and the largest is {largest:.3g}; it has been removed"
        )
    return difference


@torch.no_grad()
def prompt_logits(path: Path, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Logits [1, T, V] in fp32 of a prompt that depends on the model's size alone."""
    tokens = drawn_prompt(config)
    with closing(open_weights(path, config)) as reader:
        weights = StreamedWeights(reader, model_specs(config), dtype)
        return Transformer(config, REFERENCE).forward(
            weights, tokens, torch.arange(tokens.shape[1])[None], Causal(config, causal_attention)
        )


def drawn_prompt(config: ModelConfig) -> Tensor:
    num_tokens = min(PROMPT_TOKENS, config.max_positions)
    return torch.randint(
        config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0)
    )


class StreamedWeights(Mapping[str, Tensor]):
    """A model's weights, each read when it is asked for, rounded to `dtype` and widened to fp32: no
    more of a large model is in memory than the block that is computing."""

    def __init__(self, reader: Reader, specs: tuple[ParamSpec, ...], dtype: torch.dtype) -> None:
        self._reader = reader
        self._dtype = dtype
        self._specs = {spec.name: spec for spec in specs if spec.tied_to is None}

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> Tensor:
        return read_param(
            self._reader, self._specs[name], Layout(), Layout().coord(0), self._dtype
        ).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
