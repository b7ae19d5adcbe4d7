"""Proof that a table can run: complete, in order, on the right ranks, free of deadlock and within
its memory limit. Errors name one action, with its rank and its position there; all numbers count
from 0."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import Action, Kind
from shardwise.parallel.pipeline.table import NO_LIMIT, Memory, Table, held_forwards, replay

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
Positions = dict[tuple[Kind, int, int], tuple[int, int]]
"""(rank, position) of each (kind, stage, microbatch)."""


def validate(table: Table, memory: Memory = NO_LIMIT) -> None:
    """Raise ValueError with the first reason why a table cannot run.

    Every micro-batch must pass once through F, and B or I and W, of every stage, on the rank of
    that stage, in an order without deadlock; and no rank may hold more than `memory` allows.
    """
    positions = action_positions(table)
    for stage, rank in enumerate(table.placement):
        for microbatch in range(table.num_microbatches):
            validate_complete(positions, stage, microbatch, rank)
    deque(replay(table, lambda action: 1.0), maxlen=0)
    if memory.limit is not None:
        for rank, actions in enumerate(table.ranks):
            validate_within(actions, rank, memory.limit * len(table.placement), memory.mem_w)


def validate_for(layout: Layout, table: Table) -> None:
    """Raise ValueError if a custom table cannot run, or if its sizes are not those of `layout`."""
    validate(table)
    placement = tuple(stage % layout.pp for stage in range(layout.pp * layout.chunks))
    for what, number, expected in (
        ("ranks", len(table.ranks), layout.pp),
        ("stages", len(table.placement), len(placement)),
        ("micro-batches", table.num_microbatches, layout.microbatches),
    ):
        if number != expected:
            raise ValueError(
                f"the schedule has {number} {what}, but layout {layout} has {expected}; "
                "change one of them"
            )
    if table.placement != placement:
        raise ValueError(
            f"the schedule has stages on ranks {table.placement}, but training has them on "
            f"{placement}"
        )


def action_positions(table: Table) -> Positions:
    """Return where each action is. Raises ValueError for an action that is not compute, appears
    twice, or is on another rank than its stage."""
    positions: Positions = {}
    for rank, actions in enumerate(table.ranks):
        for position, action in enumerate(actions):
            here = f"rank {rank}, position {position}: {action}"
            validate_action(action, rank, here, table)
            key = action.kind, action.stage, action.microbatch
            if key in positions:
                raise ValueError(
                    f"{here} appears again, after position {positions[key][1]}; it must appear once"
                )
            positions[key] = rank, position
    return positions


def validate_action(action: Action, rank: int, here: str, table: Table) -> None:
    """Raise ValueError if an action cannot be on this rank of the table."""
    if action.kind not in KINDS or action.piece or action.unit:
        raise ValueError(f"{here} is not one of {', '.join(KINDS)}, which make up a schedule")
    if not 0 <= action.stage < len(table.placement):
        last = len(table.placement) - 1
        raise ValueError(f"{here} has a stage that does not exist; stages are 0 to {last}")
    if not 0 <= action.microbatch < table.num_microbatches:
        last = table.num_microbatches - 1
        raise ValueError(
            f"{here} has a micro-batch that does not exist; micro-batches are 0 to {last}"
        )
    owner = table.placement[action.stage]
    if owner != rank:
        raise ValueError(f"{here} is on the wrong rank; stage {action.stage} is on rank {owner}")


def validate_complete(positions: Positions, stage: int, microbatch: int, rank: int) -> None:
    """Raise ValueError unless a micro-batch has F, then B or I, then W, in a stage."""

    def name(kind: Kind) -> str:
        return str(Action(kind, stage, microbatch))

    at = {kind: found[1] for kind in KINDS if (found := positions.get((kind, stage, microbatch)))}
    if "F" not in at:
        raise ValueError(
            f"rank {rank} has no {name('F')}; every micro-batch must pass through every stage"
        )
    if "B" in at and len(at) > 2:
        other: Kind = "I" if "I" in at else "W"
        here = f"rank {rank}, position {at['B']}: {name('B')}"
        raise ValueError(
            f"{here} comes in addition to {name(other)}; a backward is either B, or I and W"
        )
    if "B" not in at and "I" not in at:
        raise ValueError(
            f"rank {rank} has neither {name('B')} nor {name('I')}: {name('F')} has no backward"
        )
    if "I" in at and "W" not in at:
        here = f"rank {rank}, position {at['I']}: {name('I')}"
        raise ValueError(f"{here} has no {name('W')} on its rank; it needs one")
    for (before, earlier), (after, later) in pairwise(at.items()):
        if later < earlier:
            here = f"rank {rank}, position {later}: {name(after)}"
            raise ValueError(f"{here} is before {name(before)}, which is at position {earlier}")


def validate_within(actions: Sequence[Action], rank: int, limit: float, mem_w: float) -> None:
    """Raise ValueError if a rank holds more than `limit` forwards of a chunk."""
    for position, forwards in enumerate(held_forwards(actions, mem_w)):
        if forwards > limit + 1e-6:
            here = f"rank {rank}, position {position}: {actions[position]}"
            raise ValueError(
                f"{here} makes it hold {forwards:.6g} forwards, above the limit of {limit:.6g}; "
                "zb-auto stays within a limit"
            )
