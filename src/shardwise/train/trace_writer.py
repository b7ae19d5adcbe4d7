"""Writing the trace of a step: each rank its own events, the first rank one file of them all and a
picture.

RUN/trace/step-3.json   Chrome's trace format, for Perfetto or chrome://tracing
RUN/trace/step-3.svg    with a pipeline: the measured timeline above the simulated one
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.spans import WAIT, Span
from shardwise.plan.measured import read_trace
from shardwise.plan.svg import draw_timelines
from shardwise.writing.atomic import written_aside
from shardwise.writing.json_text import json_text


def write_trace(folder: Path, mesh: Mesh, step: int) -> str:
    """Stop tracing and write the trace of `step`. Every rank calls it. Returns a line to log: the
    bubble of a pipeline, or why nothing could be written, which does not end the run."""
    spans = mesh.trace.spans
    mesh.trace.spans = []
    mesh.trace.is_on = False
    path = folder / "trace" / f"step-{step}.json"
    failure = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json_text(event) for event in trace_events(spans, mesh))
        rank_path(path, mesh.rank).write_text(",\n".join(lines), encoding="utf-8")
    except OSError as error:
        failure = f"{path} cannot be written: {error.strerror}"
    mesh.world.barrier()
    if mesh.rank or failure:
        return failure
    try:
        join_ranks(path, mesh, step)
        return draw_trace(path, f"Step {step} of {folder.name}, {mesh.layout}", mesh)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"


def draw_trace(path: Path, title: str, mesh: Mesh) -> str:
    """Draw the trace of a pipeline, and return its bubble with the path of the picture."""
    if mesh.layout.pp == 1:
        return ""
    try:
        trace = read_trace(path)
    except ValueError as error:  # the ranks do not share a file system
        return f"{path} cannot be drawn: {error}"
    picture = path.with_suffix(".svg")
    picture.write_text(draw_timelines(title, trace.panels, "seconds"), encoding="utf-8")
    return f"{trace.summary}: {picture}"


def rank_path(path: Path, rank: int) -> Path:
    """Return the path of the events of one rank."""
    return path.with_name(f".{path.stem}.rank-{rank}.partial")


def join_ranks(path: Path, mesh: Mesh, step: int) -> None:
    """Join the events of all ranks whose files this rank can see into one file."""
    header = {"layout": str(mesh.layout), "step": step}
    paths = [rank_path(path, rank) for rank in range(mesh.layout.world_size)]
    paths = [each for each in paths if each.exists()]
    with written_aside(path, unique=False) as aside, aside.open("w", encoding="utf-8") as file:
        file.write(
            f'{{"displayTimeUnit": "ms", "otherData": {json_text(header)}, "traceEvents": [\n'
        )
        for each in paths:
            file.write((",\n" if each != paths[0] else "") + each.read_text(encoding="utf-8"))
            each.unlink()
        file.write("\n]}\n")


def trace_events(spans: list[Span], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield the events of this rank in Chrome's format, in microseconds of the wall clock, which
    all machines share."""
    coord = " ".join(f"{axis}{index}" for axis, index in mesh.coord._asdict().items())
    process = {"ph": "M", "pid": mesh.rank}
    yield process | {"name": "process_name", "args": {"name": f"rank {mesh.rank} ({coord})"}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": mesh.rank}}
    wall_clock_s = time.time() - time.perf_counter()
    for span in spans:
        start = 1e6 * (span.start_s + wall_clock_s)
        duration = 1e6 * (span.end_s - span.start_s)
        yield named(span.what) | {
            "ph": "X",
            "ts": round(start, 1),
            "dur": round(duration, 1),
            "pid": mesh.rank,
            "tid": 0,
        }


def named(what: Action | str) -> dict[str, Any]:
    """Return the name, category and arguments of an event."""
    if isinstance(what, str):
        return {"name": what, "cat": "wait" if what.startswith(WAIT) else "step"}
    return {
        "name": f"{what.kind}{what.microbatch} {what.piece or what.unit}",
        "cat": what.kind,
        "args": {"stage": what.stage, "microbatch": what.microbatch},
    }
