"""The environment variables that Shardwise reads; no other file reads any.

RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are those of torchrun. SHARDWISE_KERNELS selects
the kernels for CPUs. SHARDWISE_API_KEY is an API key of `shardwise serve`. OMP_NUM_THREADS is read
by OpenMP itself; here only whether it is set.
"""

import os
from dataclasses import dataclass

CPU_KERNELS_VARIABLE = "SHARDWISE_KERNELS"
API_KEY_VARIABLE = "SHARDWISE_API_KEY"


@dataclass(frozen=True)
class TorchrunRank:
    """The rank of this process among those that torchrun started.

    Attributes:
        rank: the global rank.
        world_size: the number of ranks on all machines.
        local_rank: the rank among those on this machine.
        local_world_size: the number of ranks on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_rank() -> TorchrunRank | None:
    """Return the rank of this process, or None if torchrun did not start it."""
    variables = os.environ
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank = int(variables["RANK"])
    world_size = int(variables["WORLD_SIZE"])
    local_rank = int(variables.get("LOCAL_RANK", rank))
    local_world_size = int(variables.get("LOCAL_WORLD_SIZE", world_size))
    return TorchrunRank(rank, world_size, local_rank, local_world_size)


def sets_threads() -> bool:
    """Return whether the environment sets the threads of a process, which torch then obeys."""
    return bool(os.environ.get("OMP_NUM_THREADS"))


def cpu_kernels() -> str | None:
    """Return the kernels for CPUs that the environment selects: `torch` or an instruction set."""
    return os.environ.get(CPU_KERNELS_VARIABLE) or None


def api_key() -> str | None:
    """Return the API key of the environment. Raises ValueError if it is empty."""
    key = os.environ.get(API_KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{API_KEY_VARIABLE} is empty; unset it to serve without a key from it")
    return None if key is None else key.strip()
