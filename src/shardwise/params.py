"""What each parameter is and how it is cut: the one table from which every layout's slices are
derived.

From a `ParamSpec`, a `Layout` and a coordinate follow the local shape, the bytes to read from a
file, the checkpoint boxes, the axes over which a gradient is a partial sum, and the planner's
bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.layout import AxisName, Coord, Layout

PartialAxis = Literal["tp", "tp if sp", "kv_replica"]


@dataclass(frozen=True)
class Rule:
    """`cut`: the axis that slices a dim. `partial`: axes over which the gradient of each rank is
    one term of a sum."""

    cut: Literal["tp"] | None = None
    partial: tuple[PartialAxis, ...] = ()


RULES = {
    "vocab": Rule(cut="tp"),  # padded to equal blocks
    "q_heads": Rule(cut="tp"),
    "kv_heads": Rule(
        cut="tp", partial=("kv_replica",)
    ),  # fewer heads than ranks: replicated, their gradients summed
    "ffn": Rule(cut="tp"),
    "embed": Rule(
        partial=("tp if sp",)
    ),  # not cut, but under sequence parallel each rank sees its own tokens
    "head_dim": Rule(partial=("tp",)),  # q/k norm: shared by heads that live on different ranks
    "positions": Rule(),
}


@dataclass(frozen=True)
class Init:
    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True)
class Part:
    """A piece of a fused parameter: `size` rows of dim 0, cut by the rule of `dim`."""

    name: str
    dim: str
    size: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter by its global shape. `dims` names each dim (dim 0 of a fused one is named by
    its `parts`); `head_dim` is the block that a cut over heads never splits. A tied parameter has
    no storage of its own."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init
    parts: tuple[Part, ...] = ()
    head_dim: int = 1
    tied_to: str | None = None

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), self
        assert not self.parts or sum(part.size for part in self.parts) == self.shape[0], self
        assert all(dim in RULES for dim in (*self.dims[1:], *(part.dim for part in self.rows))), (
            self
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def unit(self) -> str:
        """The unit of state that owns it: `embed`, `positions`, `blocks.3`, or `final`."""
        head, *rest = self.name.split(".")
        return f"{head}.{rest[0]}" if rest else head if head in ("embed", "positions") else "final"

    @property
    def rows(self) -> tuple[Part, ...]:
        return self.parts or (Part(self.name.split(".")[-1], self.dims[0], self.shape[0]),)

    def part(self, name: str) -> Part:
        return next(part for part in self.rows if part.name == name)

    @property
    def decayed(self) -> bool:
        """Weight decay shrinks matrices, not norms and biases."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Cut:
    """Elements [start, stop) of a dim; `size` is what the rank allocates, more than that where
    padding follows."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Box:
    """A rectangle of one parameter that a rank holds: where it starts globally and locally, and its
    shape."""

    part: str
    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.shape, strict=True))


def cut_dim(dim: str, size: int, block: int, layout: Layout, coord: Coord) -> Cut:
    """What of a dim of `size` elements a rank holds; blocks of `block` elements stay whole."""
    if RULES[dim].cut is None or layout.tp == 1:
        return Cut(0, size, size)
    count = size // block
    ranks = layout.tp
    here = coord.tp
    if dim == "kv_heads" and count < ranks:
        head = here * count // ranks
        return Cut(head * block, (head + 1) * block, block)
    if dim == "vocab":
        each = math.ceil(count / ranks)
        start = min(here * each, count)
        stop = min((here + 1) * each, count)
        return Cut(start * block, stop * block, each * block)
    each, rest = divmod(count, ranks)
    start = here * each + min(here, rest)
    stop = start + each + (here < rest)
    return Cut(start * block, stop * block, (stop - start) * block)


def cut_columns(spec: ParamSpec, layout: Layout, coord: Coord) -> list[Cut]:
    """The cuts of every dim but the first."""
    named = zip(spec.dims[1:], spec.shape[1:], strict=True)
    return [cut_dim(dim, size, block_of(spec, dim), layout, coord) for dim, size in named]


def cut_rows(spec: ParamSpec, layout: Layout, coord: Coord) -> list[Cut]:
    """The cuts of dim 0, one a part, each counted from the start of its part."""
    return [
        cut_dim(part.dim, part.size, block_of(spec, part.dim), layout, coord) for part in spec.rows
    ]


def boxes(spec: ParamSpec, layout: Layout, coord: Coord) -> tuple[Box, ...]:
    """The rectangles of `spec` on the rank at `coord`, one a part, in the order of the local
    tensor."""
    columns = cut_columns(spec, layout, coord)
    found = []
    row = 0
    local = 0
    for part, cut in zip(spec.rows, cut_rows(spec, layout, coord), strict=True):
        start = (row + cut.start, *(c.start for c in columns))
        shape = (cut.stop - cut.start, *(c.stop - c.start for c in columns))
        found.append(Box(part.name, start, (local, *(0 for _ in columns)), shape))
        row = row + part.size
        local = local + cut.size
    return tuple(found)


def boxes_within(
    spec: ParamSpec, layout: Layout, coord: Coord, start: int, stop: int
) -> Iterator[tuple[Box, int]]:
    """The rectangles that make up elements [start, stop) of the local tensor, laid out flat by
    rows, each with the place of its first element: the rest of a row, whole rows, the beginning of
    a row. Padding is in none."""
    width = math.prod(local_shape(spec, layout, coord)[1:])
    for box in boxes(spec, layout, coord):
        first = box.local[0] * width
        last = (box.local[0] + box.shape[0]) * width
        for row, column, shape in rectangles(max(start, first), min(stop, last), width):
            local = (row, column)[: len(box.shape)]
            at = tuple(
                a + here - there for a, here, there in zip(box.start, local, box.local, strict=True)
            )
            yield Box(box.part, at, local, shape[: len(box.shape)]), row * width + column


def rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(row, column, shape) of the rectangles that make up elements [start, stop) of a matrix with
    rows of `width`."""
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            shape = (1, min(width - column, stop - start))
        else:
            shape = ((stop - start) // width, width)
        yield row, column, shape
        start += math.prod(shape)


def local_shape(spec: ParamSpec, layout: Layout, coord: Coord) -> tuple[int, ...]:
    """The shape that the rank at `coord` allocates, padding included."""
    rows = sum(cut.size for cut in cut_rows(spec, layout, coord))
    return (rows, *(cut.size for cut in cut_columns(spec, layout, coord)))


def block_of(spec: ParamSpec, dim: str) -> int:
    return spec.head_dim if dim in ("q_heads", "kv_heads") else 1


def partial_axes(spec: ParamSpec, part: Part, layout: Layout) -> tuple[AxisName, ...]:
    """Axes over which this part's gradient must be summed besides the data ranks: those of all its
    dims, less an axis that cuts it."""
    dims = (part.dim, *spec.dims[1:])
    cut = {RULES[dim].cut for dim in dims}
    wanted = [axis for dim in dims for axis in RULES[dim].partial]
    axes: list[AxisName] = [
        "kv_replica" if axis == "kv_replica" else "tp"
        for axis in wanted
        if axis != "tp if sp" or layout.sequence_parallel
    ]
    return tuple(dict.fromkeys(axis for axis in axes if axis not in cut))


def is_first_holder(spec: ParamSpec, part: Part, layout: Layout, coord: Coord) -> bool:
    """Whether the rank at `coord` is the first, among those that differ in tp or pp alone, to hold
    what it holds of a part: replicas are counted, and saved, once. A tied embedding is held by the
    last stage too."""
    if spec.unit == "embed" and coord.pp > 0:
        return False
    dims = (part.dim, *spec.dims[1:])
    if "kv_heads" in dims:
        return coord.tp % layout.kv_replicas(part.size // spec.head_dim) == 0
    return coord.tp == 0 or any(RULES[dim].cut == "tp" for dim in dims)


@lru_cache(maxsize=64)
def stage_layers(config: ModelConfig, layout: Layout) -> tuple[range, ...]:
    """The blocks of each virtual stage. Work is counted in products, of a block and of the head
    with their matrices and of the embedding with a row; attention, which grows with the sequence,
    is left out."""
    multiplied = sum(spec.numel for spec in block_specs(config, "") if len(spec.shape) > 1)
    head = config.vocab_size * config.hidden_size
    return layout.stage_layers(
        config.num_layers, config.hidden_size / multiplied, head / multiplied
    )


def stage_units(config: ModelConfig, layout: Layout, stage: int) -> frozenset[str]:
    """Units of state that the pipeline rank `stage` holds; a tied embedding is on the first and on
    the last."""
    layers = stage_layers(config, layout)
    held = {
        f"blocks.{i}" for s, blocks in enumerate(layers) if s % layout.pp == stage for i in blocks
    }
    if stage == 0:
        held |= {"embed", "positions"}
    if stage == layout.pp - 1:
        held |= {"final"} | ({"embed"} if config.tied else set())
    return frozenset(held)


def units(specs: tuple[ParamSpec, ...]) -> dict[str, tuple[ParamSpec, ...]]:
    """Stored parameters by unit of state, in model order."""
    stored = (spec for spec in specs if spec.tied_to is None)
    return {name: tuple(group) for name, group in groupby(stored, key=lambda spec: spec.unit)}


def num_params(specs: tuple[ParamSpec, ...]) -> int:
    return sum(spec.numel for spec in specs if spec.tied_to is None)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of training on one token, forward and backward, recompute not
    counted: 6 per parameter but those that are looked up (embedding, learned positions; a tied
    embedding is the head too), and causal attention, which sees half of `seq_len` on average."""
    looked_up = {"positions"} if config.tied else {"embed", "positions"}
    multiplied = sum(
        spec.numel
        for spec in model_specs(config)
        if not spec.tied_to and spec.name not in looked_up
    )
    return 6 * multiplied + 6 * config.num_layers * config.q_size * seq_len


def model_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Every parameter of the decoder, in model order. The head of a tied model refers to
    `embed`."""
    d = config.hidden_size
    vocab = config.vocab_size
    normal = Init("normal", 0.02)
    specs = [ParamSpec("embed", (vocab, d), ("vocab", "embed"), normal)]
    if config.positions == "learned":
        specs.append(
            ParamSpec("positions", (config.max_positions, d), ("positions", "embed"), normal)
        )
    for layer in range(config.num_layers):
        specs += block_specs(config, f"blocks.{layer}.")
    specs += norm_specs(config, "norm", d)
    specs.append(
        ParamSpec(
            "head", (vocab, d), ("vocab", "embed"), normal, tied_to="embed" if config.tied else None
        )
    )
    return tuple(specs)


def block_specs(config: ModelConfig, prefix: str) -> list[ParamSpec]:
    """Norm, attention, norm, MLP. What writes into the residual starts smaller by the square root
    of 2 x layers, as GPT-2 does, so that the residual's size does not grow with depth."""
    d = config.hidden_size
    c = config.head_dim
    f = config.ffn_size
    q = config.q_size
    kv = config.kv_size
    normal = Init("normal", 0.02)
    residual = Init("normal", 0.02 / math.sqrt(2 * config.num_layers))
    zeros = Init("zeros")
    ones = Init("ones")
    qkv = (Part("q", "q_heads", q), Part("k", "kv_heads", kv), Part("v", "kv_heads", kv))
    up = (Part("gate", "ffn", f), Part("up", "ffn", f)) if config.gated else (Part("up", "ffn", f),)
    rows = sum(part.size for part in up)
    specs = norm_specs(config, prefix + "norm1", d)
    specs.append(
        ParamSpec(prefix + "qkv", (q + 2 * kv, d), ("fused", "embed"), normal, qkv, head_dim=c)
    )
    if config.qkv_bias:
        specs.append(
            ParamSpec(prefix + "qkv_bias", (q + 2 * kv,), ("fused",), zeros, qkv, head_dim=c)
        )
    if config.qk_norm:
        specs += [
            ParamSpec(prefix + name, (c,), ("head_dim",), ones) for name in ("q_norm", "k_norm")
        ]
    specs.append(ParamSpec(prefix + "out", (d, q), ("embed", "q_heads"), residual, head_dim=c))
    if config.out_bias:
        specs.append(ParamSpec(prefix + "out_bias", (d,), ("embed",), zeros))
    specs += norm_specs(config, prefix + "norm2", d)
    specs.append(ParamSpec(prefix + "gate_up", (rows, d), ("fused", "embed"), normal, up))
    if config.mlp_bias:
        specs.append(ParamSpec(prefix + "gate_up_bias", (rows,), ("fused",), zeros, up))
    specs.append(ParamSpec(prefix + "down", (d, f), ("embed", "ffn"), residual))
    if config.mlp_bias:
        specs.append(ParamSpec(prefix + "down_bias", (d,), ("embed",), zeros))
    return specs


def norm_specs(config: ModelConfig, name: str, size: int) -> list[ParamSpec]:
    scale = ParamSpec(name, (size,), ("embed",), Init("ones"))
    return (
        [scale, ParamSpec(name + "_bias", (size,), ("embed",), Init("zeros"))]
        if config.norm == "layer"
        else [scale]
    )
