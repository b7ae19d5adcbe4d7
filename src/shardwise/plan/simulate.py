"""How long a schedule takes: its table replayed with a clock, and from that the bubble, in the ways
it is counted."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Table, held, replay


@dataclass(frozen=True)
class Timeline:
    """When each action of a table starts and ends, by rank and position, in the unit of the costs.

    `work` is what the rank with most to do takes for its actions alone. A span is the time of a
    rank from its first action to its last; the bubble is what the longest span has beyond the work.
    """

    table: Table
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    work: float

    @property
    def span(self) -> float:
        return max(
            ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def makespan(self) -> float:
        """From the first action of all to the last."""
        return max(ends[-1] for ends in self.ends)

    @property
    def bubble_fraction(self) -> float:
        """Of the longest span, as the zero-bubble papers count it: (p - 1) / (m + p - 1) for GPipe
        and 1F1B."""
        return beyond(self.work, self.span) / self.span if self.span else 0.0

    @property
    def idle_fraction(self) -> float:
        """Of the makespan, in which a rank also waits for its first input, and for the others at
        the end."""
        return beyond(self.work, self.makespan) / self.makespan if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """What the bubble adds to the work, as Narayanan et al. 2021 count it: (p - 1) / m for
        GPipe and 1F1B."""
        return beyond(self.work, self.span) / self.work if self.work else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """By rank, the most chunk forwards whose B, or W, is still to come."""
        return tuple(round(max(held(actions))) for actions in self.table.ranks)


def beyond(work: float, time: float) -> float:
    """What a time has beyond the work in it; nothing where they differ by rounding."""
    return 0.0 if math.isclose(work, time, rel_tol=1e-9) else time - work


def simulate(table: Table, seconds: Callable[[Action], float], transfer_s: float = 0.0) -> Timeline:
    """Each rank takes its actions in order, each as soon as it is free and the input is there; a
    transfer between consecutive stages on different ranks takes `transfer_s`, and keeps neither
    from its work. Raises ValueError for a table that would hang."""
    starts: list[list[float]] = [[] for _ in table.ranks]
    ends: list[list[float]] = [[] for _ in table.ranks]
    for rank, _, start, end in replay(table, seconds, transfer_s):
        starts[rank].append(start)
        ends[rank].append(end)
    work = max(math.fsum(map(seconds, actions)) for actions in table.ranks)
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)), work)
