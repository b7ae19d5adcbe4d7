"""What a rank holds only for a while in a step of training, counted by going through the table that
the run executes.

- whole weights of a unit, from GATHER to FREE (stage 3)
- the whole gradient of a unit, from the backward of the first piece that uses it until its sum is done (stages 2 and 3)
- rows of gradients that arrive from other ranks to be added up: as many buckets as are under way

The store finishes its sums at places that follow from the table alone, so this is what it holds,
byte for byte; where gradients are kept in fp32 a GPU adds them up on the wire, and may hold a
bucket or two less.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

SUM_BYTES = 4  # gradients are summed in fp32


@dataclass(frozen=True)
class Moment:
    """Bytes that are there for a while, at one moment of the action at place `at` of a table."""

    at: int
    weights: int
    gradients: int
    arriving: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.arriving


@dataclass(frozen=True)
class UnitBytes:
    """One unit, whole, as it is computed with: its weights, its gradient, and how the sum of that
    travels."""

    weights: int
    gradients: int
    buckets: tuple[int, ...]
    """Bytes that each bucket of its sum holds while it is under way."""


def buffer_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    sizes: Mapping[str, int],
    weight_bytes: int,
    grad_bytes: int,
) -> int:
    """The most that is there for a while, where units have `sizes` elements. Two micro-batches show
    all that there is between one and the next."""
    if layout.shard == "fsdp":
        return fsdp_bytes(layout, sizes, weight_bytes, grad_bytes)
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
    """Every moment of a step when something came, and one after each action. Sums in `finish`, if
    any, come last."""
    units = {
        unit: UnitBytes(
            size * weight_bytes if layout.cuts("parameters") else 0,
            size * grad_bytes if layout.cuts("gradients") else 0,
            bucket_sizes(layout, size // layout.shard_size, grad_bytes, bucket_bytes),
        )
        for unit, size in sizes.items()
    }
    replay = Replay(units, {piece.name: piece.units for piece in pieces}, overlap)
    for at, action in enumerate(table):
        for _ in replay.execute(action):
            yield replay.moment(at)
        yield replay.moment(at)
    if (
        layout.data_size > layout.shard_size and grad_bytes < SUM_BYTES
    ):  # `finish` sums over groups, a bucket at a time
        at_most = bucket_elements(layout, grad_bytes, bucket_bytes)
        largest = max(min(size // layout.shard_size, at_most) for size in sizes.values())
        yield Moment(len(table), 0, 0, largest * grad_bytes)


def bucket_sizes(
    layout: Layout, shard_elements: int, grad_bytes: int, bucket_bytes: int
) -> tuple[int, ...]:
    """Bytes that each bucket of a unit's sum holds while it is under way, beside the gradient
    itself: what arrives and, where a bucket is not all of the unit, a copy of what is sent. Equal
    ones beyond what can be under way are left out."""
    at_most = bucket_elements(layout, grad_bytes, bucket_bytes)
    full, rest = divmod(shard_elements, at_most)
    elements = [at_most] * min(full, IN_FLIGHT + 1) + ([rest] if rest else [])
    if layout.shard_size > 1:
        copies = 1 + (len(elements) > 1)
    else:  # nothing to scatter: all is summed in place, in two halves if the sum has another dtype
        copies = int(
            grad_bytes < SUM_BYTES and layout.data_size > 1 and not layout.cuts("gradients")
        )
    return tuple(each * layout.shard_size * grad_bytes * copies for each in elements)


class Replay:
    """Does to sizes what the store of a run does to buffers."""

    def __init__(
        self, units: Mapping[str, UnitBytes], uses: Mapping[str, tuple[str, ...]], overlap: bool
    ) -> None:
        self.units = units
        self.uses = uses
        self.overlap = overlap
        self.weights = self.gradients = self.arriving = 0
        self.begun: set[str] = set()
        """Units whose gradient has had a contribution that is not in a sum yet."""
        self.sums: deque[tuple[str, int, bool]] = deque()
        """(unit, bytes, whether it is the unit's last) of each bucket under way."""

    def moment(self, at: int) -> Moment:
        return Moment(at, self.weights, self.gradients, self.arriving)

    def execute(self, action: Action) -> Iterator[None]:
        """Do one action; yields whenever something has come."""
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
        if unit not in self.begun:
            while any(other == unit for other, _, _ in self.sums):
                self.advance()
            self.gradients += self.units[unit].gradients
            self.begun.add(unit)

    def reduce(self, unit: str) -> Iterator[None]:
        self.begun.discard(unit)
        buckets = self.units[unit].buckets
        for at, size in enumerate(buckets):
            while len(self.sums) >= IN_FLIGHT:
                self.advance()
            self.sums.append((unit, size, at == len(buckets) - 1))
            self.arriving += size
            yield
            while self.sums and not self.overlap:
                self.advance()

    def advance(self) -> None:
        unit, size, is_last = self.sums.popleft()
        self.arriving -= size
        if is_last:
            self.gradients -= self.units[unit].gradients


def fsdp_bytes(layout: Layout, sizes: Mapping[str, int], weight_bytes: int, grad_bytes: int) -> int:
    """About what FSDP holds for a while, which PyTorch decides and no table says: at a block's
    backward the weights of the root, of two blocks (of all with `keep`) and of one more as it
    arrives; the gradients of the root and of the block; and that block's again as it is sent and as
    it arrives. Or at the end the same of the root alone."""
    blocks = [size for unit, size in sizes.items() if unit.startswith("blocks.")]
    root = sum(sizes.values()) - sum(blocks)
    block = max(blocks)
    whole = root + (sum(blocks) if layout.keep else min(2, len(blocks)) * block) + block
    return max(
        whole * weight_bytes + (root + 3 * block) * grad_bytes,
        root * (weight_bytes + 3 * grad_bytes),
    )
