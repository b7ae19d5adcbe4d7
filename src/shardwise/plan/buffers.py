"""Buffers: what a rank holds temporarily in a training step, counted by replaying the table that
the run executes.

- gathered weights of a unit, from GATHER to FREE (stage 3)
- the full gradient of a unit, from the backward of the first piece that uses it until it is reduced
  (stages 2 and 3)
- rows of gradients that arrive from other ranks to be added: one set per bucket in flight

The store completes its reductions at places that follow from the table alone, so this is what it
holds, byte for byte. With fp32 gradients NCCL adds them itself, and a GPU may hold a bucket or two
less.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import (
    BUCKET_BYTES,
    IN_FLIGHT,
    Action,
    Piece,
    bucket_elements,
    rank_pieces,
    stage_pieces,
)
from shardwise.parallel.pipeline.schedules import step_table
from shardwise.params import block_unit, rank_layers
from shardwise.precision import FP32_BYTES


@dataclass(frozen=True)
class Moment:
    """Bytes of temporary buffers during the action at index `at` of a table."""

    at: int
    weights: int
    gradients: int
    arriving: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.arriving


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of the buffers of one unit.

    Attributes:
        weights: its gathered weights
        gradients: its full gradient
        buckets: what each bucket of its reduction holds while in flight
    """

    weights: int
    gradients: int
    buckets: tuple[int, ...]


def buffer_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    sizes: Mapping[str, int],
    weight_bytes: int,
    grad_bytes: int,
) -> int:
    """Return the peak bytes of buffers for units of `sizes` elements. Two micro-batches cover all
    that happens between one and the next."""
    if layout.shard == "fsdp":
        blocks = {block_unit(layer) for layer in rank_layers(config, layout, stage)}
        return fsdp_bytes(layout, sizes, blocks, weight_bytes, grad_bytes)
    table = step_table(config, layout, stage, min(layout.microbatches, 2))
    pieces = rank_pieces(stage_pieces(config, layout), layout, stage)
    return max(
        moment.total for moment in moments(table, pieces, layout, sizes, weight_bytes, grad_bytes)
    )


def moments(
    table: Sequence[Action],
    pieces: Sequence[Piece],
    layout: Layout,
    sizes: Mapping[str, int],
    weight_bytes: int,
    grad_bytes: int,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
) -> Iterator[Moment]:
    """Yield the buffers of a step after each allocation and each action; those of the sums in
    `finish` come last."""
    units = {
        unit: UnitBytes(
            size * weight_bytes if layout.shards("parameters") else 0,
            size * grad_bytes if layout.shards("gradients") else 0,
            bucket_sizes(layout, size // layout.shard_size, grad_bytes, bucket_bytes),
        )
        for unit, size in sizes.items()
    }
    replay = Replay(units, {piece.name: piece.units for piece in pieces}, overlap)
    for at, action in enumerate(table):
        for _ in replay.execute(action):
            yield replay.moment(at)
        yield replay.moment(at)
    if layout.data_size > layout.shard_size and grad_bytes < FP32_BYTES:
        # `finish` sums over groups, one bucket at a time.
        at_most = bucket_elements(
            layout.shard_size, layout.size("replicate"), grad_bytes, bucket_bytes
        )
        largest = max(min(size // layout.shard_size, at_most) for size in sizes.values())
        yield Moment(len(table), 0, 0, largest * grad_bytes)


def bucket_sizes(
    layout: Layout, shard_elements: int, grad_bytes: int, bucket_bytes: int
) -> tuple[int, ...]:
    """Return the bytes that each bucket of a unit's reduction holds while in flight, in addition to
    the gradient: what arrives and, where a bucket is not the whole unit, a copy of what is sent.
    Equal buckets beyond those that can be in flight are left out."""
    at_most = bucket_elements(layout.shard_size, layout.size("replicate"), grad_bytes, bucket_bytes)
    full, rest = divmod(shard_elements, at_most)
    elements = [at_most] * min(full, IN_FLIGHT + 1) + ([rest] if rest else [])
    if layout.shard_size > 1:
        copies = 1 + (len(elements) > 1)
    else:  # nothing to scatter: the sum is in place, in two halves if it has another dtype
        is_wider = grad_bytes < FP32_BYTES
        copies = int(is_wider and layout.data_size > 1 and not layout.shards("gradients"))
    return tuple(each * layout.shard_size * grad_bytes * copies for each in elements)


class Replay:
    """Counts the buffers that the store of a run holds.

    Attributes:
        started: units whose gradient has contributions that are not being reduced yet
        reductions: (unit, bytes, is_last) of each bucket in flight; `is_last` of its unit
    """

    def __init__(
        self, units: Mapping[str, UnitBytes], uses: Mapping[str, tuple[str, ...]], overlap: bool
    ) -> None:
        self.units = units
        self.uses = uses
        self.overlap = overlap
        self.weights = self.gradients = self.arriving = 0
        self.started: set[str] = set()
        self.reductions: deque[tuple[str, int, bool]] = deque()

    def moment(self, at: int) -> Moment:
        return Moment(at, self.weights, self.gradients, self.arriving)

    def execute(self, action: Action) -> Iterator[None]:
        """Run one action; yields after each allocation."""
        if action.kind == "GATHER":
            self.weights += self.units[action.unit].weights
        elif action.kind == "FREE":
            self.weights -= self.units[action.unit].weights
        elif action.kind in ("B", "W"):
            for unit in self.uses[action.piece]:
                self.contribute(unit)
                yield
        elif action.kind == "REDUCE":
            yield from self.reduce(action.unit)

    def contribute(self, unit: str) -> None:
        """Allocate the full gradient of a unit at its first contribution, once an earlier reduction
        of it is complete."""
        if unit not in self.started:
            while any(other == unit for other, _, _ in self.reductions):
                self.advance()
            self.gradients += self.units[unit].gradients
            self.started.add(unit)

    def reduce(self, unit: str) -> Iterator[None]:
        self.started.discard(unit)
        buckets = self.units[unit].buckets
        for at, size in enumerate(buckets):
            while len(self.reductions) >= IN_FLIGHT:
                self.advance()
            self.reductions.append((unit, size, at == len(buckets) - 1))
            self.arriving += size
            yield
            while self.reductions and not self.overlap:
                self.advance()

    def advance(self) -> None:
        """Complete the oldest reduction."""
        unit, size, is_last = self.reductions.popleft()
        self.arriving -= size
        if is_last:
            self.gradients -= self.units[unit].gradients


def fsdp_bytes(
    layout: Layout,
    sizes: Mapping[str, int],
    block_units: Collection[str],
    weight_bytes: int,
    grad_bytes: int,
) -> int:
    """Return about what FSDP holds temporarily, which PyTorch decides without a table.

    In the backward of a block: the weights of the root, of two blocks (all with `keep`) and of one
    more that arrives; the gradients of the root and the block, and that of the block again as sent
    and as received. Or, at the end, the same for the root alone.
    """
    blocks = [size for unit, size in sizes.items() if unit in block_units]
    root = sum(sizes.values()) - sum(blocks)
    block = max(blocks)
    whole = root + (sum(blocks) if layout.keep else min(2, len(blocks)) * block) + block
    return max(
        whole * weight_bytes + (root + 3 * block) * grad_bytes,
        root * (weight_bytes + 3 * grad_bytes),
    )
