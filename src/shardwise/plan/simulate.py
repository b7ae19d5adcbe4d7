"""Simulation of a schedule: its table replayed with a clock, and the bubble in its usual
definitions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Table, held_forwards, replay


@dataclass(frozen=True)
class Timeline:
    """The start and end of each action of a table, by rank and position, in the unit of the costs.

    `work` is the time of the actions of the rank that has most. A span is the time of a rank from
    its first action to its last; the bubble is the longest span minus the work.
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
        """Time from the first action of all ranks to the last."""
        return max(ends[-1] for ends in self.ends)

    @property
    def bubble_fraction(self) -> float:
        """The bubble as a share of the longest span, as in the zero-bubble papers: (p - 1) /
        (m + p - 1) for GPipe and 1F1B."""
        return idle_time(self.work, self.span) / self.span if self.span else 0.0

    @property
    def idle_fraction(self) -> float:
        """The idle share of the makespan, in which a rank also waits for its first input, and for
        the others at the end."""
        return idle_time(self.work, self.makespan) / self.makespan if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The bubble as a share of the work, as in Narayanan et al. 2021: (p - 1) / m for GPipe and
        1F1B."""
        return idle_time(self.work, self.span) / self.work if self.work else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of chunk forwards in flight, by rank: those whose B, or W, is to
        come."""
        return tuple(round(max(held_forwards(actions))) for actions in self.table.ranks)


def idle_time(work: float, time: float) -> float:
    """Return a time minus the work in it; 0 where they differ only by rounding."""
    return 0.0 if math.isclose(work, time, rel_tol=1e-9) else time - work


def simulate(table: Table, seconds: Callable[[Action], float], transfer_s: float = 0.0) -> Timeline:
    """Return the timeline of a table. Each rank takes its actions in order, each as soon as the
    rank is free and the input is there. A transfer between consecutive stages on different ranks
    takes `transfer_s`, during which both ranks may work. Raises ValueError for a table that
    deadlocks."""
    starts: list[list[float]] = [[] for _ in table.ranks]
    ends: list[list[float]] = [[] for _ in table.ranks]
    for rank, _, start, end in replay(table, seconds, transfer_s):
        starts[rank].append(start)
        ends[rank].append(end)
    work = max(math.fsum(map(seconds, actions)) for actions in table.ranks)
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)), work)
