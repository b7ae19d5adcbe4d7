"""Where the optimizer's state lives when it does not lie beside the weights: in host memory, or in
a file.

A step reads and writes the 12 bytes of every parameter's fp32 master weight and moments once and in
order; forward and backward need none of them. So they can lie where there is more room, and pass
through memory slice by slice in the step (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840;
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857). The update then runs on the CPU, in
place: a slice of the gradient comes over, a slice of new weights goes back.
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
"""Of each element of a shard. In fp32 too, where the weights would be their own master: here it is
one more copy."""


class Offload(Protocol):
    """Owns the optimizer's state of one rank: its shards, and nothing else."""

    def allocate(self, num_elements: int) -> Tensor:
        """Zeros in fp32, on the CPU."""
        ...

    def release(self, flat: Tensor) -> None:
        """Be told that `flat`, a part of what was allocated, has been used. It keeps what it
        holds."""
        ...


class HostMemory:
    """State in the memory of the machine: what a GPU has no room for."""

    def allocate(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements)

    def release(self, flat: Tensor) -> None:
        """It has no better place."""


class MappedFiles:
    """State in files that are mapped into memory: what the machine has no room for.

    They have no names and are gone with the process, however that ends. All blocks are reserved
    when a file is made, so that a full disk is an error there and then (ValueError) and no SIGBUS
    in the middle of a step. What is released leaves the process's memory at once; the system writes
    it to the disk when it wants its own copy's memory back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_bytes = 0
        self._maps: dict[int, mmap.mmap] = {}
        """By the address at which a tensor's storage begins."""

    def allocate(self, num_elements: int) -> Tensor:
        num_bytes = num_elements * torch.float32.itemsize
        self._num_bytes += num_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(
                    file.fileno(), num_bytes
                )  # keeps what is mapped when the file is closed
        except OSError as error:
            raise ValueError(
                f"{self._folder} cannot hold {self._num_bytes / 1e9:.3g} GB of optimizer state: {error.strerror}; make "
                "room there or link it to another disk"
            ) from error
        flat = torch.frombuffer(mapped, dtype=torch.float32)
        self._maps[flat.data_ptr()] = mapped
        return flat

    def release(self, flat: Tensor) -> None:
        first = int(flat.storage_offset()) * flat.itemsize
        start = (
            first // mmap.PAGESIZE * mmap.PAGESIZE
        )  # a neighbour on the same page will be mapped again when read
        mapped = self._maps[flat.untyped_storage().data_ptr()]
        mapped.madvise(mmap.MADV_DONTNEED, start, first + flat.nbytes - start)


def make_offload(where: Where, folder: Path) -> Offload | None:
    """What a store is given; None leaves the state beside the weights. Files lie in `folder`."""
    if where == "file":
        return MappedFiles(folder)
    return HostMemory() if where == "host" else None


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ValueError unless `folder` can hold `num_bytes` of state: to ask before any rank
    starts."""
    if sys.platform != "linux":
        raise ValueError(
            "to keep the optimizer's state in a file needs Linux; elsewhere it stays in memory"
        )
    MappedFiles(folder).allocate(num_bytes // torch.float32.itemsize)
