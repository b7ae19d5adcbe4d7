"""Actions of one rank in one step, as data: a table that the executor runs, the planner prices and
tests check. Nothing here executes anything, or imports torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.params import block_unit, stage_layers

Kind = Literal["F", "B", "I", "W", "SEND", "RECV", "GATHER", "FREE", "REDUCE"]

BUCKET_BYTES = 64 << 20
"""Gradients of a unit are reduced in buckets of at most this size."""
IN_FLIGHT = 2
"""Reductions in flight at a time: one is sent while the rows of another are added up."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    F and B are the forward and backward of one micro-batch. I and W are the halves of a split B:
    the gradient of the input, and that of the weights (Qi et al. 2023, who call I the B). In a
    schedule they apply to a whole virtual `stage`, of which a rank has one per chunk; in a lowered
    table, to one `piece` of it.

    RECV starts to receive the input of a stage from its neighbour, and SEND starts to send its
    output to the other one. Their `piece` is F for activations, which go to the next stage, or B
    for gradients, which go to the previous one. GATHER starts to collect the weights of a unit from
    the ranks that share it, FREE releases them, and REDUCE starts to sum its gradient over the data
    ranks.
    """

    kind: Kind
    stage: int
    microbatch: int = 0
    piece: str = ""
    unit: str = ""

    def __str__(self) -> str:
        piece = f":{self.piece}" if self.piece else ""
        return f"{self.stage}{self.kind}{self.unit or self.microbatch}{piece}"


@dataclass(frozen=True)
class Piece:
    """A part of a stage that runs at once, and the units of state whose weights it uses.

    Attributes:
        looks_up: the piece only looks rows up, so its backward does not read its weights
        fused_backward: the forward also computes the gradients, as that of the loss does, which
            stores no logits
    """

    name: str
    units: tuple[str, ...]
    looks_up: bool = False
    fused_backward: bool = False

    def reads(self, kind: Kind) -> tuple[str, ...]:
        """Return the units whose weights an action of this piece reads. W multiplies what F and I
        saved, and reads none."""
        return () if kind == "W" or (kind in "BI" and self.looks_up) else self.units


def model_pieces(config: ModelConfig) -> tuple[Piece, ...]:
    """Return the pieces of a model in the order of the forward: embedding, each block, head. A tied
    head also uses the unit of the embedding."""
    embed = ("embed", "positions") if config.positions == "learned" else ("embed",)
    blocks = (Piece(unit, (unit,)) for unit in map(block_unit, range(config.num_layers)))
    head = ("final", "embed") if config.tied else ("final",)
    return (Piece("embed", embed, looks_up=True), *blocks, Piece("head", head, fused_backward=True))


def stage_pieces(config: ModelConfig, layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each virtual stage, in order."""
    first, *blocks, last = model_pieces(config)
    stages = [[blocks[layer] for layer in layers] for layers in stage_layers(config, layout)]
    stages[0].insert(0, first)
    stages[-1].append(last)
    return tuple(map(tuple, stages))


def rank_pieces(stages: Sequence[Sequence[Piece]], layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return the pieces of a pipeline rank, which has every pp-th virtual stage."""
    return tuple(piece for stage in stages[rank :: layout.pp] for piece in stage)


def accumulate(microbatches: int) -> list[Action]:
    """Return the schedule of a single stage: F0 B0 F1 B1 ..., so that the activations of one
    micro-batch are alive at a time."""
    return [
        Action(kind, 0, microbatch) for microbatch in range(microbatches) for kind in ("F", "B")
    ]


# -- lowering
# -----------------------------------------------------------------------------------------------


def lower(
    actions: Sequence[Action],
    stages: Sequence[Sequence[Piece]],
    layout: Layout,
    overlap: bool = True,
) -> list[Action]:
    """Return the table of one rank: each action of a virtual stage split into the pieces of that
    stage, with transfers to other stages and the actions on units of state inserted.

    REDUCE follows the last contribution to a unit: in the step if full gradients are stored (no
    ZeRO, stage 1), in each micro-batch if they are sharded (stages 2 and 3). GATHER precedes the
    first use of a unit, once per step in stages 1 and 2. In stage 3 a unit is freed after each use
    that the next action does not share; with `keep`, after its last use by the micro-batches in
    flight. With `overlap`, each GATHER and RECV starts one action early, to run at the same time.

    In a pipeline, a piece with a fused backward runs in B and has no F. Running in F, it would hold
    its gradients until B, and delay other stages that need no result of it.
    """
    pieces = {piece.name: piece for stage in stages for piece in stage}
    split = split_actions(actions, stages)
    compute = [action for of_stage in split for action in of_stage]
    before: list[list[Action]] = [[] for _ in compute]
    after: list[list[Action]] = [[] for _ in compute]
    first = 0
    for action, of_stage in zip(actions, split, strict=True):
        last = first + len(of_stage) - 1
        received, sent = transfers(action, len(stages))
        if received is not None:
            before[max(0, first - 1) if overlap else first].append(received)
        if sent is not None:
            after[last].append(sent)
        first = last + 1
    per_microbatch = layout.shards("gradients")
    for index, reductions in enumerate(reductions_after(compute, pieces, per_microbatch)):
        after[index] += reductions
    if layout.shards("optimizer"):
        for first, last, unit in residencies(compute, pieces, layout):
            early = max(0, first - 1) if overlap else first
            before[early].append(on_unit("GATHER", compute[first], unit))
            if layout.shards("parameters"):
                after[last].append(on_unit("FREE", compute[last], unit))
    return [
        each
        for index, action in enumerate(compute)
        for each in (*before[index], action, *after[index])
    ]


def split_actions(
    actions: Sequence[Action], stages: Sequence[Sequence[Piece]]
) -> list[list[Action]]:
    """Return each action of a virtual stage as actions of its pieces, in the order in which they
    run."""
    trains = any(action.kind != "F" for action in actions)
    skips_forward = {
        piece.name
        for stage in stages
        for piece in stage
        if piece.fused_backward and trains and len(stages) > 1
    }
    return [
        [
            replace(action, piece=piece.name)
            for piece in ordered_pieces(action, stages)
            if not (action.kind == "F" and piece.name in skips_forward)
        ]
        for action in actions
    ]


def ordered_pieces(action: Action, stages: Sequence[Sequence[Piece]]) -> Sequence[Piece]:
    """Return the pieces of an action's stage: up for a forward, down for everything else."""
    pieces = stages[action.stage]
    return pieces if action.kind == "F" else pieces[::-1]


def on_unit(kind: Kind, action: Action, unit: str) -> Action:
    """Return the action on a unit that belongs to a compute action."""
    return Action(kind, action.stage, action.microbatch, unit=unit)


def transfers(action: Action, num_stages: int) -> tuple[Action | None, Action | None]:
    """Return the RECV before and the SEND after an action of a stage; None where the stage has no
    neighbour."""
    stage = action.stage
    microbatch = action.microbatch
    last = num_stages - 1
    if action.kind == "W":
        return None, None
    forward = action.kind == "F"
    receives, sends = (stage > 0, stage < last) if forward else (stage < last, stage > 0)
    what = "F" if forward else "B"
    received = Action("RECV", stage, microbatch, what) if receives else None
    return received, Action("SEND", stage, microbatch, what) if sends else None


def reductions_after(
    compute: Sequence[Action], pieces: Mapping[str, Piece], per_microbatch: bool
) -> Iterator[list[Action]]:
    """Yield the REDUCEs that follow each action: one per unit and micro-batch, or one per unit and
    step."""

    def key(action: Action, unit: str) -> tuple[str, int]:
        return unit, action.microbatch if per_microbatch else 0

    last = {
        key(action, unit): index
        for index, action in enumerate(compute)
        if action.kind in "BW"
        for unit in pieces[action.piece].units
    }
    for index, action in enumerate(compute):
        yield [
            on_unit("REDUCE", action, unit)
            for unit in pieces[action.piece].units
            if action.kind in "BW" and last[key(action, unit)] == index
        ]


def residencies(
    compute: Sequence[Action], pieces: Mapping[str, Piece], layout: Layout
) -> Iterator[tuple[int, int, str]]:
    """Yield (first, last, unit) in order: the ranges of actions during which the weights of a
    sharded unit are gathered."""
    uses: dict[str, list[int]] = {}
    for index, action in enumerate(compute):
        for unit in pieces[action.piece].reads(action.kind):
            uses.setdefault(unit, []).append(index)
    ranges = []
    for unit, indices in uses.items():
        last_use = {compute[index].microbatch: index for index in indices}
        first = indices[0]
        needed_until = 0
        for index, following in zip(indices, [*indices[1:], None], strict=True):
            needed_until = max(needed_until, last_use[compute[index].microbatch])
            adjacent = following == index + 1
            if following is None or not stays_gathered(adjacent, needed_until > index, layout):
                ranges.append((first, index, unit))
                first = following if following is not None else first
    # The sort is stable: by piece and its units where several begin.
    yield from sorted(ranges, key=lambda each: each[0])


def stays_gathered(adjacent: bool, used_again: bool, layout: Layout) -> bool:
    """Return whether a unit stays gathered between two uses: they may be `adjacent`, or a
    micro-batch that has used it may use it again."""
    return not layout.shards("parameters") or adjacent or (layout.keep and used_again)


def bucket_elements(
    num_shards: int, num_replicas: int, element_bytes: int, bucket_bytes: int
) -> int:
    """Return how many elements of each shard of a unit are summed at a time: those of all shards
    are a bucket of at most `bucket_bytes`. It divides among the replicas, which share its sum."""
    ranks = num_shards * num_replicas
    return max(1, bucket_bytes // element_bytes // ranks) * num_replicas
