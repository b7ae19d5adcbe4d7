"""The cores that this process may use: of its affinity, within the quota of its container."""

import math
import os
from contextlib import suppress
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores, at least 1. A quota is rounded up to whole cores (cgroup v2,
    "CPU Interface Files")."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        quota_us, period_us = map(int, (cgroup / "cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)
