"""Hugging Face folders: read slice by slice, written in shards.

A folder holds config.json and the files that `files.py` tells of.
"""

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardwise.atomic import written_aside
from shardwise.config import ModelConfig
from shardwise.formats.config_files import write_json
from shardwise.formats.families import family_of
from shardwise.formats.huggingface import compressed_tensors as compressed
from shardwise.formats.huggingface.hf_config import to_hugging_face
from shardwise.formats.huggingface.quantized_folder import QuantizedFolder
from shardwise.formats.huggingface.weight_files import INDEX, SINGLE, headers_of, opened_slices
from shardwise.formats.safetensors import DTYPES
from shardwise.formats.storage import matrix_formats
from shardwise.formats.tensor_names import (
    TensorNames,
    check_stored,
    distinct_parts,
    fit_prefix,
    format_shape,
    stored_parts,
    stored_shapes,
)
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.params import Box, ParamSpec, model_specs
from shardwise.quant.format import QuantizedMatrix, dequantize
from shardwise.quant.scheme import Scheme, quantizable


class FolderReader:
    """The weights of a Hugging Face folder, of which only the slices asked for are read.

    Opening reads headers alone and raises ValueError unless the folder holds exactly the parameters
    of `config`.
    """

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        specs = model_specs(config)
        with ExitStack() as opened:
            self._stored = opened.enter_context(opened_slices(Path(path), "pt"))
            self._names = fit_prefix(family_of(config).folder, self._stored)
            wanted = stored_shapes(specs, self._names)
            self._quantized = QuantizedFolder.at(
                Path(path), headers_of(self._stored), wanted, self._tensor
            )
            check_stored(self._quantized.plain_shapes, specs, self._names, path)
            self.dtype = self._common_dtype(specs, path)
            self._opened = opened.pop_all()
        self.formats = matrix_formats(self._quantized.matrices, specs, self._names)

    def _common_dtype(self, specs: Iterable[ParamSpec], path: str | Path) -> torch.dtype:
        """The dtype in which most elements are stored."""
        elements: Counter[torch.dtype] = Counter()
        for name, shape in stored_shapes(specs, self._names).items():
            kind = self._stored[name].get_dtype() if name in self._stored else None
            kind = "BF16" if name in self._quantized.matrices else kind
            if kind is not None and kind not in DTYPES:
                raise ValueError(f"{path} stores {name} as {kind}; {', '.join(DTYPES)} can be read")
            elements[DTYPES[kind or "F32"]] += math.prod(shape) if kind else 0
        return elements.most_common(1)[0][0]

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        """A box of a parameter, in the dtype of the file; it may be a view of the mapped file."""
        source = stored_parts(spec, self._names)[box.part]
        if source.name in self._quantized.matrices:
            rows, columns = source.slices(box)
            return dequantize(self._quantized.read(source.name).select_rows(rows), torch.float32)[
                :, columns
            ]
        tensor = self._stored[source.name][source.slices(box)]
        return tensor.T if source.transposed else tensor

    def read_piece(self, spec: ParamSpec, box: Box) -> QuantizedMatrix:
        """A box of a part that is stored quantized, as it is."""
        source = stored_parts(spec, self._names)[box.part]
        rows, columns = source.slices(box)
        return self._quantized.read(source.name).submatrix(rows, columns)

    def _tensor(self, name: str) -> Tensor | None:
        found: Tensor | None = self._stored[name][...] if name in self._stored else None
        return found

    def close(self) -> None:
        self._stored.clear()
        self._opened.close()


def write_folder(
    path: str | Path,
    config: ModelConfig,
    specs: Sequence[ParamSpec],
    tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
    dtype: torch.dtype,
    tokenizer: Tokenizer | None = None,
    tokenizer_files: Sequence[Path] = (),
    max_shard_bytes: int = 5_000_000_000,
    scheme: Scheme | None = None,
) -> tuple[str, ...]:
    """Write the folder that transformers loads as this model, and return the names of its files.

    `tensors` gives (name, whole tensor) of every stored parameter in the order of `specs`, with a
    `scheme` the matrices of blocks quantized so; one shard is in memory at a time. A tied head is
    not written again. `tokenizer` is saved too, or `tokenizer_files` copied in its place. All is
    written aside and renamed when complete. Raises ValueError for a destination that is not new or
    empty, that cannot be written, for a tokenizer with more ids than the vocabulary, and for
    tensors that are not those of `specs`.
    """
    path = Path(path)
    check_vacant(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    held = [spec for spec in specs if spec.tied_to is None]
    names = family_of(config).folder
    shards = plan_shards(stored_bytes(held, names, dtype, scheme), max_shard_bytes)
    with new_folder(path) as aside:
        write_shards(aside, shards, stored_forms(held, names, tensors, dtype))
        write_json(aside / "config.json", folder_config(config, dtype, tokenizer, scheme))
        for file in tokenizer_files:
            shutil.copyfile(file, aside / file.name)
        if tokenizer is not None and not tokenizer_files:
            tokenizer.save(aside)
        return tuple(sorted(file.name for file in aside.iterdir()))


def check_vacant(path: Path) -> None:
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is there already and not empty; name a new folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is there already and is no folder; name a new folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to `path`, which is renamed to `path` when the block succeeds and removed
    when it fails."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            aside.mkdir()
            yield aside
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def stored_bytes(
    specs: Iterable[ParamSpec], names: TensorNames, dtype: torch.dtype, scheme: Scheme | None
) -> dict[str, int]:
    """How large every tensor of a folder is, by its name, in their order."""
    found: dict[str, int] = {}
    for spec in specs:
        for name, shape in stored_shapes([spec], names).items():
            if scheme is not None and quantizable(spec):
                num_rows, num_columns = shape
                sizes = compressed.stored_bytes(scheme, (num_rows, num_columns))
                found |= {beside(name, ending): size for ending, size in sizes.items()}
            else:
                found[name] = math.prod(shape) * dtype.itemsize
    return found


def beside(name: str, ending: str) -> str:
    """What a tensor that is part of the matrix `….weight` is called."""
    return f"{name.removesuffix('.weight')}.{ending}"


def plan_shards(stored: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """The stored tensors of each file, filled in order up to `max_shard_bytes`; a larger tensor has
    its own file."""
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name, num_bytes in stored.items():
        if shards[-1] and filled_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": members
        for i, members in enumerate(shards, 1)
    }


def write_shards(
    folder: Path, shards: dict[str, list[str]], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    total_bytes = 0
    for file, members in shards.items():
        shard = dict(next(tensors) for _ in members)
        assert list(shard) == members, "stored_forms and plan_shards follow the same order"
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, folder / file, metadata={"format": "pt"})
        share_mode(folder / file)
    assert next(tensors, None) is None, "stored_forms and plan_shards hold the same tensors"
    if len(shards) > 1:
        weight_map = {name: file for file, members in shards.items() for name in members}
        write_json(
            folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        )


def stored_forms(
    specs: Sequence[ParamSpec],
    names: TensorNames,
    tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Split and turn each of our tensors into those of a folder, on the CPU, sharing no memory."""
    given = iter(tensors)
    for spec in specs:
        name, tensor = next(given, ("", None))
        if tensor is None or name != spec.name or tensor.shape != spec.shape:
            got = (
                f"{name} of {format_shape(tuple(tensor.shape))}"
                if tensor is not None
                else "nothing"
            )
            raise ValueError(
                f"to be written next is {spec.name} of {format_shape(spec.shape)}, but given was {got}"
            )
        for source in distinct_parts(spec, names):
            assert not source.interleaved, (
                "Hugging Face folders keep the rows of heads in our order"
            )
            if isinstance(tensor, QuantizedMatrix):
                assert not source.transposed, (
                    "Hugging Face folders have no form for quantized [in, out] matrices"
                )
                stored_as = compressed.stored_tensors(tensor.select_rows(source.rows))
                yield from (
                    (beside(source.name, ending), each) for ending, each in stored_as.items()
                )
                continue
            piece = tensor[source.rows]
            stored = torch.empty(source.shape, dtype=dtype)
            yield source.name, stored.copy_(piece.T if source.transposed else piece)
    if (left := next(given, None)) is not None:
        raise ValueError(
            f"given was {left[0]}, which is no parameter of the model or a second time"
        )


def folder_config(
    config: ModelConfig,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    scheme: Scheme | None = None,
) -> dict[str, Any]:
    raw = to_hugging_face(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if scheme is not None:
        head = family_of(config).folder.stems["head"]
        raw["quantization_config"] = compressed.quantization_config(scheme, [head])
    if tokenizer is not None:
        ends = tokenizer.ordered_eos_ids
        raw |= {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": ends if len(ends) > 1 else tokenizer.eos_id,
        }
    return raw


def share_mode(path: Path) -> None:
    """Let others read a file as far as they may read any new one: safetensors makes files for their
    owner alone."""
    plain = path.with_suffix(".mode")
    plain.touch()
    path.chmod(plain.stat().st_mode)
    plain.unlink()
