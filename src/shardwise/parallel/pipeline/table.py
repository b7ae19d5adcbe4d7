"""A pipeline schedule as a table: what every rank does, in which order. To replay it is to execute
it with a clock in the place of a model: each rank takes its actions in order, and each action waits
for its input. Imports no torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from shardwise.parallel.pipeline.actions import Action, Kind

Output = tuple[Kind, int, int]
"""What an action leaves to others: ("F", stage, microbatch) its activations, ("B", ...) the
gradient of its input."""

SHORTEST = 1e-12
LONGEST = 1e12


@dataclass(frozen=True)
class Table:
    """The actions of each rank of a pipeline in order, and the rank of each virtual stage. Nothing
    here is checked: that a table can run is proven by `validate.validate`."""

    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    num_microbatches: int

    @property
    def chunks(self) -> float:
        """Virtual stages a rank, which are whole numbers in every schedule but a user's own."""
        return len(self.placement) / len(self.ranks)


@dataclass(frozen=True)
class Costs:
    """How long one whole stage takes, in any unit of time: a forward, the gradient of its input,
    that of its weights, and a transfer between ranks. A backward that is not split takes tb + tw.
    Raises ValueError for what is no time."""

    tf: float = 1.0
    tb: float = 1.0
    tw: float = 1.0
    tc: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            cost = getattr(self, field.name)
            if not (cost == 0 or SHORTEST <= cost <= LONGEST):
                raise ValueError(
                    f"{field.name} must be 0, or a time from {SHORTEST:g} to {LONGEST:g}, not {cost:g}"
                )
        if self.microbatch <= 0:
            raise ValueError(
                "tf, tb and tw are all 0, so there is nothing to schedule; one above 0 works"
            )

    @property
    def microbatch(self) -> float:
        """The work of one micro-batch on one rank."""
        return self.tf + self.tb + self.tw

    def seconds(self, chunks: float = 1) -> Callable[[Action], float]:
        """What each action takes where a rank has that many chunks of a stage: a chunk takes its
        part of the whole."""
        whole = {"F": self.tf, "B": self.tb + self.tw, "I": self.tb, "W": self.tw}
        each: dict[str, float] = {kind: cost / chunks for kind, cost in whole.items()}
        return lambda action: each[action.kind]


EQUAL = Costs()


@dataclass(frozen=True)
class Memory:
    """What activations a rank may hold: `limit` times the number of stages, in forwards of a whole
    stage, or no limit. A forward counts 1 up to its B or I, and from I to W `mem_w`: what the
    weights' gradients are made of, 32h of 34h + 5as bytes a token where scores of attention are
    kept (Qi et al. 2023), 0.28 with h 4096, a 32 heads and s 2048. Raises ValueError for what
    nothing can hold."""

    limit: float | None = None
    mem_w: float = 0.28

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(
                f"a memory limit must be above 0, not {self.limit:g}; 1 is what 1f1b needs"
            )
        if not 0 <= self.mem_w <= 1:
            raise ValueError(
                f"what is held between I and W must be 0 to 1 of a forward, not {self.mem_w:g}"
            )


NO_LIMIT = Memory()


def needed(action: Action, last_stage: int) -> Output | None:
    """The output that an action waits for, None for the first forward. What else it uses was waited
    for before: where the gradient of the next stage's input is there, so is the forward of this
    one."""
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
    """(rank, action, start, end) of every action, each after what it waits for: ranks keep their
    order and start as soon as they can, and a transfer to another rank takes `transfer_s` without
    holding either up. Raises ValueError at the end if ranks are left that wait for each other."""
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
                start = max(
                    start, ended[source] + (transfer_s if placement[source[1]] != rank else 0.0)
                )
            free_at[rank] = end = start + seconds(action)
            position[rank] += 1
            if action.kind != "W":
                output: Output = (
                    "F" if action.kind == "F" else "B",
                    action.stage,
                    action.microbatch,
                )
                ended[output] = end
                ready += waiting.pop(output, ())
            yield rank, action, start, end
    if any(at < len(actions) for at, actions in zip(position, table.ranks, strict=True)):
        raise ValueError(deadlock(table, position))


def deadlock(table: Table, position: Sequence[int]) -> str:
    """Who waits for whom, of the ranks that stand at these positions."""
    stuck = [rank for rank, actions in enumerate(table.ranks) if position[rank] < len(actions)]
    chain = [stuck[0]]
    waits = list[str]()
    while len(waits) < 3:
        rank = chain[-1]
        at = position[rank]
        source = needed(table.ranks[rank][at], len(table.placement) - 1)
        assert source is not None, "the first forward waits for nothing"
        waits.append(
            f"rank {rank} waits at position {at}, with {table.ranks[rank][at]}, for {Action(*source)}"
        )
        if (owner := table.placement[source[1]]) in chain:
            break
        chain.append(owner)
    return f"no rank can go on: {', '.join(waits)}; what is waited for must come earlier"


def held(actions: Sequence[Action], mem_w: float = 1.0) -> Iterator[float]:
    """What a rank holds after each action, in forwards of a chunk: each from its F to its B, or to
    its I and from there `mem_w` of it to its W. With 1 it is the number of forwards in flight."""
    whole = 0
    split = 0
    for action in actions:
        whole += (action.kind == "F") - (action.kind in "BI")
        split += (action.kind == "I") - (action.kind == "W")
        yield whole + split * mem_w


def table_span(table: Table, costs: Costs) -> float:
    """The longest time of one rank from its first action to its last."""
    first = [math.inf] * len(table.ranks)
    last = [0.0] * len(table.ranks)
    for rank, _, start, end in replay(table, costs.seconds(table.chunks), costs.tc):
        first[rank] = min(first[rank], start)
        last[rank] = end
    return max(end - start for start, end in zip(first, last, strict=True))
