"""What the ranks of tensor parallel do together: the first leads, the others follow, and if one
ends all do.

A run that fails on all ranks fails at the same place, so their collectives are still in step and
the request alone is at fault. One that fails on some is the end of the engine: the others wait in a
collective that nobody will join.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.kernels.serving_interface import ServingKernels
from shardwise.parallel.mesh import Axis, CollectiveFailed, Mesh
from shardwise.serve.engine.batch import Batch
from shardwise.serve.engine.runner import Ran, Runner

AGREE_S = 10.0
"""How long a rank whose run has failed waits to hear that those of the others have too."""
WATCH_S = 0.25

Command = tuple[str, Any] | None
"""What the ranks do together: ("run", batch), ("embed", tokens), ("wait", None); None: end."""
T = TypeVar("T")


class OutOfStep(CollectiveFailed):
    """A run failed on this rank and not on all; its cause is what this rank met."""


def agreement_of(mesh: Mesh) -> Axis:
    """On which ranks agree that they have failed, apart from the collectives of the model. All must
    call it."""
    tp = mesh.tp
    tp.barrier()  # nobody is waited for long, and so it is with making the group
    group = (
        dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_S)) if tp.size > 1 else None
    )
    return Axis("agreement", tp.rank, tp.size, torch.device("cpu"), group)


def attempt(run: Callable[[], T], agreement: Axis) -> T:
    """What `run` returns. Raises what it does if it fails on all ranks, and OutOfStep if it does
    not."""
    try:
        return run()
    except CollectiveFailed:
        raise
    except Exception as error:
        try:
            agreement.barrier()
        except CollectiveFailed:
            raise OutOfStep("a run failed on this rank alone") from error
        raise


def tell(tp: Axis, command: Command) -> None:
    """From the first rank to the others."""
    if tp.size > 1:
        tp.broadcast(pickle.dumps(command))


class Leader:
    """Rank 0's runner: what it does, it tells the others to do as well."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.agreement = agreement_of(runner.mesh)

    @property
    def kernels(self) -> ServingKernels:
        return self.runner.kernels

    def run(self, batch: Batch) -> Ran:
        tell(self.runner.mesh.tp, ("run", batch))
        return attempt(lambda: self.runner.run(batch), self.agreement)

    def embed(self, tokens: Sequence[int]) -> list[float]:
        tell(self.runner.mesh.tp, ("embed", list(tokens)))
        return attempt(lambda: self.runner.embed(tokens), self.agreement)

    def keep_alive(self) -> None:
        tell(self.runner.mesh.tp, ("wait", None))


def follow(runner: Runner) -> None:
    """Every other rank: what it is told, until the end."""
    agreement = agreement_of(runner.mesh)
    while (command := pickle.loads(runner.mesh.tp.broadcast(None))) is not None:
        try:
            attempt(partial(obey, runner, *command), agreement)
        except CollectiveFailed:
            raise
        except Exception:
            pass  # rank 0 met it too, and decides what becomes of the batch


def obey(runner: Runner, what: str, given: Any) -> None:
    if what == "run":
        runner.run(given)
    elif what == "embed":
        runner.embed(given)


def end_with(pids: Collection[int]) -> threading.Event:
    """Until the event is set, end this process soon after one of those has ended: a rank that waits
    in a collective, or for a request, may not notice by itself. A process that has ended is there
    until the one that started it knows."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_S):
            if not all(map(exists, pids)):
                os.kill(os.getpid(), signal.SIGKILL)

    if pids:
        threading.Thread(target=watch, name="the other ranks", daemon=True).start()
    return is_over


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
