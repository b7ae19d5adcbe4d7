"""Whether a table can run: complete, in order, on the right ranks, free of deadlock, within its
memory. What is wrong is said of one action, with its rank and its position there; both count from
0, as stages and micro-batches do."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from shardwise.parallel.pipeline.actions import Action, Kind
from shardwise.parallel.pipeline.table import NO_LIMIT, Memory, Table, held, replay

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
Places = dict[tuple[Kind, int, int], tuple[int, int]]
"""(rank, position) of each (kind, stage, microbatch)."""


def validate(table: Table, memory: Memory = NO_LIMIT) -> None:
    """Raises ValueError with the first thing that keeps a table from running as it should: every
    micro-batch goes once through F, and B or I and W, of every stage; on the rank of that stage; in
    an order in which nobody waits for ever; and no rank holds more than `memory` allows."""
    places = found(table)
    for stage, rank in enumerate(table.placement):
        for microbatch in range(table.num_microbatches):
            validate_complete(places, stage, microbatch, rank)
    deque(replay(table, lambda action: 1.0), maxlen=0)
    if memory.limit is not None:
        for rank, actions in enumerate(table.ranks):
            validate_within(actions, rank, memory.limit * len(table.placement), memory.mem_w)


def found(table: Table) -> Places:
    """Where each action is; each is one of compute, there once, and on the rank of its stage."""
    places: Places = {}
    for rank, actions in enumerate(table.ranks):
        for position, action in enumerate(actions):
            here = f"rank {rank}, position {position}: {action}"
            if action.kind not in KINDS or action.piece or action.unit:
                raise ValueError(
                    f"{here} is none of {', '.join(KINDS)}, of which a schedule is made"
                )
            if not 0 <= action.stage < len(table.placement):
                raise ValueError(
                    f"{here} is of a stage that is not there; stages are 0 to {len(table.placement) - 1}"
                )
            if not 0 <= action.microbatch < table.num_microbatches:
                raise ValueError(
                    f"{here} is of a micro-batch beyond the {table.num_microbatches} that there are"
                )
            if (owner := table.placement[action.stage]) != rank:
                raise ValueError(
                    f"{here} is on the wrong rank; stage {action.stage} is on rank {owner}"
                )
            key = action.kind, action.stage, action.microbatch
            if key in places:
                raise ValueError(
                    f"{here} is there already, at position {places[key][1]}; once is enough"
                )
            places[key] = rank, position
    return places


def validate_complete(places: Places, stage: int, microbatch: int, rank: int) -> None:
    """One micro-batch in one stage: F, then B or I, then W."""

    def name(kind: Kind) -> str:
        return str(Action(kind, stage, microbatch))

    at = {kind: place[1] for kind in KINDS if (place := places.get((kind, stage, microbatch)))}
    if "F" not in at:
        raise ValueError(
            f"rank {rank} has no {name('F')}; every micro-batch goes through every stage"
        )
    if "B" in at and len(at) > 2:
        other: Kind = "I" if "I" in at else "W"
        here = f"rank {rank}, position {at['B']}: {name('B')}"
        raise ValueError(f"{here} is beside {name(other)}; a backward is whole, or an I and a W")
    if "B" not in at and "I" not in at:
        raise ValueError(
            f"rank {rank} has neither {name('B')} nor {name('I')}, so no backward of {name('F')}"
        )
    if "I" in at and "W" not in at:
        raise ValueError(
            f"rank {rank}, position {at['I']}: {name('I')} has no {name('W')} on its rank; it needs one"
        )
    for (before, earlier), (after, later) in pairwise(at.items()):
        if later < earlier:
            here = f"rank {rank}, position {later}: {name(after)}"
            raise ValueError(f"{here} is before {name(before)}, which is at position {earlier}")


def validate_within(actions: Sequence[Action], rank: int, limit: float, mem_w: float) -> None:
    """In forwards of a chunk."""
    for position, forwards in enumerate(held(actions, mem_w)):
        if forwards > limit + 1e-6:
            here = f"rank {rank}, position {position}: with {actions[position]}"
            raise ValueError(
                f"{here} it holds {forwards:.6g} forwards, of {limit:.6g}; zb-auto stays within a limit"
            )
