"""A pipeline schedule as a table of actions per rank. `replay` executes it with a clock instead of
a model: each rank takes its actions in order, and each action waits for its input. Imports no
torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from shardwise.parallel.pipeline.actions import Action, Kind

Output = tuple[Kind, int, int]
"""A result that other actions wait for: ("F", stage, microbatch) are the activations of a stage,
("B", stage, microbatch) is the gradient of its input."""

SHORTEST = 1e-12
LONGEST = 1e12


@dataclass(frozen=True)
class Table:
    """The actions of each rank of a pipeline in order, and the rank of each virtual stage. Not
    checked: `validate.validate` proves that a table can run."""

    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    num_microbatches: int

    @property
    def chunks(self) -> float:
        """Virtual stages per rank: a whole number, except in some custom schedules."""
        return len(self.placement) / len(self.ranks)


@dataclass(frozen=True)
class Costs:
    """Times of one whole stage, in any unit. An unsplit backward takes tb + tw. Raises ValueError
    for invalid times.

    Attributes:
        tf: a forward
        tb: the gradient of the input
        tw: the gradient of the weights
        tc: a transfer between ranks
    """

    tf: float = 1.0
    tb: float = 1.0
    tw: float = 1.0
    tc: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            cost = getattr(self, field.name)
            if not (cost == 0 or SHORTEST <= cost <= LONGEST):
                raise ValueError(
                    f"{field.name} must be 0, or from {SHORTEST:g} to {LONGEST:g}, not {cost:g}"
                )
        if self.microbatch <= 0:
            raise ValueError(
                "tf, tb and tw are all 0, so there is nothing to schedule; set one above 0"
            )

    @property
    def microbatch(self) -> float:
        """Time of one micro-batch on one rank."""
        return self.tf + self.tb + self.tw

    def seconds(self, chunks: float = 1) -> Callable[[Action], float]:
        """Return the time of each action where a stage is divided into `chunks` equal parts."""
        stage = {"F": self.tf, "B": self.tb + self.tw, "I": self.tb, "W": self.tw}
        chunk: dict[str, float] = {kind: cost / chunks for kind, cost in stage.items()}
        return lambda action: chunk[action.kind]


EQUAL = Costs()


@dataclass(frozen=True)
class Memory:
    """Limit of the activations that a rank holds, in forwards of a whole stage.

    Attributes:
        limit: the limit, times the number of stages; None: no limit
        mem_w: what a forward counts from I to W, where until B or I it counts 1. These are the
            inputs of the weights' gradients: 32h of 34h + 5as bytes per token where attention
            scores are saved (Qi et al. 2023); 0.28 with h = 4096, a = 32 heads and s = 2048.

    Raises ValueError for a limit that is not above 0, or a `mem_w` outside 0 to 1.
    """

    limit: float | None = None
    mem_w: float = 0.28

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(
                f"a memory limit must be above 0, not {self.limit:g}; 1 is what 1f1b needs"
            )
        if not 0 <= self.mem_w <= 1:
            raise ValueError(
                f"mem_w, the share of a forward held from I to W, must be 0 to 1, not {self.mem_w}"
            )


NO_LIMIT = Memory()


def needed(action: Action, last_stage: int) -> Output | None:
    """Return the output that an action waits for, None for the first forward. Its other inputs are
    there by then: the gradient from the next stage implies the forward of this one."""
    stage = action.stage
    microbatch = action.microbatch
    if action.kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if action.kind == "W":
        return ("B", stage, microbatch)
    return ("B", stage + 1, microbatch) if stage < last_stage else ("F", stage, microbatch)


def replay(
    table: Table, seconds: Callable[[Action], float], transfer_s: float = 0.0
) -> Iterator[tuple[int, Action, float, float]]:
    """Yield (rank, action, start, end) of every action, after the actions that it waits for.

    Ranks keep their order and start each action as soon as they can. A transfer to another rank
    takes `transfer_s` and delays neither rank otherwise. Raises ValueError at the end if ranks wait
    for each other.
    """
    last_stage = len(table.placement) - 1
    placement = table.placement
    position = [0] * len(table.ranks)
    free_at = [0.0] * len(table.ranks)
    ended: dict[Output, float] = {}
    waiting: dict[Output, list[int]] = {}
    ready = list(range(len(table.ranks)))
    while ready:
        rank = ready.pop()
        actions = table.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            source = needed(action, last_stage)
            start = free_at[rank]
            if source is not None:
                if source not in ended:
                    waiting.setdefault(source, []).append(rank)
                    break
                is_remote = placement[source[1]] != rank
                start = max(start, ended[source] + (transfer_s if is_remote else 0.0))
            free_at[rank] = end = start + seconds(action)
            position[rank] += 1
            if action.kind != "W":
                what: Kind = "F" if action.kind == "F" else "B"
                output = what, action.stage, action.microbatch
                ended[output] = end
                ready += waiting.pop(output, ())
            yield rank, action, start, end
    if any(at < len(actions) for at, actions in zip(position, table.ranks, strict=True)):
        raise ValueError(deadlock(table, position))


def deadlock(table: Table, position: Sequence[int]) -> str:
    """Return which rank waits for which, for ranks stuck at these positions."""
    stuck = [rank for rank, actions in enumerate(table.ranks) if position[rank] < len(actions)]
    chain = [stuck[0]]
    waits = list[str]()
    while len(waits) < 3:
        rank = chain[-1]
        at = position[rank]
        source = needed(table.ranks[rank][at], len(table.placement) - 1)
        assert source is not None, "the first forward waits for nothing"
        waits.append(
            f"rank {rank} waits at position {at}, in {table.ranks[rank][at]}, for {Action(*source)}"
        )
        if (owner := table.placement[source[1]]) in chain:
            break
        chain.append(owner)
    return f"deadlock: {', '.join(waits)}; the awaited actions must come earlier"


def held_forwards(actions: Sequence[Action], mem_w: float = 1.0) -> Iterator[float]:
    """Yield what a rank holds after each action, in forwards of a chunk: 1 from F to B or I, and
    `mem_w` from I to W. With `mem_w` = 1 it is the number of forwards in flight."""
    whole = 0
    split = 0
    for action in actions:
        whole += (action.kind == "F") - (action.kind in "BI")
        split += (action.kind == "I") - (action.kind == "W")
        yield whole + split * mem_w


def table_span(table: Table, costs: Costs) -> float:
    """Return the longest time of one rank from its first action to its last."""
    first = [math.inf] * len(table.ranks)
    last = [0.0] * len(table.ranks)
    for rank, _, start, end in replay(table, costs.seconds(table.chunks), costs.tc):
        first[rank] = min(first[rank], start)
        last[rank] = end
    return max(end - start for start, end in zip(first, last, strict=True))
