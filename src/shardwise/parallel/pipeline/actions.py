"""What each rank does in one step, as data: a table of actions that the executor obeys, the planner
prices and tests check. Nothing here runs anything, or imports torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.params import stage_layers

Kind = Literal["F", "B", "I", "W", "SEND", "RECV", "GATHER", "FREE", "REDUCE"]

BUCKET_BYTES = 64 << 20
"""A unit's gradient travels in buckets of at most this size."""
IN_FLIGHT = 2
"""Reductions under way at a time: one on the wire, one whose rows are added up meanwhile."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do. F and B are a forward and a backward of one micro-batch, I and W the halves
    of a split B: the gradient of the input, and that of the weights (Qi et al. 2023, who call I the
    B). As scheduled they are of a whole virtual `stage`, of which a rank has one per chunk; once
    lowered of one `piece` of it.

    RECV starts to take what a stage works on from the rank beside it, SEND to give it what was
    made: `piece` says of which, F (activations, to the next stage) or B (their gradient, to the one
    before). GATHER starts to collect a unit's weights from the ranks that share it, FREE gives back
    what was collected, REDUCE starts the sum of its gradient over the data ranks.
    """

    kind: Kind
    stage: int
    microbatch: int = 0
    piece: str = ""
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit or self.microbatch}{':' + self.piece if self.piece else ''}"


@dataclass(frozen=True)
class Piece:
    """A piece of compute, and the units of state whose weights it uses. A piece that only looks
    rows up has a backward that does not read its weights. One `at_once` works its gradients out on
    the way forward, as the loss does, which keeps no logits."""

    name: str
    units: tuple[str, ...]
    looks_up: bool = False
    at_once: bool = False

    def reads(self, kind: Kind) -> tuple[str, ...]:
        """The units whose weights an action of this piece reads. W multiplies what F and I left,
        and reads none."""
        return () if kind == "W" or (kind in "BI" and self.looks_up) else self.units


def model_pieces(config: ModelConfig) -> tuple[Piece, ...]:
    """Embedding, each block, head, in the order of the forward. A tied head uses the embedding's
    unit as well."""
    embed = ("embed", "positions") if config.positions == "learned" else ("embed",)
    blocks = (Piece(f"blocks.{layer}", (f"blocks.{layer}",)) for layer in range(config.num_layers))
    head = ("final", "embed") if config.tied else ("final",)
    return (Piece("embed", embed, looks_up=True), *blocks, Piece("head", head, at_once=True))


def stage_pieces(config: ModelConfig, layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each virtual stage, in order."""
    first, *blocks, last = model_pieces(config)
    stages = [[blocks[layer] for layer in layers] for layers in stage_layers(config, layout)]
    stages[0].insert(0, first)
    stages[-1].append(last)
    return tuple(map(tuple, stages))


def rank_pieces(stages: Sequence[Sequence[Piece]], layout: Layout, rank: int) -> tuple[Piece, ...]:
    """The pieces of all virtual stages of a pipeline rank: every pp-th is its own."""
    return tuple(piece for stage in stages[rank :: layout.pp] for piece in stage)


def accumulate(microbatches: int) -> list[Action]:
    """The schedule of a single stage: F0 B0 F1 B1 ... so that one micro-batch's activations live at
    a time."""
    return [
        Action(kind, 0, microbatch) for microbatch in range(microbatches) for kind in ("F", "B")
    ]


def lower(
    actions: Sequence[Action],
    stages: Sequence[Sequence[Piece]],
    layout: Layout,
    overlap: bool = True,
) -> list[Action]:
    """The table of one rank: each action of a virtual stage split into the pieces of that stage,
    with what comes from and goes to other stages around them, and what happens to units of state
    between.

    REDUCE follows a unit's last contribution: of the step where full gradients are kept (no ZeRO,
    stage 1), of each micro-batch where they are cut (stages 2 and 3). GATHER comes before a unit's
    first use, once a step in stages 1 and 2; in stage 3 a unit is given back after each use that
    the next action does not share, with `keep` once no micro-batch that has used it is to come
    back. With `overlap` each GATHER and RECV starts one action early, to run beside that one.

    In a pipeline a piece that does all its work at once does it in its backward, and has no F:
    between the two it would keep its gradients, and other stages wait for what they need not.
    """
    of = {piece.name: piece for stage in stages for piece in stage}
    trains = any(action.kind != "F" for action in actions)
    later = {piece.name for piece in of.values() if piece.at_once and trains and len(stages) > 1}
    split = [
        [
            replace(action, piece=piece.name)
            for piece in in_order(action, stages)
            if not (action.kind == "F" and piece.name in later)
        ]
        for action in actions
    ]
    compute = [action for pieces in split for action in pieces]
    before: list[list[Action]] = [[] for _ in compute]
    after: list[list[Action]] = [[] for _ in compute]
    at = 0
    for action, pieces in zip(actions, split, strict=True):
        last = at + len(pieces) - 1
        received, sent = transfers(action, len(stages))
        if received is not None:
            before[max(0, at - 1) if overlap else at].append(received)
        if sent is not None:
            after[last].append(sent)
        at = last + 1
    for place, reductions in enumerate(reduced_after(compute, of, each=layout.cuts("gradients"))):
        after[place] += reductions
    if layout.cuts("optimizer"):
        for at, until, unit in residencies(compute, of, layout):
            early = max(0, at - 1) if overlap else at
            before[early].append(
                Action("GATHER", compute[at].stage, compute[at].microbatch, unit=unit)
            )
            if layout.cuts("parameters"):
                after[until].append(
                    Action("FREE", compute[until].stage, compute[until].microbatch, unit=unit)
                )
    return [each for at, action in enumerate(compute) for each in (*before[at], action, *after[at])]


def in_order(action: Action, stages: Sequence[Sequence[Piece]]) -> Sequence[Piece]:
    """A forward goes up through its stage, everything else down."""
    pieces = stages[action.stage]
    return pieces if action.kind == "F" else pieces[::-1]


def transfers(action: Action, num_stages: int) -> tuple[Action | None, Action | None]:
    """What an action of a stage takes from the stage beside it, and what it gives to the one on the
    other side."""
    stage = action.stage
    microbatch = action.microbatch
    last = num_stages - 1
    if action.kind == "W":
        return None, None
    comes, goes = (stage > 0, stage < last) if action.kind == "F" else (stage < last, stage > 0)
    what = "F" if action.kind == "F" else "B"
    received = Action("RECV", stage, microbatch, what) if comes else None
    return received, Action("SEND", stage, microbatch, what) if goes else None


def reduced_after(
    compute: Sequence[Action], of: Mapping[str, Piece], each: bool
) -> Iterator[list[Action]]:
    """For every action the REDUCEs that follow it; `each`: one a micro-batch, else one a step."""

    def key(action: Action, unit: str) -> tuple[str, int]:
        return unit, action.microbatch if each else 0

    giving = [(at, action) for at, action in enumerate(compute) if action.kind in "BW"]
    last = {key(action, unit): at for at, action in giving for unit in of[action.piece].units}
    for at, action in enumerate(compute):
        done = [
            unit
            for unit in of[action.piece].units
            if action.kind in "BW" and last[key(action, unit)] == at
        ]
        yield [Action("REDUCE", action.stage, action.microbatch, unit=unit) for unit in done]


def residencies(
    compute: Sequence[Action], of: Mapping[str, Piece], layout: Layout
) -> Iterator[tuple[int, int, str]]:
    """(first, last, unit): the stretches of actions during which the weights of a cut unit are
    whole, in order."""
    uses: dict[str, list[int]] = {}
    for at, action in enumerate(compute):
        for unit in of[action.piece].reads(action.kind):
            uses.setdefault(unit, []).append(at)
    stretches = []
    for unit, places in uses.items():
        last = {compute[at].microbatch: at for at in places}
        first = places[0]
        awaited = 0
        for at, following in zip(places, [*places[1:], None], strict=True):
            awaited = max(awaited, last[compute[at].microbatch])
            if following is None or not stays(following == at + 1, awaited > at, layout):
                stretches.append((first, at, unit))
                first = following if following is not None else first
    yield from sorted(
        stretches, key=lambda stretch: stretch[0]
    )  # stable: by piece and its units where several begin


def stays(adjacent: bool, awaited: bool, layout: Layout) -> bool:
    """Whether a unit stays whole from one use to the next: they may be side by side, and a
    micro-batch that has used it may be going to come back."""
    return not layout.cuts("parameters") or adjacent or (layout.keep and awaited)


def bucket_elements(layout: Layout, element_bytes: int, bucket_bytes: int) -> int:
    """How much of every rank's shard makes up, over all of them, a bucket of at most
    `bucket_bytes`; such that the groups of hybrid sharding can share its sum."""
    groups = layout.data_size // layout.shard_size
    return max(1, bucket_bytes // element_bytes // layout.data_size) * groups
