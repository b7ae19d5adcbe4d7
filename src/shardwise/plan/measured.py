"""What a step really did, read from its trace: the measured timeline beside the simulated one of
the same actions.

The file is Chrome's trace format, which Perfetto and chrome://tracing show: a process is a rank, an
event is an action of its table, and in it, or between, what it waited for.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Table
from shardwise.plan.simulate import Timeline, simulate
from shardwise.plan.svg import summarized

COMPUTE = ("F", "B", "I", "W")
STAGE_WAITS = ("wait pp", "wait pp_down")
Event = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """A step of a run: what the ranks of the first pipeline did, in seconds from the first action
    of all. A bar of `measured` is an action less the time for which it waited for the stage beside
    it."""

    layout: Layout
    step: int
    measured: Timeline

    @cached_property
    def predicted(self) -> Timeline:
        """The same orders with a clock: each action takes what it took on average over the
        micro-batches of its stage, and transfers nothing."""
        return simulate(self.measured.table, mean_seconds(self.measured))

    @property
    def panels(self) -> tuple[tuple[str, Timeline], tuple[str, Timeline]]:
        measured = summarized(self.measured)
        predicted = summarized(self.predicted)
        return (
            (f"measured: {measured}", self.measured),
            (f"simulated with the same times: {predicted}", self.predicted),
        )

    @property
    def summary(self) -> str:
        return (
            f"bubble {self.measured.bubble_fraction:.1%} measured, {self.predicted.bubble_fraction:.1%} predicted from "
            "these times"
        )


def newest_trace(path: Path) -> Path:
    """Of a run's folder the last step that was traced; a file is itself. Raises ValueError where
    there is none."""
    if not path.is_dir():
        return path
    steps = {
        int(file.stem.removeprefix("step-")): file for file in (path / "trace").glob("step-*.json")
    }
    if not steps:
        raise ValueError(
            f"{path} has no trace; `shardwise train` writes one of the step that run.trace_step names"
        )
    return steps[max(steps)]


def read_trace(path: Path) -> Traced:
    """The trace that a run wrote. Raises ValueError for a file that is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        layout = Layout.parse(told["otherData"]["layout"])
        step = int(told["otherData"]["step"])
        events = [event for event in told["traceEvents"] if event["ph"] == "X"]
        measured = measured_timeline(events, layout)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not the trace of a run ({type(error).__name__}: {error})"
        ) from None
    return Traced(layout, step, measured)


def measured_timeline(events: Iterable[Event], layout: Layout) -> Timeline:
    """Of the ranks that differ from rank 0 by their stage alone."""
    pipeline = layout.ranks("pp", layout.coord(0))
    of_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        of_rank[event["pid"]].append(event)
    bars = [list(bars_of(of_rank[rank])) for rank in pipeline]
    if not all(bars):
        raise ValueError(
            "the trace has no actions of some stages: its ranks wrote to different disks"
        )
    zero = min(start for each in bars for _, start, _ in each)
    placement = {action.stage: at for at, each in enumerate(bars) for action, _, _ in each}
    table = Table(
        tuple(tuple(action for action, _, _ in each) for each in bars),
        tuple(placement[stage] for stage in sorted(placement)),
        1 + max(action.microbatch for each in bars for action, _, _ in each),
    )
    starts = tuple(tuple(start - zero for _, start, _ in each) for each in bars)
    ends = tuple(tuple(end - zero for _, _, end in each) for each in bars)
    return Timeline(
        table, starts, ends, max(math.fsum(end - start for _, start, end in each) for each in bars)
    )


def bars_of(events: Iterable[Event]) -> Iterable[tuple[Action, float, float]]:
    """(action of a whole stage, start, end) in seconds, in order: its pieces and what lies between
    them, less the time for which it waited for the stage beside it, which is at its beginning."""
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    waits = [
        (event["ts"] + event["dur"] / 2, event["dur"])
        for event in ordered
        if event["name"] in STAGE_WAITS
    ]
    spans: dict[Action, list[float]] = {}
    for event in ordered:
        if event["cat"] in COMPUTE:
            action = Action(event["cat"], event["args"]["stage"], event["args"]["microbatch"])
            spans.setdefault(action, [event["ts"], 0.0])[1] = event["ts"] + event["dur"]
    middles = [middle for middle, _ in waits]
    waited_before = [0.0, *accumulate(took for _, took in waits)]
    for action, (start, end) in spans.items():
        waited = (
            waited_before[bisect_left(middles, end)] - waited_before[bisect_left(middles, start)]
        )
        yield action, (start + waited) / 1e6, end / 1e6


def mean_seconds(timeline: Timeline) -> Callable[[Action], float]:
    """What an action of a kind and stage took on average."""
    took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for actions, starts, ends in zip(
        timeline.table.ranks, timeline.starts, timeline.ends, strict=True
    ):
        for action, start, end in zip(actions, starts, ends, strict=True):
            took[action.kind, action.stage].append(end - start)
    mean = {key: math.fsum(each) / len(each) for key, each in took.items()}
    return lambda action: mean[action.kind, action.stage]
