"""How much memory an operation takes, as torch's allocator sees it: exact, where the process's size is not."""

import json
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], trace: Path) -> tuple[int, int]:
    """The most bytes that `run` held at one time, and its largest allocation, from the trace of the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    recorded.export_chrome_trace(str(trace))
    del kept
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak, max(changes)
