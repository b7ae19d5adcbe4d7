"""Memory of this rank: what is free on its device, and the peak that it has used."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from shardwise.parallel.cgroup import MEMBERSHIP, ROOT, cgroup_folders

MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files of a limit and of its use, and the part of `memory.stat` that may be dropped: version 2
and version 1."""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of the process: VmHWM of proc(5) where it exists, since
    getrusage includes that of the parent process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
    )


def reset_peaks(device: torch.device) -> None:
    """Reset the recorded peaks, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of the machine or its container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return min(sizes["MemAvailable"], container_bytes())


def container_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the memory that the limits of this process's cgroups leave; 2^62 without a limit."""
    return min(map(free_bytes, cgroup_folders("memory", root, membership)))


def free_bytes(folder: Path) -> int:
    """Return the free memory of one cgroup, whose file cache may be dropped (cgroup v2, "Memory
    Interface Files"; cgroup v1, "Memory Resource Controller"); 2^62 without a limit.
    """
    for limit, current, cache in MEMORY_FILES:
        with suppress(OSError, ValueError):  # another version, or "max"
            total = int((folder / limit).read_text())
            used = int((folder / current).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            return min(total - used + int(stat.get(cache, 0)), 1 << 62)
    return 1 << 62
