"""Starting ranks and joining them: the only place that knows how processes find each other, and
that reads the environment for it.

`shardwise train` starts the ranks of its layout through torch's elastic launcher; under `torchrun`
it joins what was started. Either way each rank ends in `function(place, *args)`.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import _prctl_pr_set_pdeathsig as set_parent_death_signal  # type: ignore[attr-defined]

from shardwise.parallel.mesh import CollectiveFailed

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request, a terminal that was closed: each asks a run to save and stop."""

BLAME_S = 5.0
"""How long a rank whose collective failed waits before it fails too, so that the one at fault is
found first."""


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of how many, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device


class RankFailed(Exception):
    """A rank ended with an error: the message names it and its exit code, and holds its traceback
    first."""


class Stopped(Exception):
    """The ranks were ended at once, on a second Ctrl-C. `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def joined_world_size() -> int | None:
    """The number of ranks that torchrun started, None when it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None


def local_world_size() -> int | None:
    """The number of ranks that torchrun started on this machine."""
    return (
        int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if started_by_torchrun()
        else None
    )


def is_first_rank() -> bool:
    return not started_by_torchrun() or int(os.environ["RANK"]) == 0


def is_taken(number: int) -> bool:
    """Whether a stop signal is heeded; under `nohup` a closed terminal is not."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Run `function(place, *args)` on every rank and return the result of this machine's first.

    `function` must be importable by name; STOP_SIGNALS reach it as signals on every rank
    (`StopRequest` takes them). Raises RankFailed or Stopped. One rank runs in this very process.
    """
    if started_by_torchrun():
        return run_rank(function, *args)
    if num_ranks == 1:
        return function(Place(0, 1, device_of(0, 1)), *args)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        max_restarts=0,
        monitor_interval=0.05,
        run_id="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        signals_to_handle="SIGQUIT",
    )
    try:
        with relayed_signals(num_ranks), silent_log():
            return elastic_launch(config, run_spawned)(num_ranks, function, *args)[0]
    except ChildFailedError as error:
        raise RankFailed(tell_failures(error)) from None


@contextmanager
def relayed_signals(num_ranks: int) -> Iterator[None]:
    """While the block runs, STOP_SIGNALS go on to the ranks, which end in their own time; a second
    Ctrl-C ends them at once.

    The main thread holds the signals back, which the ranks it starts inherit: none dies of one
    before it can save. A second thread takes them from the system, and Python runs the handler in
    the main thread.
    """
    others = multiprocessing.active_children()
    early: list[int] = []
    interrupts = 0

    def relay(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        ranks = [process for process in multiprocessing.active_children() if process not in others]
        if len(ranks) < num_ranks:
            early.append(number)
            return
        interrupts += number == signal.SIGINT
        for process in ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL if interrupts > 1 else number)
        if interrupts > 1:
            raise Stopped(number)

    def repeat_early_ones() -> None:
        while not done.wait(0.1):
            while early:
                os.kill(os.getpid(), early.pop())

    resource_tracker.ensure_running()  # now, since starting it lets signals through
    done = threading.Event()
    threading.Thread(target=repeat_early_ones, daemon=True).start()
    former: dict[int, Any] = {
        number: signal.signal(number, relay) for number in STOP_SIGNALS if is_taken(number)
    }
    former[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)  # which the launcher takes and keeps
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        done.set()
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def silent_log() -> Iterator[None]:
    """Without the launcher's own log: what went wrong is told once, by `tell_failures`."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_spawned(num_local: int, function: Callable[..., Any], *args: Any) -> Any:
    """Entry of a rank that `run_ranks` started: the machine's cores are shared evenly among its
    ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local))
    result = run_rank(function, *args)
    # A rank waits for its launcher to take the result. Without a launcher it must not wait.
    set_parent_death_signal(signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():
        sys.exit(1)
    return result


def run_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Join the process group that the environment describes, run, and leave it."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = device_of(local_rank, num_local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return function(Place(rank, world_size, device), *args)
    except CollectiveFailed:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        time.sleep(BLAME_S)  # the launcher, once it has found the rank at fault, ends this one
        raise
    finally:
        dist.destroy_process_group()


def device_of(local_rank: int, num_local: int) -> torch.device:
    """A GPU each where there are enough, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def tell_failures(error: ChildFailedError) -> str:
    """The first failure in full, the others a line each: they mostly failed because the first
    did."""
    first_rank, first = error.get_first_failure()
    told = first.error_file_data.get("message") if isinstance(first.error_file_data, dict) else None
    trace = told.get("extraInfo", {}).get("py_callstack", "") if isinstance(told, dict) else ""
    lines = [
        trace.rstrip() or str(first.message),
        f"rank {first_rank} failed first, with exit code {first.exitcode}",
    ]
    for rank, failure in sorted(error.failures.items()):
        if rank != first_rank:
            lines.append(f"rank {rank} ended with exit code {failure.exitcode}")
    return "\n".join(lines)
