"""Arithmetic of shards: from a spec, a layout and a coordinate to boxes of the global tensor, local
shapes and places in flat buffers.

Each dim of a part is sharded by its rule. A rank holds one box per part; boxes have as many dims as
the parameter.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.layout import AxisName, Coord, Layout
from shardwise.params import RULES, ParamSpec, Part, replaced


@dataclass(frozen=True)
class DimShard:
    """Elements [start, stop) of a dim, or of the part of a fused dim. The rank allocates `size`
    elements, more than those where padding follows."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Box:
    """A rectangle of one parameter that a rank holds, with as many dims as the parameter.

    Attributes:
        part: the part of the parameter that it lies in.
        start: its first element in the global tensor.
        local: its first element in the local tensor.
        shape: its size along each dim.
    """

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


def shard_dim(dim: str, size: int, block: int, layout: Layout, coord: Coord) -> DimShard:
    """Return what a rank holds of a dim of `size` elements; blocks of `block` elements stay
    whole."""
    rule = RULES[dim]
    ranks = layout.size(rule.cut) if rule.cut else 1
    if rule.cut is None or ranks == 1:
        return DimShard(0, size, size)
    count = size // block
    index = layout.index(rule.cut, coord)
    if rule.fit == "replicate" and count < ranks:
        head = index * count // ranks
        return DimShard(head * block, (head + 1) * block, block)
    if rule.fit == "pad":
        each = math.ceil(count / ranks)
        start = min(index * each, count)
        stop = min((index + 1) * each, count)
        return DimShard(start * block, stop * block, each * block)
    each, rest = divmod(count, ranks)
    start = index * each + min(index, rest)
    stop = start + each + (index < rest)
    return DimShard(start * block, stop * block, (stop - start) * block)


def shard_part(spec: ParamSpec, part: Part, layout: Layout, coord: Coord) -> tuple[DimShard, ...]:
    """Return what a rank holds of every dim of a part, counted from the start of the part."""
    return tuple(
        shard_dim(dim, size, block_of(spec, dim), layout, coord)
        for dim, size in zip(spec.part_dims(part), spec.part_shape(part), strict=True)
    )


def boxes(spec: ParamSpec, layout: Layout, coord: Coord) -> tuple[Box, ...]:
    """Return what the rank at `coord` holds of `spec`: one box per part, in the order of the local
    tensor. A box may be empty."""
    found = []
    start = 0
    local = 0
    for part in spec.all_parts:
        shards = shard_part(spec, part, layout, coord)
        along = shards[spec.part_dim]
        found.append(
            Box(
                part.name,
                replaced(tuple(s.start for s in shards), spec.part_dim, start + along.start),
                replaced((0,) * len(shards), spec.part_dim, local),
                tuple(s.stop - s.start for s in shards),
            )
        )
        start += part.size
        local += along.size
    return tuple(found)


def local_shape(spec: ParamSpec, layout: Layout, coord: Coord) -> tuple[int, ...]:
    """Return the shape that the rank at `coord` allocates, padding included."""
    parts = [shard_part(spec, part, layout, coord) for part in spec.all_parts]
    total = sum(shards[spec.part_dim].size for shards in parts)
    return replaced(tuple(shard.size for shard in parts[0]), spec.part_dim, total)


def boxes_within(
    spec: ParamSpec, layout: Layout, coord: Coord, start: int, stop: int
) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that make up elements [start, stop) of the local tensor laid out flat (last
    dim fastest), each with the flat index of its first element.

    Padding is in none of them. A box is contiguous in the flat tensor if the parts lie along dim 0
    and only dim 0 has padding; else its strides are those of the local tensor.
    """
    shape = local_shape(spec, layout, coord)
    for box in boxes(spec, layout, coord):
        for first, size in rectangles(start, stop, shape):
            inner = intersection(box, first, size)
            if inner is not None:
                yield inner, flat_index(inner.local, shape)


def rectangles(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (first index, shape) of the rectangles that make up elements [start, stop) of a tensor
    of `shape`, in order.

    Yields as few as possible, at most 2 * ndim - 1. For a matrix: the end of a row, whole rows, the
    start of a row.
    """
    strides = flat_strides(shape)
    stop = min(stop, math.prod(shape))
    while start < stop:
        index = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        # the outermost dim along which whole slices begin here
        dim, stride = next(
            (dim, stride)
            for dim, stride in enumerate(strides)
            if start % stride == 0 and stop - start >= stride
        )
        count = min(shape[dim] - index[dim], (stop - start) // stride)
        yield index, ((1,) * dim + (count,) + shape[dim + 1 :])
        start += count * stride


def intersection(box: Box, first: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the part of `box` within a rectangle of the local tensor, or None if there is none."""
    low = tuple(map(max, box.local, first))
    high = [
        min(a + n, b + m) for a, n, b, m in zip(box.local, box.shape, first, shape, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in zip(low, high, strict=True))
    if min(sizes) <= 0:
        return None
    start = tuple(
        a + here - there for a, here, there in zip(box.start, low, box.local, strict=True)
    )
    return Box(box.part, start, low, sizes)


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the position of an element in a tensor of `shape` laid out flat."""
    return sum(i * stride for i, stride in zip(index, flat_strides(shape), strict=True))


def flat_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of `shape` laid out flat, the last dim fastest."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def block_of(spec: ParamSpec, dim: str) -> int:
    """Return the elements of a dim that a shard never splits."""
    return spec.head_dim if RULES[dim].whole_heads else 1


def partial_axes(spec: ParamSpec, part: Part, layout: Layout) -> tuple[AxisName, ...]:
    """Return the axes over which the gradient of a part must be summed in addition to those of its
    unit: the partial axes of all its dims, except an axis that shards it."""
    rules = [RULES[dim] for dim in spec.part_dims(part)]
    cut = {rule.cut for rule in rules}
    axes: list[AxisName] = [
        "kv_replica" if axis == "kv_replica" else "tp"
        for rule in rules
        for axis in rule.partial
        if axis != "tp if sp" or layout.sequence_parallel
    ]
    return tuple(dict.fromkeys(axis for axis in axes if axis not in cut))


def is_first_holder(spec: ParamSpec, part: Part, layout: Layout, coord: Coord) -> bool:
    """Return whether the rank at `coord` is the primary owner of these elements of a part; replicas
    are counted and saved only once.

    Replicas are the `replicate` ranks of its unit, tensor ranks that do not shard it or share a kv
    head, and for a tied embedding the last pipeline stage.
    """
    if layout.index(spec.state_axes.replicate, coord):
        return False
    if spec.kind == "embedding" and coord.pp > 0:
        return False
    for dim, size in zip(spec.part_dims(part), spec.part_shape(part), strict=True):
        if RULES[dim].cut == "tp":
            return coord.tp % num_replicas(dim, size // block_of(spec, dim), layout) == 0
    return coord.tp == 0


def num_replicas(dim: str, num_blocks: int, layout: Layout) -> int:
    """Return how many neighbors along its axis hold the same block of a sharded dim."""
    rule = RULES[dim]
    if rule.cut is None or rule.fit != "replicate":
        return 1
    return max(1, layout.size(rule.cut) // num_blocks)


def allocated_elements(spec: ParamSpec, layout: Layout) -> int:
    """Return the elements that every rank allocates for a parameter in the flat buffer of its unit:
    the size on the first rank, which is the largest.

    A parameter therefore has the same offset, and the same arithmetic, on all ranks.
    """
    return math.prod(local_shape(spec, layout, layout.coord(0)))


def unit_elements(specs: Iterable[ParamSpec], layout: Layout) -> int:
    """Return the elements of a unit of state on one rank, before ZeRO shards it and without the
    padding at its end."""
    return sum(allocated_elements(spec, layout) for spec in specs)
