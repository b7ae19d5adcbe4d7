"""Starting ranks and joining them: how processes find each other.

`shardwise train` starts the ranks of its layout through torch's elastic launcher; under `torchrun`
it joins the ranks that were started. Either way each rank runs `function(place, *args)`.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.environment import sets_threads, torchrun_rank
from shardwise.parallel.cores import usable_cores
from shardwise.parallel.mesh import CollectiveFailed

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a stop by the scheduler, a closed terminal: on each, a run saves and stops."""

GRACE_S = 600.0
"""Seconds that ranks have to save and end after a stop signal, before they are killed."""

BLAME_S = 5.0
"""Seconds that a rank whose collective failed waits before it fails too, so that the rank at fault
is reported first."""


@dataclass(frozen=True)
class Place:
    """The rank of this process, the world size, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device


class RankFailed(Exception):
    """A rank ended with an error. The message begins with its traceback and names the rank and its
    exit code."""


class Stopped(Exception):
    """The ranks were killed by a second Ctrl-C. `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def joined_world_size() -> int | None:
    """Return the number of ranks that torchrun started, or None if it did not start this
    process."""
    joined = torchrun_rank()
    return None if joined is None else joined.world_size


def local_world_size() -> int | None:
    """Return the number of ranks that torchrun started on this machine, or None."""
    joined = torchrun_rank()
    return None if joined is None else joined.local_world_size


def is_first_rank() -> bool:
    """Return whether this process is global rank 0, or starts the ranks itself."""
    joined = torchrun_rank()
    return joined is None or joined.rank == 0


def when_launcher_ends(number: int) -> None:
    """Send this rank a signal when the process that launched it ends, however it ends."""
    launcher = multiprocessing.parent_process()
    if launcher is None:  # torchrun's agent ends its ranks itself
        return

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def handles_signal(number: int) -> bool:
    """Return whether a stop signal is handled; under `nohup`, SIGHUP is ignored."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Run `function(place, *args)` on every rank and return the result of this machine's first.

    `function` must be importable by name; STOP_SIGNALS reach it as signals on every rank
    (`StopRequest` handles them). A single rank runs in this process. Others are forked from a
    server that has imported the module of `function`, so that they import torch once; it must start
    neither threads nor CUDA when it is imported. Raises RankFailed or Stopped.
    """
    if torchrun_rank() is not None:
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
        start_method="forkserver",
        signals_to_handle="SIGQUIT",
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])
    try:
        with relayed_signals(num_ranks), silent_log():
            return elastic_launch(config, run_spawned)(num_ranks, function, *args)[0]
    except ChildFailedError as error:
        raise RankFailed(describe_failures(error)) from None


@contextmanager
def relayed_signals(num_ranks: int) -> Iterator[None]:
    """Relay STOP_SIGNALS to the ranks while the block runs; they stop after their step. A second
    Ctrl-C kills them, and so does GRACE_S. A rank that is suspended (SIGSTOP) is continued first.

    The main thread blocks the signals, and the ranks that it starts inherit the mask: none dies
    before it can save. A second thread receives them from the system, and Python runs the handler
    in the main thread.
    """
    others = multiprocessing.active_children()
    early: list[int] = []
    killers: list[threading.Timer] = []
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
            os.kill(process.pid, signal.SIGCONT)
        if not killers:
            killers.append(threading.Timer(GRACE_S, kill_all, [ranks]))
            killers[0].daemon = True
            killers[0].start()
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
        number: signal.signal(number, relay) for number in STOP_SIGNALS if handles_signal(number)
    }
    former[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)  # which the launcher takes and keeps
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        done.set()
        for killer in killers:
            killer.cancel()
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def kill_all(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


@contextmanager
def silent_log() -> Iterator[None]:
    """Silence the launcher's own log while the block runs: `describe_failures` reports errors,
    once."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_spawned(num_local: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank that `run_ranks` started, with an equal share of the usable cores, or as many
    threads as OMP_NUM_THREADS says. It saves and stops when its launcher is gone."""
    when_launcher_ends(signal.SIGTERM)
    if not sets_threads():
        torch.set_num_threads(max(1, usable_cores() // num_local))
    result = run_rank(function, *args)
    # A rank waits until its launcher takes the result; without a launcher it must not wait.
    when_launcher_ends(signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():
        sys.exit(1)
    return result


def run_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Join the process group that torchrun's environment describes, run, and leave it."""
    joined = torchrun_rank()
    assert joined is not None
    device = device_of(joined.local_rank, joined.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return function(Place(joined.rank, joined.world_size, device), *args)
    except CollectiveFailed:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        time.sleep(BLAME_S)  # the launcher, once it has found the rank at fault, ends this rank
        raise
    finally:
        dist.destroy_process_group()


def device_of(local_rank: int, num_local: int) -> torch.device:
    """Return the GPU of a local rank if the machine has one for each, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def describe_failures(error: ChildFailedError) -> str:
    """Return the first failure in full and one line for each other rank, which mostly failed
    because the first did."""
    first_rank, first = error.get_first_failure()
    data = first.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    trace = (
        message.get("extraInfo", {}).get("py_callstack", "") if isinstance(message, dict) else ""
    )
    lines = [
        trace.rstrip() or str(first.message),
        f"rank {first_rank} failed first, with exit code {first.exitcode}",
    ]
    for rank, failure in sorted(error.failures.items()):
        if rank != first_rank:
            lines.append(f"rank {rank} ended with exit code {failure.exitcode}")
    return "\n".join(lines)
