"""Headers of GGUF files: the metadata of a model, and where in the file each tensor is.

A GGUF file is, in this order and little endian,

    "GGUF", version (u32), number of tensors (u64), number of metadata entries (u64)
    metadata: per entry a key (string), a value type (u32) and the value
    tensors:  per tensor a name (string), the number of dims (u32), the dims (u64, innermost
              first), a kind (u32) and an offset (u64) from the start of the tensor data
    padding up to the alignment, then the tensor data, each tensor at a multiple of the alignment

where a string is its length in bytes (u64) and that many bytes of UTF-8, and an array is its item
type (u32), its length (u64) and its items, which may be arrays. Large models come in several files,
`NAME-00001-of-00003.gguf` and so on, each with a header of its own. The format is documented at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The file is memory-mapped: opening it reads only its header, however large the tensors are. Nothing
in a header is trusted, since a download may be truncated and a file may be of another kind.
"""

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.quant.ggml import BLOCKS

# The numbers of `enum ggml_type`. Kinds that are not in BLOCKS are listed for error messages.
_KINDS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# The numbers of `enum gguf_metadata_value_type`, with the formats that struct and numpy share.
_NUMBERS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_BOOL = 7
_STRING = 8
_ARRAY = 9

# Far above what any model needs: a corrupt length is rejected before memory is allocated.
_MAX_NAME_BYTES = 1 << 10
_MAX_HEADER_BYTES = 1 << 28
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ITEMS = 1 << 22  # of all arrays together, each a Python object
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4

_MIN_HEADER_BYTES = 24
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_ARRAY_BYTES = 4 + 8
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        shape: in torch order, outermost dim first.
        kind: a key of BLOCKS.
        offset: in bytes from the start of the file.
        part: the number of the file that it is in, from 0.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True, eq=False)
class Gguf:
    """An open GGUF model: its metadata as Python values, its tensors by name, and its mapped
    files."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    parts: tuple[NDArray[np.uint8], ...]

    def tensor(self, name: str) -> GgufTensor:
        """Return a tensor. Raises ValueError if there is none of that name."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]

    def raw_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [start, stop) of a tensor's first dim, without reading others.

        The result is flat, read-only and shares memory with the mapped file. Blocks lie along the
        last dim and never cross a row, so a matrix can be split at any row; a tensor of one dim
        only between blocks. Raises ValueError for rows that the tensor does not have, or that split
        a block.
        """
        tensor = self.tensor(name)
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise ValueError(
                f"{self.path}: tensor {name!r} has rows 0 to {tensor.shape[0]}, not {start} to "
                f"{stop}"
            )
        block = BLOCKS[tensor.kind]
        row_elements = prod(tensor.shape[1:])
        if start * row_elements % block.num_elements or stop * row_elements % block.num_elements:
            raise ValueError(
                f"{self.path}: tensor {name!r} is stored as {tensor.kind} and can be split only at "
                f"multiples of {block.num_elements}, not at {start} to {stop}"
            )
        first, last = (
            tensor.offset + row * row_elements // block.num_elements * block.num_bytes
            for row in (start, stop)
        )
        return self.parts[tensor.part][first:last]


def read_gguf(path: str | Path) -> Gguf:
    """Open a GGUF file of version 2 or 3; if it is the first of several, also the others.

    Raises ValueError, in one sentence with the file and the reason, for anything but a complete
    GGUF file with tensors of the kinds in BLOCKS.
    """
    path = Path(path)
    cursor = _Cursor(path)
    metadata, tensors = _read_part(cursor, part=0)
    cursors = [cursor]
    for part, part_path in enumerate(_later_parts(cursor, metadata), start=1):
        later = _Cursor(part_path)
        part_metadata, part_tensors = _read_part(later, part)
        if (
            part_metadata.get("split.no") != part
            or part_metadata.get("split.count") != metadata["split.count"]
        ):
            raise later.error(
                f"its header is not that of part {part + 1} of {metadata['split.count']}"
            )
        twice = tensors.keys() & part_tensors.keys()
        if twice:
            raise later.error(f"tensor {min(twice)!r} is also in another part")
        tensors |= part_tensors
        cursors.append(later)
    num_expected = metadata.get("split.tensors.count", len(tensors))
    if num_expected != len(tensors):
        raise cursor.error(
            f"it should have {num_expected} tensors in all its parts, but has {len(tensors)}"
        )
    return Gguf(
        path, metadata, tensors, tuple(np.frombuffer(each.data, np.uint8) for each in cursors)
    )


def _later_parts(cursor: "_Cursor", metadata: dict[str, Any]) -> list[Path]:
    """Return the paths of parts 2, 3, ... of a model, from the header of its first part."""
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 1 <= count <= 99999:
        raise cursor.error(
            f"its split.count is {count!r:.40} and should be the number of its parts"
        )
    if count == 1:
        return []
    suffix = f"-00001-of-{count:05d}.gguf"
    if metadata.get("split.no") != 0:
        raise cursor.error(
            f"it is not the first of its {count} parts; name the one that ends in {suffix}"
        )
    if not cursor.path.name.endswith(suffix):
        raise cursor.error(f"it is the first of {count} parts, so its name has to end in {suffix}")
    stem = cursor.path.name.removesuffix(suffix)
    return [
        cursor.path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf")
        for part in range(2, count + 1)
    ]


class _Cursor:
    """A memory-mapped file and a position in it; every read is checked against its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.num_items = 0
        try:
            if not path.is_file():
                raise self.error("it does not exist")
            with path.open("rb") as file:
                self.num_bytes = file.seek(0, 2)
                if self.num_bytes < _MIN_HEADER_BYTES:
                    raise self.error(f"it has only {self.num_bytes} bytes")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.end = min(self.num_bytes, _MAX_HEADER_BYTES)
        except OSError as reason:
            raise self.error(f"it cannot be opened ({reason.strerror})") from None

    def error(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} cannot be used as a GGUF file: {reason}")

    def cut_short(self) -> ValueError:
        """Return the error for a header that goes on beyond the end."""
        if self.end < self.num_bytes:
            return self.error(f"its header is longer than {_MAX_HEADER_BYTES >> 20} MiB")
        return self.error(f"it ends at byte {self.end}, in the middle of its header")

    def take(self, num_bytes: int) -> int:
        """Skip that many bytes and return where they start."""
        start = self.position
        if num_bytes > self.end - start:
            raise self.cut_short()
        self.position += num_bytes
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, min_bytes: int, most: int) -> int:
        """Read a count of things that follow. Raises ValueError if there are more than `most`, or
        more than fit in the rest of the file."""
        count: int = self.number("<Q")
        if count > (self.num_bytes - self.position) // min_bytes:
            raise self.error(f"its count of {what}, {count}, exceeds the size of the file")
        if count > most:
            raise self.error(f"it has {count} {what}, and at most {most} are supported")
        return count

    def name(self) -> str:
        return self.strings(1, _MAX_NAME_BYTES)[0]

    def strings(self, count: int, max_bytes: int = _MAX_HEADER_BYTES) -> list[str]:
        """Read strings in one simple loop: a vocabulary with its merges has a hundred
        thousand."""
        data = self.data
        position = self.position
        end = self.end
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if end < position <= self.num_bytes:
                    raise self.cut_short()
                if position > end or position - start > max_bytes:
                    raise self.error(
                        f"the string at byte {start} exceeds the file or any sensible length"
                    )
                strings.append(str(data[start:position], "utf-8"))
        except struct.error:
            raise self.cut_short() from None
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {start} is not UTF-8") from None
        self.position = position
        return strings

    def value(self) -> Any:
        """Read the type and the value of one metadata entry."""
        value_type = self.number("<I")
        return self.array(depth=1) if value_type == _ARRAY else self.items(value_type, 1, 0)[0]

    def array(self, depth: int) -> list[Any]:
        """Read the item type, the length and the items of an array within `depth` - 1 others."""
        if depth > _MAX_ARRAY_DEPTH:
            raise self.error(f"it has arrays nested in more than {_MAX_ARRAY_DEPTH} levels")
        item_type = self.number("<I")
        min_bytes = _MIN_ARRAY_BYTES if item_type == _ARRAY else 1
        count = self.count("items in an array", min_bytes, _MAX_ITEMS)
        self.num_items += count
        if self.num_items > _MAX_ITEMS:
            raise self.error(f"its arrays have more than {_MAX_ITEMS} items in all")
        return self.items(item_type, count, depth)

    def items(self, item_type: int, count: int, depth: int) -> list[Any]:
        if item_type == _STRING:
            return self.strings(count)
        if item_type == _ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        if item_type not in _NUMBERS and item_type != _BOOL:
            raise self.error(
                f"a value before byte {self.position} has an unknown type, {item_type}"
            )
        form = np.dtype(_NUMBERS.get(item_type, "<B"))
        items: list[Any] = np.frombuffer(
            self.data, form, count, self.take(count * form.itemsize)
        ).tolist()
        if item_type == _BOOL:
            if not {0, 1}.issuperset(items):
                raise self.error(f"a truth value before byte {self.position} is neither 0 nor 1")
            return [item == 1 for item in items]
        return items


def _read_part(cursor: _Cursor, part: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the header of one file."""
    if cursor.data[:4] != b"GGUF":
        raise cursor.error("it does not start with the letters GGUF")
    cursor.take(4)
    version = cursor.number("<I")
    if version & 0xFFFF == 0:
        raise cursor.error("it is big endian; only little endian is supported")
    if version not in (2, 3):
        raise cursor.error(
            f"it has version {version}; only versions 2 and 3 are supported, so convert the model "
            "again"
        )
    num_tensors = cursor.count("tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
    num_entries = cursor.count("metadata entries", _MIN_ENTRY_BYTES, _MAX_ENTRIES)
    metadata = _read_metadata(cursor, num_entries)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"its alignment is {alignment!r:.40} and must be a power of two")
    return metadata, _read_tensors(cursor, num_tensors, alignment, part)


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name()
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} is repeated")
        metadata[key] = cursor.value()
    return metadata


def _read_tensors(
    cursor: _Cursor, num_tensors: int, alignment: int, part: int
) -> dict[str, GgufTensor]:
    """Read the table of tensors, and convert its offsets, which count from the padded end of the
    header, to offsets in the file."""
    entries: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for _ in range(num_tensors):
        name = cursor.name()
        if name in entries:
            raise cursor.error(f"tensor {name!r} is repeated")
        entries[name] = (_read_shape(cursor, name), _read_kind(cursor, name), cursor.number("<Q"))
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in entries.items():
        block = BLOCKS[kind]
        if shape[-1] % block.num_elements:
            raise cursor.error(
                f"tensor {name!r} has rows of {shape[-1]} elements, not a multiple of the "
                f"{block.num_elements} of a {kind} block"
            )
        if offset % alignment:
            raise cursor.error(
                f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}"
            )
        num_bytes = prod(shape) // block.num_elements * block.num_bytes
        tensors[name] = GgufTensor(name, shape, kind, data_start + offset, num_bytes, part)
    _check_extents(cursor, tensors.values())
    return tensors


def _read_shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    num_dims = cursor.number("<I")
    if num_dims > _MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {num_dims} dims, more than {_MAX_DIMS}")
    dims = [cursor.number("<Q") for _ in range(num_dims)]
    if 0 in dims:
        raise cursor.error(f"tensor {name!r} has a dim of size 0")
    return tuple(reversed(dims)) or (1,)  # a scalar is stored without dims


def _read_kind(cursor: _Cursor, name: str) -> str:
    number = cursor.number("<I")
    kind = _KINDS.get(number, f"kind {number}")
    if kind not in BLOCKS:
        raise cursor.error(
            f"tensor {name!r} is stored as {kind}; supported are {', '.join(BLOCKS)}"
        )
    return kind


def _check_extents(cursor: _Cursor, tensors: Iterable[GgufTensor]) -> None:
    """Raise ValueError for tensors that overlap or lie outside the file."""
    end = 0
    before = ""
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset < end:
            raise cursor.error(f"tensor {tensor.name!r} starts inside tensor {before!r}")
        end = tensor.offset + tensor.num_bytes
        before = tensor.name
        if end > cursor.num_bytes:
            raise cursor.error(
                f"tensor {tensor.name!r} ends at byte {end}, but the file at byte "
                f"{cursor.num_bytes}; it may be truncated, so download it again"
            )
