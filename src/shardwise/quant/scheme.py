"""Quantization schemes of weights: their names, their bytes, and where a quantized matrix can be
sharded. Imports no torch, since the planner uses it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec
from shardwise.quant.ggml import BLOCKS
from shardwise.shards import block_of, boxes, local_shape
from shardwise.suggest import listed, nearest

NAME = re.compile(r"(?:int(?P<bits>[348])(?P<zero>z?)|fp8)(?:-g(?P<group>[1-9]\d*))?")
COMMON = (
    "int8", "int8-g32", "int4-g32", "int4-g64", "int4-g128", "int4z-g32", "int4z-g64", "int4z-g128",
    "int3-g32", "int3-g64", "int3-g128", "int3z-g32", "int3z-g64", "int3z-g128", "fp8",
)  # fmt: skip
"""Names for suggestions; every name that matches NAME is valid."""
GGUF_SCHEMES = {"Q8_0": "int8-g32", "Q4_0": "int4-g32", "Q4_1": "int4z-g32"}
"""The schemes of the GGUF types whose scales have no scales of their own; each has blocks of 32
columns."""
AS_STORED = "as-stored"
"""The value of `--quant` that serves a quantized model with the codes that it stores."""
AUTO = "auto"
"""The value of `--quant` that keeps the stored codes of matrices that kernels multiply by."""
UNQUANTIZED = "none"
"""The value of `--quant` that dequantizes a quantized model while it is loaded."""
COMMON_GROUPS = (32, 64, 128, 256)
GROUP_MULTIPLE = 8
"""Group sizes are multiples of it, so that groups begin at whole bytes for any number of bits."""
PRODUCT_COLUMNS = 32
"""Integer kernels multiply by this many columns with one scale, or a multiple."""
SCALE_BYTES = 2
ZERO_BYTES = 1


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme. Its name round-trips: int8, int4-g128, int4z-g64 (asymmetric),
    int3-g32, fp8.

    Attributes:
        kind: integers, or 8-bit floats (e4m3).
        bits: bits per code.
        group: neighboring columns of a row that share a scale; None: one scale per row, that is per
            output.
        zero: one offset per scale (asymmetric).
    """

    kind: Literal["int", "fp8"]
    bits: int = 8
    group: int | None = None
    zero: bool = False

    def __post_init__(self) -> None:
        assert self.bits in ((8,) if self.kind == "fp8" else (3, 4, 8)), self
        assert not (self.zero and self.kind == "fp8"), self
        if self.group is not None and (self.group < 1 or self.group % GROUP_MULTIPLE):
            raise ValueError(
                f"the group size must be a multiple of {GROUP_MULTIPLE}, not {self.group}; "
                "32, 64 and 128 are common"
            )

    @classmethod
    def parse(cls, name: str) -> "Scheme":
        """Return the scheme of a name. Raises ValueError for an unknown one, with the nearest
        known name."""
        match = NAME.fullmatch(name)
        if not match:
            raise ValueError(f"unknown quantization scheme {name!r}; {scheme_hint(name)}")
        group = int(match["group"]) if match["group"] else None
        if match["bits"] is None:
            return cls("fp8", group=group)
        return cls("int", int(match["bits"]), group, bool(match["zero"]))

    def __str__(self) -> str:
        kind = "fp8" if self.kind == "fp8" else f"int{self.bits}{'z' * self.zero}"
        return kind if self.group is None else f"{kind}-g{self.group}"

    @property
    def levels(self) -> int:
        """The number of different codes."""
        return 1 << self.bits

    @property
    def implicit_zero(self) -> int:
        """The zero point of stored symmetric codes of 4 or 3 bits, which are unsigned; 0 for all
        others."""
        return 0 if self.zero or self.bits == 8 else self.levels // 2

    def num_groups(self, num_columns: int) -> int:
        if self.group is None:
            return 1
        assert num_columns % self.group == 0, "check_groups comes first"
        return num_columns // self.group

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of the codes of a row, which is padded to a whole byte."""
        return math.ceil(num_columns * self.bits / 8)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a matrix that `quantize` produces: codes, scales and zero points."""
        return self.storage_format().num_bytes(shape)

    def storage_format(self, scale_bytes: int = SCALE_BYTES) -> "StorageFormat":
        """Return the format in memory, with scales of `scale_bytes`."""
        return StorageFormat(str(self), self.bits, self.group, scale_bytes + ZERO_BYTES * self.zero)


def parse_quant(name: str) -> Scheme | None:
    """Return the scheme of a value of `--quant`, or None for `auto`, `as-stored` and `none`. Raises
    ValueError for any other value."""
    if name in (AUTO, AS_STORED, UNQUANTIZED):
        return None
    try:
        return Scheme.parse(name)
    except ValueError as error:
        raise ValueError(f"{error}; {AS_STORED} serves a quantized model as it is stored") from None


def scheme_hint(name: str) -> str:
    """Return what a user who wrote `name` for a scheme may have meant."""
    if name.lower() in ("gptq", "awq", "rtn"):
        return f"{name} is a method of `convert`: --method {name.lower()} --quant int4-g64"
    near = nearest(name, COMMON, most=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMON)}"


@dataclass(frozen=True)
class StorageFormat:
    """The format of a quantized matrix in memory.

    Attributes:
        name: for reports.
        bits: bits per code; for a GGUF type the bits of a block per weight, rounded down.
        group: columns that share a scale; None: one scale per row.
        scale_bytes: bytes of scale and zero point per group; for a GGUF type the rest of a block.
    """

    name: str
    bits: int
    group: int | None
    scale_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        num_rows, num_columns = shape
        num_groups = 1 if self.group is None else num_columns // self.group
        return num_rows * (math.ceil(num_columns * self.bits / 8) + num_groups * self.scale_bytes)


StorageFormats = Mapping[tuple[str, str], StorageFormat]
"""Formats by (name of the parameter, name of its part). A part without one is not quantized."""


def ggml_format(kind: str) -> StorageFormat | None:
    """Return the format of a GGUF type; None if it is not quantized."""
    block = BLOCKS[kind]
    if block.num_elements == 1:
        return None
    bits = 8 * block.num_bytes // block.num_elements
    scale_bytes = block.num_bytes - block.num_elements * bits // 8
    return StorageFormat(kind, bits, block.num_elements, scale_bytes)


def has_product(format: StorageFormat) -> bool:
    """Return whether native and Triton kernels multiply by the codes of a format: integers of 8 or
    4 bits, in groups of whole blocks of columns."""
    name = GGUF_SCHEMES.get(format.name, format.name)
    if not NAME.fullmatch(name):
        return False
    scheme = Scheme.parse(name)
    aligned = scheme.group is None or scheme.group % PRODUCT_COLUMNS == 0
    return scheme.kind == "int" and scheme.bits in (4, 8) and aligned


def quantizable(spec: ParamSpec) -> bool:
    """Return whether a parameter is quantized: only matrices of blocks are. Rows of the embedding
    are looked up, and every logit depends on the head."""
    return spec.kind == "matrix" and len(spec.shape) == 2


def can_stay_quantized(spec: ParamSpec) -> bool:
    """Return whether `as-stored` keeps the codes: of quantizable matrices, embedding and head."""
    return quantizable(spec) or spec.name in ("embed", "head")


def weight_bytes(
    spec: ParamSpec, layout: Layout, coord: Coord, formats: StorageFormats, element_bytes: int
) -> int:
    """Return the bytes of a parameter on the rank at `coord`: parts with a format in that format,
    others with `element_bytes` per element."""
    local = boxes(spec, layout, coord)
    if not any((spec.name, box.part) in formats for box in local):
        return math.prod(local_shape(spec, layout, coord)) * element_bytes
    num_bytes = 0
    for box in local:
        format = formats.get((spec.name, box.part))
        num_bytes += format.num_bytes(box.shape) if format else math.prod(box.shape) * element_bytes
    return num_bytes


def check_groups(specs: Iterable[ParamSpec], group: int | None, layout: Layout) -> None:
    """Raise ValueError if groups do not divide the columns of a matrix or of its shards, with the
    groups, or the tensor parallel sizes, that do. Without `group`, shards must end at whole
    bytes."""
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
                else "one scale per row works (int8, int4, fp8)"
            )
            raise ValueError(
                f"groups of {group} columns do not divide the {spec.shape[1]} columns of "
                f"{spec.name}; {hint}"
            )
    check_shards(matrices, {spec.name: group for spec in matrices}, layout)


def check_shards(
    specs: Iterable[ParamSpec], groups: Mapping[str, int | None], layout: Layout
) -> None:
    """Raise ValueError if a shard of a matrix does not end with a group, with the tensor parallel
    sizes that work. `groups` maps the names of quantized matrices to their group sizes."""
    quantized = [spec for spec in specs if spec.name in groups]
    # the blocks of a model have the same matrices: one of each shape is checked
    units = {
        (spec.shape, spec.dims, spec.parts, spec.head_dim, unit): (spec, unit)
        for spec in reversed(quantized)
        for unit in (groups[spec.name] or GROUP_MULTIPLE,)
    }.values()
    for spec, unit in reversed(units):
        if not is_aligned(spec, unit, layout):
            what = f"groups of {unit} columns" if groups[spec.name] else f"{unit} columns (bytes)"
            works = [
                tp for tp in range(1, layout.tp) if all(can_shard(*each, tp) for each in units)
            ]
            raise ValueError(
                f"tp{layout.tp} does not split the {spec.shape[1]} columns of {spec.name} at "
                f"multiples of {what}; tp {listed(works)} work{'s' * (len(works) == 1)}"
            )


def is_aligned(spec: ParamSpec, unit: int, layout: Layout) -> bool:
    """Return whether the columns of every tensor parallel rank begin and end at multiples of `unit`
    or at the end of the row."""
    ranks = (layout.coord(rank) for rank in range(layout.tp))
    places = {
        place
        for coord in ranks
        for box in boxes(spec, layout, coord)
        for place in (box.start[1], box.start[1] + box.shape[1])
    }
    return all(place % unit == 0 or place == spec.shape[1] for place in places)


def can_shard(spec: ParamSpec, unit: int, tp: int) -> bool:
    """Return whether `tp` ranks can shard the matrix, in whole heads and whole units of columns."""
    num_heads = spec.shape[1] // block_of(spec, spec.dims[1])
    whole_heads = spec.dims[1] != "q_heads" or num_heads % tp == 0
    return whole_heads and is_aligned(spec, unit, Layout(tp=tp))
