"""The cores that this process may use: of its affinity, within the quota of its container."""

import math
import os
from contextlib import suppress
from pathlib import Path

from shardwise.parallel.cgroup import MEMBERSHIP, ROOT, cgroup_folders


def usable_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the number of cores, at least 1. A quota is rounded up to whole cores."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    quotas = map(quota_cores, cgroup_folders("cpu", root, membership))
    return max(1, math.ceil(min(cores, *quotas)))


def quota_cores(folder: Path) -> float:
    """Return the quota of one cgroup in cores (cgroup v2, "CPU Interface Files"; cgroup v1, "CFS
    Bandwidth Control"); infinite without one."""
    with suppress(OSError, ValueError):  # another version, or "max"
        quota_us, period_us = map(int, (folder / "cpu.max").read_text().split())
        return quota_us / period_us
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            return quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return math.inf
