"""The size of a model's weights in its files, whatever its architecture. Imports no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.formats.config_files import read_json_object
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.huggingface.weight_files import INDEX, read_headers, weight_files

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of a dtype in safetensors files."""


@dataclass(frozen=True)
class StoredSizes:
    """Sizes of the tensors of a model.

    Attributes:
        params: elements; for quantized tensors of a folder, elements of the stored codes.
        bytes_by_dtype: bytes of the tensors, by the names of their dtypes, the largest first.
    """

    params: int
    bytes_by_dtype: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def stored_sizes(path: Path) -> StoredSizes:
    """Return the sizes from the header of a GGUF file, the headers of a folder's safetensors files,
    or the index of a folder that has no files yet.

    Raises ValueError if there are none of these.
    """
    if path.is_file():
        tensors = read_gguf(path).tensors.values()
        return added((each.kind, math.prod(each.shape), each.num_bytes) for each in tensors)
    if (path / INDEX).is_file() and not all(file.is_file() for file in weight_files(path)):
        return sizes_of_index(path)
    headers = read_headers(path).values()
    sizes = ((dtype, math.prod(shape)) for dtype, shape in headers)
    return added((dtype, count, count * ELEMENT_BYTES.get(dtype, 1)) for dtype, count in sizes)


def added(tensors: Iterable[tuple[str, int, int]]) -> StoredSizes:
    """Add up (dtype, elements, bytes) of tensors."""
    params = 0
    num_bytes: Counter[str] = Counter()
    for dtype, count, size in tensors:
        params += count
        num_bytes[dtype] += size
    return StoredSizes(params, dict(num_bytes.most_common()))


def sizes_of_index(folder: Path) -> StoredSizes:
    """Return the total of an index, in elements of the config's dtype."""
    total = read_json_object(folder / INDEX).get("metadata", {}).get("total_size")
    if not isinstance(total, int) or total < 1:
        raise ValueError(f"{folder / INDEX} has no metadata.total_size; download the weights")
    config = read_json_object(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    element_bytes = 4 if name == "float32" else 2
    return StoredSizes(total // element_bytes, {str(name): total})
