"""How much memory this rank has held: of its GPU, or resident in the process."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: of the GPU, or resident in the process."""
    return (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    )


def peak_resident_bytes() -> int:
    """VmHWM of proc(5) where there is one, since getrusage counts in what the process that started
    this one held."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
    )


def reset_peaks(device: torch.device) -> None:
    """Forget what this process held before, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
