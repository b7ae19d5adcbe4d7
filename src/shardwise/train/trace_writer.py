"""Writes the trace of a step: every rank what it did, the first rank one file of it all, with a
picture.

RUN/trace/step-3.json   Chrome's trace format, for Perfetto or chrome://tracing
RUN/trace/step-3.svg    of a pipeline: measured, and simulated with the same times
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.atomic import written_aside
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.spans import WAIT, Span
from shardwise.plan.measured import read_trace
from shardwise.plan.svg import draw_timelines


def write_trace(folder: Path, mesh: Mesh, step: int) -> str:
    """Turn the trace off and write it down; every rank calls it. Returns what is to be told of it:
    a pipeline's bubble. That nothing could be written ends no run."""
    spans = mesh.trace.spans
    mesh.trace.spans = []
    mesh.trace.is_on = False
    path = folder / "trace" / f"step-{step}.json"
    failure = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(event) for event in events(spans, mesh))
        part_of(path, mesh.rank).write_text(",\n".join(lines), encoding="utf-8")
    except OSError as error:
        failure = f"{path} cannot be written: {error.strerror}"
    mesh.world.barrier()
    if mesh.rank or failure:
        return failure
    try:
        join_parts(path, mesh, step)
        if mesh.layout.pp == 1:
            return ""
        traced = read_trace(path)
        title = f"Step {step} of {folder.name}, {mesh.layout}"
        path.with_suffix(".svg").write_text(
            draw_timelines(title, traced.panels, "seconds"), encoding="utf-8"
        )
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    except ValueError as error:  # ranks wrote to disks that this one does not see
        return f"{path} is not drawn: {error}"
    return f"{traced.told}: {path.with_suffix('.svg')}"


def part_of(path: Path, rank: int) -> Path:
    return path.with_name(f".{path.stem}.rank-{rank}.partial")


def join_parts(path: Path, mesh: Mesh, step: int) -> None:
    """One file of what the ranks wrote, as far as this rank sees their disks."""
    about = {"layout": str(mesh.layout), "step": step}
    with written_aside(path, unique=False) as whole, whole.open("w", encoding="utf-8") as file:
        file.write(
            f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
        )
        parts = [
            part for rank in range(mesh.layout.world_size) if (part := part_of(path, rank)).exists()
        ]
        for part in parts:
            file.write((",\n" if part != parts[0] else "") + part.read_text(encoding="utf-8"))
            part.unlink()
        file.write("\n]}\n")


def events(spans: list[Span], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """As Chrome's format has them, in microseconds of the clock that all machines share."""
    place = " ".join(f"{axis}{at}" for axis, at in mesh.coord._asdict().items())
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": mesh.rank,
        "args": {"name": f"rank {mesh.rank} ({place})"},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": mesh.rank,
        "args": {"sort_index": mesh.rank},
    }
    shared_s = time.time() - time.perf_counter()
    for span in spans:
        start = 1e6 * (span.start_s + shared_s)
        took = 1e6 * (span.end_s - span.start_s)
        yield named(span.what) | {
            "ph": "X",
            "ts": round(start, 1),
            "dur": round(took, 1),
            "pid": mesh.rank,
            "tid": 0,
        }


def named(what: Action | str) -> dict[str, Any]:
    if isinstance(what, str):
        return {"name": what, "cat": "wait" if what.startswith(WAIT) else "step"}
    args = {"stage": what.stage, "microbatch": what.microbatch}
    return {
        "name": f"{what.kind}{what.microbatch} {what.piece or what.unit}",
        "cat": what.kind,
        "args": args,
    }
