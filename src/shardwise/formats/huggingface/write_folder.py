"""Writing Hugging Face folders, in shards: the inverse of `folder_reader.py`."""

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.config_files import write_json
from shardwise.formats.families import family_of
from shardwise.formats.huggingface.compressed_tensors import (
    compress,
    compressed_bytes,
    quantization_config,
)
from shardwise.formats.huggingface.hf_config import check_expressible, to_hugging_face
from shardwise.formats.huggingface.weight_files import INDEX, SINGLE
from shardwise.formats.tensor_names import TensorNames, distinct_parts, format_shape, stored_shapes
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.params import ParamSpec
from shardwise.quant.format import QuantizedMatrix
from shardwise.quant.scheme import Scheme, quantizable
from shardwise.writing.atomic import written_aside


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
    """Write a model as a folder that transformers loads, and return the names of its files.

    `tensors` yields (name, unsharded tensor) of every stored parameter in the order of `specs`,
    with the matrices of blocks quantized to `scheme` if there is one. One file's tensors are in
    memory at a time. A tied head is not written. `tokenizer` is saved, or `tokenizer_files` copied
    instead. The folder appears when it is complete. Raises ValueError for a destination that exists
    and is not empty or that cannot be written, for a model that no config.json describes, for a
    tokenizer with more ids than the vocabulary, and for tensors that do not match `specs`.
    """
    path = Path(path)
    check_vacant(path)
    check_expressible(config)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    stored = [spec for spec in specs if spec.tied_to is None]
    names = family_of(config).folder
    files = _assign_files(_tensor_sizes(stored, names, dtype, scheme), max_shard_bytes)
    with _new_folder(path) as aside:
        _write_files(aside, files, _stored_tensors(stored, names, tensors, dtype))
        write_json(aside / "config.json", _config_json(config, dtype, tokenizer, scheme))
        for file in tokenizer_files:
            shutil.copyfile(file, aside / file.name)
        if tokenizer is not None and not tokenizer_files:
            tokenizer.save(aside)
        return tuple(sorted(file.name for file in aside.iterdir()))


def check_vacant(path: Path) -> None:
    """Raise ValueError unless a folder can be created at `path`: there is none, or an empty one."""
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} already exists and is not empty; name a new folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} already exists and is not a folder; name a new folder")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to `path`, which is renamed to `path` when the block succeeds and
    removed when it fails."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            aside.mkdir()
            yield aside
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def _tensor_sizes(
    specs: Iterable[ParamSpec], names: TensorNames, dtype: torch.dtype, scheme: Scheme | None
) -> dict[str, int]:
    """Return the size of every tensor of the folder, by name, in order."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for name, shape in stored_shapes([spec], names).items():
            if scheme is not None and quantizable(spec):
                num_rows, num_columns = shape
                parts = compressed_bytes(scheme, (num_rows, num_columns))
                sizes |= {_matrix_part(name, part): size for part, size in parts.items()}
            else:
                sizes[name] = math.prod(shape) * dtype.itemsize
    return sizes


def _matrix_part(name: str, part: str) -> str:
    """Return the name of one tensor of the quantized matrix `….weight`."""
    return f"{name.removesuffix('.weight')}.{part}"


def _assign_files(sizes: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Assign tensors to files, in order, of up to `max_shard_bytes` each; a larger tensor gets its
    own file."""
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name, num_bytes in sizes.items():
        if shards[-1] and filled_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": names
        for i, names in enumerate(shards, 1)
    }


def _write_files(
    folder: Path, files: dict[str, list[str]], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    total_bytes = 0
    for file, names in files.items():
        content = dict(next(tensors) for _ in names)
        assert list(content) == names, "_stored_tensors and _assign_files have the same order"
        total_bytes += sum(tensor.nbytes for tensor in content.values())
        save_file(content, folder / file, metadata={"format": "pt"})
        _set_default_mode(folder / file)
    assert next(tensors, None) is None, "_stored_tensors and _assign_files have the same tensors"
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _stored_tensors(
    specs: Sequence[ParamSpec],
    names: TensorNames,
    tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Split and transpose each parameter into the tensors of a folder, on the CPU, as copies."""
    remaining = iter(tensors)
    for spec in specs:
        name, tensor = next(remaining, ("", None))
        if tensor is None or name != spec.name or tensor.shape != spec.shape:
            got = "nothing"
            if tensor is not None:
                got = f"{name} of {format_shape(tuple(tensor.shape))}"
            raise ValueError(
                f"expected {spec.name} of {format_shape(spec.shape)} as the next tensor to write, "
                f"got {got}"
            )
        for part in distinct_parts(spec, names):
            assert not part.interleaved, "Hugging Face folders do not interleave the rows of heads"
            if isinstance(tensor, QuantizedMatrix):
                assert not part.transposed, "transposed matrices are not written quantized"
                for suffix, each in compress(tensor.select_rows(part.rows)).items():
                    yield _matrix_part(part.name, suffix), each
            else:
                rows = tensor[part.rows]
                stored = torch.empty(part.shape, dtype=dtype)
                yield part.name, stored.copy_(rows.T if part.transposed else rows)
    if (extra := next(remaining, None)) is not None:
        raise ValueError(f"got {extra[0]}, which is not in the model or was already written")


def _config_json(
    config: ModelConfig, dtype: torch.dtype, tokenizer: Tokenizer | None, scheme: Scheme | None
) -> dict[str, Any]:
    raw = to_hugging_face(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if scheme is not None:
        head = family_of(config).folder.stems["head"]
        raw["quantization_config"] = quantization_config(scheme, [head])
    if tokenizer is not None:
        ends = tokenizer.ordered_eos_ids
        raw |= {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": ends if len(ends) > 1 else tokenizer.eos_id,
        }
    return raw


def _set_default_mode(path: Path) -> None:
    """Give a file the permissions of any new file: safetensors creates files that only their owner
    can read."""
    probe = path.with_suffix(".mode")
    probe.touch()
    path.chmod(probe.stat().st_mode)
    probe.unlink()
