"""Starting ranks and joining them: the only place that knows how processes find each other, and that reads the
environment for it.

`shardwise train` starts the ranks of its layout through torch's elastic launcher; under `torchrun` it joins what was
started. Either way each rank ends in `function(place, *args)`.
"""

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SAVE_TIMEOUT_S = 600
"""How long ranks may take to save and stop after a signal before they are ended."""


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of how many, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device


class RankFailed(Exception):
    """A rank ended with an error: the message names it and its exit code, and holds its traceback first."""


class Stopped(Exception):
    """The launcher was told to stop (Ctrl-C, SIGTERM); the ranks have saved and ended. `signal` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def joined_world_size() -> int | None:
    """The number of ranks that torchrun started, None when it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Run `function(place, *args)` on every rank and return the result of this machine's first.

    `function` must be importable by name. Raises RankFailed or Stopped; one rank runs in this very process.
    """
    if started_by_torchrun():
        return run_rank(function, *args)
    if num_ranks == 1:
        return function(Place(0, 1, device_of(0, 1)), *args)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are told below, once
    known = {field.name for field in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": SAVE_TIMEOUT_S} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, max_restarts=0, monitor_interval=0.05,
        run_id="shardwise", rdzv_backend="c10d", rdzv_endpoint="localhost:0", **patience,
    )  # fmt: skip
    try:
        return elastic_launch(config, run_spawned)(num_ranks, function, *args)[0]
    except ChildFailedError as error:
        raise RankFailed(tell_failures(error)) from None
    except SignalException as stop:
        raise Stopped(stop.sigval) from None


@record
def run_spawned(num_local: int, function: Callable[..., Any], *args: Any) -> Any:
    """Entry of a rank that `run_ranks` started: the machine's cores are shared evenly among its ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local))
    return run_rank(function, *args)


def run_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Join the process group that the environment describes, run, and leave it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = device_of(local_rank, num_local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return function(Place(rank, world_size, device), *args)
    finally:
        dist.destroy_process_group()


def device_of(local_rank: int, num_local: int) -> torch.device:
    """A GPU each where there are enough, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def tell_failures(error: ChildFailedError) -> str:
    """The first failure in full, the others a line each: they mostly failed because the first did."""
    first_rank, first = error.get_first_failure()
    told = first.error_file_data.get("message", {}) if isinstance(first.error_file_data, dict) else {}
    trace = told.get("extraInfo", {}).get("py_callstack", "") if isinstance(told, dict) else str(told)
    lines = [trace.rstrip() or str(first.message), f"rank {first_rank} failed first, with exit code {first.exitcode}"]
    for rank, failure in sorted(error.failures.items()):
        if rank != first_rank:
            lines.append(f"rank {rank} ended with exit code {failure.exitcode}")
    return "\n".join(lines)
