"""How weights are quantized, what that costs in bytes, and where it can be cut. Imports no torch:
the planner asks."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec, block_of, boxes, cut_columns, local_shape
from shardwise.quant.ggml import BLOCKS
from shardwise.suggest import nearest

NAME = re.compile(r"(?:int(?P<bits>[348])(?P<zero>z?)|fp8)(?:-g(?P<group>[1-9]\d*))?")
COMMON = (
    "int8", "int8-g32", "int4-g32", "int4-g64", "int4-g128", "int4z-g32", "int4z-g64", "int4z-g128",
    "int3-g32", "int3-g64", "int3-g128", "int3z-g32", "int3z-g64", "int3z-g128", "fp8",
)  # fmt: skip
"""The names that are in use; others of the form work too."""
GGUF_SCHEMES = {"Q8_0": "int8-g32", "Q4_0": "int4-g32", "Q4_1": "int4z-g32"}
"""What kinds of GGUF are whose scales have no scales of their own; each has blocks of 32
columns."""
AS_STORED = "as-stored"
"""Weights that are quantized already stay so."""
COMMON_GROUPS = (32, 64, 128, 256)
GROUP_MULTIPLE = 8
"""Groups are multiples of it, so that they begin at whole bytes, however many bits a code has."""
SCALE_BYTES = 2
ZERO_BYTES = 1


@dataclass(frozen=True)
class Scheme:
    """How the rows of a matrix are quantized: to integers, `bits` each, or to 8-bit floats (e4m3),
    with a scale for each `group` of neighbouring columns of a row (None: one for the row, so for
    each output), and, with `zero`, an offset beside each scale (asymmetric).

    Its short form round-trips: int8, int4-g128, int4z-g64 (with offsets), int3-g32, fp8.
    """

    kind: Literal["int", "fp8"]
    bits: int = 8
    group: int | None = None
    zero: bool = False

    def __post_init__(self) -> None:
        assert self.bits in ((8,) if self.kind == "fp8" else (3, 4, 8)) and not (
            self.zero and self.kind == "fp8"
        ), self
        if self.group is not None and (self.group < 1 or self.group % GROUP_MULTIPLE):
            raise ValueError(
                f"groups have a multiple of {GROUP_MULTIPLE} columns, not {self.group}; 32, 64 and 128 do"
            )

    @classmethod
    def parse(cls, name: str) -> "Scheme":
        """The scheme of that short form. Raises ValueError for one that is not known, with the
        nearest that is."""
        found = NAME.fullmatch(name)
        if not found:
            near = nearest(name, COMMON, most=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMON)}"
            raise ValueError(f"{name!r} is no way to quantize weights; {hint}")
        group = int(found["group"]) if found["group"] else None
        if found["bits"] is None:
            return cls("fp8", group=group)
        return cls("int", int(found["bits"]), group, bool(found["zero"]))

    def __str__(self) -> str:
        kind = "fp8" if self.kind == "fp8" else f"int{self.bits}{'z' * self.zero}"
        return kind if self.group is None else f"{kind}-g{self.group}"

    @property
    def levels(self) -> int:
        """How many integers there are."""
        return 1 << self.bits

    @property
    def implicit_zero(self) -> int:
        """What is taken off a stored integer, where no offset says. Codes of 8 bits have a sign and
        need none."""
        return 0 if self.zero or self.bits == 8 else self.levels // 2

    def num_groups(self, num_columns: int) -> int:
        if self.group is None:
            return 1
        assert num_columns % self.group == 0, "check_groups comes first"
        return num_columns // self.group

    def row_bytes(self, num_columns: int) -> int:
        """Of the codes of a row; one ends at a whole byte."""
        return math.ceil(num_columns * self.bits / 8)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of codes, scales and offsets of a matrix, as `quantize` makes them."""
        return self.storage_format().num_bytes(shape)

    def storage_format(self, scale_bytes: int = SCALE_BYTES) -> "StorageFormat":
        return StorageFormat(str(self), self.bits, self.group, scale_bytes + ZERO_BYTES * self.zero)


def parse_quant(name: str) -> Scheme | None:
    """What a user asks for: a scheme to round to, or None for what is stored quantized and is to
    stay so. Raises ValueError for what is neither."""
    if name == AS_STORED:
        return None
    try:
        return Scheme.parse(name)
    except ValueError as error:
        raise ValueError(
            f"{error}; {AS_STORED} keeps a model that is stored quantized as it is"
        ) from None


@dataclass(frozen=True)
class StorageFormat:
    """How a matrix is held in memory: codes of `bits`, and `scale_bytes` of scales and offsets for
    each `group` of columns of a row, or for the row. Of a kind of GGUF `bits` is what a block comes
    to for each weight, rounded down, and the rest stands beside. The name is what people call
    it."""

    name: str
    bits: int
    group: int | None
    scale_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        num_rows, num_columns = shape
        num_groups = 1 if self.group is None else num_columns // self.group
        return num_rows * (math.ceil(num_columns * self.bits / 8) + num_groups * self.scale_bytes)


StorageFormats = Mapping[tuple[str, str], StorageFormat]
"""By the names of a parameter and of its part; what has none is not quantized."""


def ggml_format(kind: str) -> StorageFormat | None:
    """That of a kind of GGUF block; None for plain numbers."""
    block = BLOCKS[kind]
    if block.num_elements == 1:
        return None
    bits = 8 * block.num_bytes // block.num_elements
    return StorageFormat(
        kind, bits, block.num_elements, block.num_bytes - block.num_elements * bits // 8
    )


def quantizable(spec: ParamSpec) -> bool:
    """Matrices of the blocks. Embedding and head stay as they are: rows are looked up, and all
    logits depend on it."""
    return spec.unit.startswith("blocks.") and len(spec.shape) == 2


def can_stay_quantized(spec: ParamSpec) -> bool:
    """What may stay as it is stored: these, and embedding and head."""
    return quantizable(spec) or spec.name in ("embed", "head")


def weight_bytes(
    spec: ParamSpec, layout: Layout, coord: Coord, formats: StorageFormats, element_bytes: int
) -> int:
    """Of a parameter on the rank at `coord`: of parts that have a form by it, of others by their
    elements."""
    held = boxes(spec, layout, coord)
    if not any((spec.name, box.part) in formats for box in held):
        return math.prod(local_shape(spec, layout, coord)) * element_bytes
    found = [(formats.get((spec.name, box.part)), box.shape) for box in held]
    return sum(
        format.num_bytes(shape) if format else math.prod(shape) * element_bytes
        for format, shape in found
    )


def check_groups(specs: Iterable[ParamSpec], group: int | None, layout: Layout) -> None:
    """Raise ValueError where groups of columns do not divide a row, or a rank's share of one, with
    those, or the tp, that do. No `group`: shares end at whole bytes."""
    matrices = [spec for spec in specs if quantizable(spec)]
    for spec in matrices:
        if group and spec.shape[1] % group:
            works = [
                each
                for each in COMMON_GROUPS
                if all(every.shape[1] % each == 0 for every in matrices)
            ]
            hint = (
                f"groups of {listed(works)} do"
                if works
                else "one scale a row does (int8, int4, fp8)"
            )
            raise ValueError(
                f"groups of {group} columns do not divide the {spec.shape[1]} of {spec.name}; {hint}"
            )
    check_shards(matrices, {spec.name: group for spec in matrices}, layout)


def check_shards(
    specs: Iterable[ParamSpec], groups: Mapping[str, int | None], layout: Layout
) -> None:
    """Raise ValueError where a rank's columns of a matrix in groups do not end with one, with the
    tp that work."""
    units = [(spec, groups[spec.name] or GROUP_MULTIPLE) for spec in specs if spec.name in groups]
    for spec, unit in units:
        if not is_aligned(spec, unit, layout):
            what = (
                f"groups of {unit} columns"
                if groups[spec.name]
                else f"pieces of {unit} columns, which fill bytes,"
            )
            works = [
                tp for tp in range(1, layout.tp) if all(can_shard(*each, tp) for each in units)
            ]
            raise ValueError(
                f"tp{layout.tp} cuts the {spec.shape[1]} columns of {spec.name} where {what} do not end; "
                f"tp {listed(works)} work{'s' * (len(works) == 1)}"
            )


def is_aligned(spec: ParamSpec, unit: int, layout: Layout) -> bool:
    """Whether every tensor rank's columns begin and end at multiples of `unit`, or where the row
    does."""
    ranks = (layout.coord(rank) for rank in range(layout.tp))
    places = {
        place
        for coord in ranks
        for cut in cut_columns(spec, layout, coord)
        for place in (cut.start, cut.stop)
    }
    return all(place % unit == 0 or place == spec.shape[1] for place in places)


def can_shard(spec: ParamSpec, unit: int, tp: int) -> bool:
    """Whether tp ranks can have the matrix, in whole heads and whole units of columns."""
    whole = (
        (spec.shape[1] // block_of(spec, spec.dims[1])) % tp == 0
        if spec.dims[1] == "q_heads"
        else True
    )
    return whole and is_aligned(spec, unit, Layout(tp=tp))


def listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
