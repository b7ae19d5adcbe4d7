"""The training loop: one for every layout. A layout without a pipeline is the schedule F0 B0 F1 B1
and so on."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.formats.run_checkpoint import checkpoint_path
from shardwise.parallel.launch import STOP_SIGNALS
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.program import Program
from shardwise.train.checkpoint import remove_old, save_checkpoint
from shardwise.train.data.batches import Batch, Batches, MicroBatch, TokenFile, held_out_batches
from shardwise.train.metrics import Meter, Metrics
from shardwise.train.optim import LearningRate
from shardwise.train.settings import OptimizerSettings, Settings
from shardwise.train.signals import StopRequest


@dataclass(frozen=True)
class Outcome:
    """Result of a run: the last step and the reason it stopped.

    Attributes:
        step: the last step whose result is in the weights
        loss: the loss of the last finite step; None before the first
        held_out_loss: the last finite held-out loss
        stopped: the number of the signal that stopped the run
        diverged: the step whose gradient or loss was not finite; it is not saved
        unsaved: why a checkpoint could not be written
    """

    step: int
    loss: float | None
    held_out_loss: float | None
    stopped: int | None = None
    diverged: int | None = None
    unsaved: str | None = None


def run_steps(
    settings: Settings,
    program: Program,
    mesh: Mesh,
    batches: Batches,
    meter: Meter,
    metrics: Metrics,
    stop: StopRequest,
    start: int,
) -> Outcome:
    """Run the steps after `start`, with metrics, tracing, evaluation and checkpoints on schedule.
    Stops at the last step, on a signal, on a non-finite result, or on a failed write."""
    run = settings.run
    lr = learning_rate(settings.optimizer, run.steps)
    outcome = Outcome(start, None, None)
    mesh.bytes_sent()  # reset counters: ignore startup traffic
    if run.eval_every and start == 0:
        metrics.held_out(0, evaluate(settings, program, mesh), mesh.bytes_sent())
    for step in range(start + 1, run.steps + 1):
        mesh.bytes_sent()  # count the bytes of this step
        mesh.trace.is_on = step == run.trace_step
        rate = lr.at(step - 1)
        taken = timed_step(program, mesh, batches, step, rate, settings.optimizer.max_norm, stop)
        if not math.isfinite(taken.norm):
            return replace(outcome, diverged=step)
        outcome = replace(outcome, step=step, loss=taken.loss)
        metrics.step(meter.read(step, taken.loss, taken.norm, rate, taken.seconds))
        if mesh.trace.is_on:
            log_trace(Path(run.folder), mesh, step, metrics)
        if is_due(step, run.eval_every) or (run.eval_every and step == run.steps):
            held_out_loss = evaluate(settings, program, mesh)
            metrics.held_out(step, held_out_loss, mesh.bytes_sent())
            if not math.isfinite(held_out_loss):
                return Outcome(step - 1, taken.loss, None, diverged=step)
            outcome = replace(outcome, held_out_loss=held_out_loss)
        if is_due(step, run.save_every) or step == run.steps or taken.stopped is not None:
            try:
                save(settings, program, mesh, step)
            except OSError as error:  # on every rank alike
                return replace(outcome, unsaved=str(error))
        if taken.stopped is not None:
            return replace(outcome, stopped=taken.stopped)
    return outcome


def log_trace(folder: Path, mesh: Mesh, step: int, metrics: Metrics) -> None:
    """Write the trace of a step. Imports the writer here: it draws timelines, which training does
    not need otherwise."""
    from shardwise.train.trace_writer import write_trace

    line = write_trace(folder, mesh, step)
    if line:
        metrics.log(f"step {step:>6}  {line}")


def is_due(step: int, every: int) -> bool:
    """Return whether `step` is one of every `every` steps; 0 is never."""
    return every > 0 and step % every == 0


class StepResult(NamedTuple):
    """One step over all ranks; `stopped` is the number of a signal that a rank received."""

    loss: float
    norm: float
    seconds: float
    stopped: int | None


def timed_step(
    program: Program,
    mesh: Mesh,
    batches: Batches,
    step: int,
    lr: float,
    max_norm: float,
    stop: StopRequest,
) -> StepResult:
    """Take step `step`, counting from 1, sum its loss over all ranks, and agree on whether to
    stop."""
    began = time.perf_counter()
    rank_loss, norm = take_step(program, mesh, batches.batch(step - 1), lr, max_norm)
    requests = [float(stop.signal == number) for number in STOP_SIGNALS]
    loss = global_loss(mesh, rank_loss)
    requests = mesh.world.sum(*requests)
    seconds = time.perf_counter() - began
    received = [int(number) for number, ranks in zip(STOP_SIGNALS, requests, strict=True) if ranks]
    return StepResult(loss, norm, seconds, received[0] if received else None)


def take_step(
    program: Program, mesh: Mesh, batch: Batch, lr: float, max_norm: float
) -> tuple[float, float]:
    """Take one optimizer step on a global batch. Returns this rank's term of the mean loss, and the
    norm of the gradient. The weights stay as they are if the norm is not finite."""
    batch = on_device(batch, mesh.device)
    scale = 1 / max(1.0, *mesh.dp.sum(batch.num_targets))  # gradients: scaled again by clipping
    span = mesh.trace.span
    with torch.no_grad():  # the executor enables gradients where it records a forward
        for action in program.table:
            with span(action):
                program.pipeline.execute(action, batch.microbatches, scale)
        with span("finish"):
            loss = program.pipeline.finish() * scale
            program.store.finish()
        with span("clip"):
            norm = program.store.clip(max_norm)
        if math.isfinite(norm):
            with span("optimizer"):
                program.store.step(lr)
    return loss, norm


def global_loss(mesh: Mesh, rank_loss: float) -> float:
    """Return the sum of the terms of a loss over the ranks that have the head, on all ranks."""
    return mesh.pp.sum(*mesh.data.sum(rank_loss))[0]


def evaluate(settings: Settings, program: Program, mesh: Mesh) -> float:
    """Return the mean loss over the held-out sequences, which is the same in every layout."""
    data = settings.data
    held_out = TokenFile(Path(data.folder), "held_out")
    num_rows = data.global_batch // (mesh.dp.size * mesh.layout.microbatches)
    summed_loss = num_targets = 0.0
    for batch in held_out_batches(
        held_out,
        data.seq_len,
        num_rows,
        mesh.dp.rank,
        mesh.dp.size,
        settings.run.eval_sequences,
        data.separate_documents,
    ):
        (microbatch,) = on_device(batch, mesh.device).microbatches
        summed_loss += program.pipeline.evaluate(program.evaluation, microbatch)
        num_targets += batch.num_targets
    return global_loss(mesh, summed_loss) / max(1.0, *mesh.dp.sum(num_targets))


def save(settings: Settings, program: Program, mesh: Mesh, step: int) -> None:
    path = checkpoint_path(Path(settings.run.folder), step)
    save_checkpoint(path, program.store, mesh, program.specs, step)
    if mesh.rank == 0 and settings.run.keep_checkpoints:
        remove_old(path, settings.run.keep_checkpoints)


def learning_rate(settings: OptimizerSettings, num_steps: int) -> LearningRate:
    return LearningRate(
        settings.lr,
        num_steps,
        settings.warmup_steps,
        settings.schedule,
        settings.final_lr,
        settings.decay_steps,
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device of the model."""
    if device.type == "cpu":
        return batch
    microbatches = tuple(moved(microbatch, device) for microbatch in batch.microbatches)
    return replace(batch, microbatches=microbatches)


def moved(microbatch: MicroBatch, device: torch.device) -> MicroBatch:
    documents = microbatch.documents
    return MicroBatch(
        microbatch.tokens.to(device),
        microbatch.targets.to(device),
        microbatch.positions.to(device),
        None if documents is None else documents.to(device),
    )
