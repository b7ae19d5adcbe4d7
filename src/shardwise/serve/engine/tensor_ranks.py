"""Tensor-parallel ranks of the engine: rank 0 drives, the others run a worker loop, and if one ends
all do.

A step that fails on all ranks fails at the same place, so their collectives are still in step and
only the request is at fault. A step that fails on some ranks ends the engine: the others wait in a
collective that will never complete.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from shardwise.kernels.serving_interface import ServingKernels
from shardwise.parallel.mesh import Axis, CollectiveFailed, control_axis
from shardwise.serve.engine.runner import Logits, PromptLogprobs, Runner
from shardwise.serve.engine.sequence import Batch

AGREE_S = 10.0
"""Seconds that a rank whose step has failed waits for the other ranks to report theirs."""
WATCH_S = 0.25
"""Interval at which a rank checks that the other ranks' processes exist."""
BLAME_S = 1.0
"""Seconds between the end of one rank and that of the others; the launcher looks every 0.05 s."""

Command = tuple[str, Any] | None
"""A step of all ranks: ("run", batch), ("embed", inputs) or ("wait", None); None ends the loop."""
T = TypeVar("T")


class OutOfStep(CollectiveFailed):
    """A step failed on this rank and not on all; its cause is the failure of this rank."""


def failure_axis(tp: Axis) -> Axis:
    """Return an axis on which ranks agree that a step has failed, apart from the collectives of the
    model. All ranks must call it.
    """
    tp.barrier()  # making the group has the short timeout too, so ranks must arrive together
    return control_axis(tp, "agreement", AGREE_S)


def run_on_all(run: Callable[[], T], agreement: Axis) -> T:
    """Return what `run` returns. Raises its error if it fails on all ranks, else OutOfStep."""
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


def broadcast_command(tp: Axis, command: Command) -> None:
    """Send a command from rank 0 to the worker loops of the others."""
    if tp.size > 1:
        tp.broadcast(pickle.dumps(command))


class DriverRunner:
    """The runner of rank 0, which makes all other ranks run the same step."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.agreement = failure_axis(runner.mesh.tp)

    @property
    def kernels(self) -> ServingKernels:
        return self.runner.kernels

    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]:
        broadcast_command(self.runner.mesh.tp, ("run", batch))
        return run_on_all(lambda: self.runner.run(batch), self.agreement)

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        broadcast_command(self.runner.mesh.tp, ("embed", inputs))
        return run_on_all(lambda: self.runner.embed(inputs), self.agreement)

    def keep_alive(self) -> None:
        """Let the other ranks' wait for a command start over, before it times out."""
        broadcast_command(self.runner.mesh.tp, ("wait", None))


def worker_loop(runner: Runner) -> None:
    """Execute the commands of rank 0 on another rank, until the end."""
    agreement = failure_axis(runner.mesh.tp)
    while (command := pickle.loads(runner.mesh.tp.broadcast(None))) is not None:
        try:
            run_on_all(partial(execute_command, runner, *command), agreement)
        except CollectiveFailed:
            raise
        except Exception:
            pass  # rank 0 has met it too, and decides what to do with the batch


def execute_command(runner: Runner, command: str, argument: Any) -> None:
    if command == "run":
        runner.run(argument)
    elif command == "embed":
        runner.embed(argument)


def end_with(pids: Collection[int]) -> threading.Event:
    """End this process soon after one of `pids` has ended, until the returned event is set.

    A rank that waits in a collective, or for a request, may not notice by itself. It waits for
    BLAME_S, in which the launcher finds the rank that ended first, and names it.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_S):
            if not all(map(process_exists, pids)):
                is_over.wait(BLAME_S)
                os.kill(os.getpid(), signal.SIGKILL)

    if pids:
        threading.Thread(target=watch, name="the other ranks", daemon=True).start()
    return is_over


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
