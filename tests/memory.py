"""How much memory an operation takes: as torch's allocator sees it, exactly, or as the system sees
the process."""

import json
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def process_bytes(name: str) -> int:
    """A line of /proc/self/status: VmRSS (resident now), VmHWM (at most, since `forget_peak`),
    VmData (private)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(run: Callable[[], object], trace: Path) -> tuple[int, int]:
    """The most bytes that `run` held at one time, and its largest allocation, from the trace of the
    allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    recorded.export_chrome_trace(str(trace))
    del kept
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak, max(changes)
