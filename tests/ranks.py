"""Rank processes for multi-rank tests: started once a session, used by every test, replaced where
one is lost.

Each call runs one function on the first `world_size` processes, inside a process group of its own
(gloo, met at a fresh file, so no port is chosen). What travels is plain pickle: tensors go as
bytes, never as shared memory.

A rank stays in its group until every rank has answered, since leaving early breaks a peer's last
collective. Once one has failed the others are asked to leave as they answer, which wakes those
that wait for it."""

import contextlib
import gc
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

MAX_RANKS = 8
PRELOADED = ("torch.distributed", "transformers.models.llama.modeling_llama")
"""Modules that take seconds to import: ranks are forked from a process that has imported them."""
START_S = END_S = (
    120.0  # eight processes import torch, or write down their coverage, on a busy machine
)
GRACE_S = 6.0  # for a rank to notice that a peer has failed, and to leave its group
LEAVE = LEFT = pickle.dumps(None)


class RankFailed(AssertionError):
    """A rank raised, died or never answered; holds the first failure whole and the others a line
    each."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Call:
    """One function to run as one rank of a group."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    meeting_file: Path
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on a rank: a value, or why there is none and when that happened."""

    value: Any = None
    failure: str = ""
    failed_at_s: float = 0.0


@dataclass(frozen=True)
class Rank:
    """A process and the pytest end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Ranks:
    """The pool of rank processes; `run` is all that a test needs."""

    def __init__(self) -> None:
        self._pool: dict[int, Rank] = {}
        self._meetings = tempfile.TemporaryDirectory(prefix="ranks-")
        self._num_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._pool.values():
            rank.pipe.close()  # an idle rank takes the end of its pipe for the end of its work
        for rank in self._pool.values():
            rank.process.join(END_S)
            rank.end()
        self._pool.clear()
        self._meetings.cleanup()

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Run `function(rank, world_size, *args)` on every rank of a fresh group; return the values
        by rank.

        `function` must be importable, so of module level. `timeout_s` limits each collective and
        the whole call. Raises `RankFailed` with the traceback of the rank that failed first.
        """
        assert 1 <= world_size <= MAX_RANKS, (
            f"the pool has 1 to {MAX_RANKS} ranks, not {world_size}"
        )
        self._start_missing(world_size)
        self._num_calls += 1
        meeting_file = Path(self._meetings.name, str(self._num_calls))
        members = {rank: self._pool[rank] for rank in range(world_size)}
        left: set[int] = set()
        try:
            for rank, member in members.items():
                send(
                    member,
                    pickle.dumps(Call(function, args, rank, world_size, meeting_file, timeout_s)),
                )
            outcomes = converse(members, left, timeout_s)
        finally:
            for rank in members.keys() - left:
                self._pool.pop(rank).end()
            meeting_file.unlink(missing_ok=True)
        raise_first_failure(outcomes)
        return [outcomes[rank].value for rank in range(world_size)]

    def _start_missing(self, world_size: int) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(list(PRELOADED))
        new = [rank for rank in range(world_size) if rank not in self._pool]
        for rank in new:
            ours, theirs = server.Pipe()
            process = server.Process(target=serve, args=(theirs,), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._pool[rank] = Rank(process, ours)
        for rank in new:
            pipe = self._pool[rank].pipe
            if not pipe.poll(START_S) or pipe.recv_bytes() != LEFT:
                raise RuntimeError(f"the process for rank {rank} did not start in {START_S:.0f} s")


def converse(members: dict[int, Rank], left: set[int], timeout_s: float) -> dict[int, Outcome]:
    """Collect an outcome of every rank; `left` gathers those that are out of their group, fit for
    another call."""
    outcomes: dict[int, Outcome] = {}
    asked_to_leave: set[int] = set()
    rank_at = {member.pipe: rank for rank, member in members.items()}
    deadline_s = time.monotonic() + timeout_s + GRACE_S
    while rank_at and (ready := wait(list(rank_at), max(0.0, deadline_s - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = rank_at[pipe]
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                answer = died(members[rank].process)
                del rank_at[pipe]
            if answer is not None:
                outcomes[rank] = answer
            else:
                left.add(rank)
                del rank_at[pipe]
        if len(outcomes) == len(members) or any(outcome.failure for outcome in outcomes.values()):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
            for rank in outcomes.keys() - asked_to_leave:
                send(members[rank], LEAVE)
            asked_to_leave |= outcomes.keys()
    for rank in members.keys() - outcomes.keys():
        outcomes[rank] = Outcome(failure="it never answered", failed_at_s=time.monotonic())
    return outcomes


def send(member: Rank, message: bytes) -> None:
    with contextlib.suppress(OSError):  # a dead rank is reported where it is read from
        member.pipe.send_bytes(message)


def died(process: BaseProcess) -> Outcome:
    process.join(GRACE_S)
    return Outcome(
        failure=f"the process ended with code {process.exitcode}", failed_at_s=time.monotonic()
    )


def raise_first_failure(outcomes: dict[int, Outcome]) -> None:
    failed = sorted(
        (rank for rank in outcomes if outcomes[rank].failure),
        key=lambda rank: outcomes[rank].failed_at_s,
    )
    if failed:
        first, *others = failed
        lines = [f"rank {first} of {len(outcomes)} failed:", outcomes[first].failure.rstrip()]
        lines += [
            f"then rank {rank}: {outcomes[rank].failure.rstrip().splitlines()[-1]}"
            for rank in others
        ]
        raise RankFailed(first, "\n".join(lines))


def serve(pipe: Connection) -> None:
    """The life of a rank process: answer calls until the pipe ends, whatever Ctrl-C does to the
    parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="shardwise")
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(LEFT)
        while True:
            pipe.send_bytes(answer_to(pipe.recv_bytes()))
            assert pipe.recv_bytes() == LEAVE
            leave_group()
            pipe.send_bytes(LEFT)


def leave_group() -> None:
    """Leave the group, or what there is of one that could not be formed in time. Its name counts
    the groups of the process, and must be the same on a rank that is replaced and on its peers."""
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0


def answer_to(message: bytes) -> bytes:
    try:
        call: Call = pickle.loads(message)
        dist.init_process_group(
            "gloo",
            init_method=call.meeting_file.as_uri(),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout_s),
        )
        return pickle.dumps(Outcome(call.function(call.rank, call.world_size, *call.args)))
    except BaseException:  # sys.exit in the function is an outcome too
        failure = Outcome(failure=traceback.format_exc(), failed_at_s=time.monotonic())
    gc.collect()  # cycles among the frames that raised may hold the group's connections open
    return pickle.dumps(failure)
