"""Offload of optimizer states to host memory or to files.

A step reads and writes the 12 bytes of every parameter's fp32 master weight and moments once and in
order; forward and backward need none of them. So they can be stored where there is more space, and
pass through memory slice by slice in the step (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840;
ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857). The update runs on the CPU, in place: a
slice of the gradient is copied to the host, a slice of new weights is copied back.
"""

import mmap
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

Where = Literal["none", "host", "file"]
STATE_BYTES = 12
"""Bytes of optimizer states per element of a shard. In fp32 training too, which has no separate
master weights without offload."""


class Offload(Protocol):
    """The memory of one rank's optimizer states."""

    def allocate(self, num_elements: int) -> Tensor:
        """Return a flat tensor of zeros in fp32, on the CPU."""
        ...

    def release(self, flat: Tensor) -> None:
        """Let go of the memory of `flat`, a part of an allocated tensor, until it is used again.
        Its contents stay."""
        ...


class HostMemory:
    """Optimizer states in host memory, for GPUs that cannot hold them."""

    def allocate(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements)

    def release(self, flat: Tensor) -> None:
        """Do nothing: host memory is where states stay."""


class MappedFiles:
    """Optimizer states in memory-mapped files, for machines that cannot hold them in memory.

    The files have no names and vanish with the process, however it ends. All blocks are reserved
    when a file is created, so that a full disk raises ValueError there and not SIGBUS within a
    step. Released memory leaves the process at once; the system writes it to the disk when it needs
    the memory of its page cache.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_bytes = 0
        self._maps: dict[int, mmap.mmap] = {}  # by the address of a tensor's storage

    def allocate(self, num_elements: int) -> Tensor:
        num_bytes = num_elements * torch.float32.itemsize
        self._num_bytes += num_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)  # outlives the open file
        except OSError as error:
            size_gb = self._num_bytes / 1e9
            raise ValueError(
                f"{self._folder} cannot hold {size_gb:.3g} GB of optimizer state: "
                f"{error.strerror}; free space there or link the folder to another disk"
            ) from error
        flat = torch.frombuffer(mapped, dtype=torch.float32)
        self._maps[flat.data_ptr()] = mapped
        return flat

    def release(self, flat: Tensor) -> None:
        first = int(flat.storage_offset()) * flat.itemsize
        # neighbors on the same page are mapped again when they are read
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = self._maps[flat.untyped_storage().data_ptr()]
        mapped.madvise(mmap.MADV_DONTNEED, start, first + flat.nbytes - start)


def make_offload(where: Where, folder: Path) -> Offload | None:
    """Return the memory for optimizer states, or None to keep them on the device. Files are created
    in `folder`."""
    if where == "file":
        return MappedFiles(folder)
    return HostMemory() if where == "host" else None


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ValueError unless `folder` can hold `num_bytes` of optimizer states. It is called
    before any rank starts."""
    if sys.platform != "linux":
        raise ValueError(
            "offload to files needs Linux; offload to host memory (host) works everywhere"
        )
    MappedFiles(folder).allocate(num_bytes // torch.float32.itemsize)
