"""The measured timeline of a step, read from its trace, and the simulated timeline of the same
actions.

The file has Chrome's trace format, which Perfetto and chrome://tracing show: a process is a rank,
and an event is an action of its table, or a wait within or between actions.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.formats.config_files import read_json_object
from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Table
from shardwise.plan.simulate import Timeline, simulate
from shardwise.plan.svg import caption

COMPUTE = ("F", "B", "I", "W")
STAGE_WAITS = ("wait pp", "wait pp_down")
Event = dict[str, Any]


@dataclass(frozen=True)
class StepTrace:
    """A traced step of a run: the actions of the ranks of the first pipeline, in seconds from the
    first action. Each action of `measured` excludes the time that it waited for a neighbouring
    stage."""

    layout: Layout
    step: int
    measured: Timeline

    @cached_property
    def predicted(self) -> Timeline:
        """The simulation of the same table: each action takes its mean time over the micro-batches
        of its stage, and transfers take none."""
        return simulate(self.measured.table, mean_seconds(self.measured))

    @property
    def panels(self) -> tuple[tuple[str, Timeline], tuple[str, Timeline]]:
        """Both timelines with their captions."""
        return (
            (f"measured: {caption(self.measured)}", self.measured),
            (f"simulated with the same times: {caption(self.predicted)}", self.predicted),
        )

    @property
    def summary(self) -> str:
        measured = self.measured.bubble_fraction
        simulated = self.predicted.bubble_fraction
        return f"bubble {measured:.1%} measured, {simulated:.1%} simulated with the same times"


MAX_TRACE_BYTES = 1 << 30


def newest_trace(path: Path) -> Path:
    """Return the trace of the last traced step in the folder of a run; the path itself if it is a
    file. Raises ValueError if there is none."""
    if not path.is_dir():
        return path
    steps = {
        int(file.stem.removeprefix("step-")): file for file in (path / "trace").glob("step-*.json")
    }
    if not steps:
        raise ValueError(
            f"{path} has no trace; `shardwise train` writes that of step run.trace_step"
        )
    return steps[max(steps)]


def read_trace(path: Path) -> StepTrace:
    """Read the trace of a run. Raises ValueError for any other file."""
    try:
        trace = read_json_object(path, MAX_TRACE_BYTES)
        layout = Layout.parse(trace["otherData"]["layout"])
        step = int(trace["otherData"]["step"])
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        measured = measured_timeline(events, layout)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} is not the trace of a run ({type(error).__name__}: {error})"
        ) from None
    return StepTrace(layout, step, measured)


def measured_timeline(events: Iterable[Event], layout: Layout) -> Timeline:
    """Return the timeline of the ranks that differ from rank 0 only by their stage."""
    pipeline = layout.ranks("pp", layout.coord(0))
    by_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event["pid"]].append(event)
    ranks = [list(measured_actions(by_rank[rank])) for rank in pipeline]
    if not all(ranks):
        raise ValueError(
            "the trace lacks the actions of some stages: its ranks wrote to different disks"
        )
    zero = min(start for each in ranks for _, start, _ in each)
    placement = {action.stage: rank for rank, each in enumerate(ranks) for action, _, _ in each}
    table = Table(
        tuple(tuple(action for action, _, _ in each) for each in ranks),
        tuple(placement[stage] for stage in sorted(placement)),
        1 + max(action.microbatch for each in ranks for action, _, _ in each),
    )
    starts = tuple(tuple(start - zero for _, start, _ in each) for each in ranks)
    ends = tuple(tuple(end - zero for _, _, end in each) for each in ranks)
    work = max(math.fsum(end - start for _, start, end in each) for each in ranks)
    return Timeline(table, starts, ends, work)


def measured_actions(events: Iterable[Event]) -> Iterable[tuple[Action, float, float]]:
    """Yield (action of a whole stage, start, end) in order, in seconds: from its first piece to its
    last, without the time that it waited for a neighbouring stage, which is at its start."""
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
    waited_before = [0.0, *accumulate(duration for _, duration in waits)]
    for action, (start, end) in spans.items():
        waited = (
            waited_before[bisect_left(middles, end)] - waited_before[bisect_left(middles, start)]
        )
        yield action, (start + waited) / 1e6, end / 1e6


def mean_seconds(timeline: Timeline) -> Callable[[Action], float]:
    """Return the mean time of each kind of action of a stage."""
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for actions, starts, ends in zip(
        timeline.table.ranks, timeline.starts, timeline.ends, strict=True
    ):
        for action, start, end in zip(actions, starts, ends, strict=True):
            times[action.kind, action.stage].append(end - start)
    mean = {key: math.fsum(each) / len(each) for key, each in times.items()}
    return lambda action: mean[action.kind, action.stage]
