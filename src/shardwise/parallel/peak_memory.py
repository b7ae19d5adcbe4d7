"""Peak memory of this rank: allocated on its GPU, or resident in its process."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


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
