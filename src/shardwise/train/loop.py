"""The training loop: one for every layout. A single stage is the pipeline F0 B0 F1 B1 ..."""

import math
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.config import ModelConfig
from shardwise.formats.load import open_weights
from shardwise.formats.run_checkpoint import Checkpoint, checkpoint_path
from shardwise.layout import Layout
from shardwise.model.layers import DTYPES
from shardwise.parallel.apply import Program, apply, draw_weights, read_weights
from shardwise.parallel.launch import STOP_SIGNALS, Place
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.offload import make_offload
from shardwise.parallel.pipeline.table_csv import read_csv
from shardwise.params import flops_per_token
from shardwise.train.checkpoint import load_state, remove_old, save_checkpoint
from shardwise.train.data import Batch, Batches, MicroBatch, TokenFile, held_out_batches
from shardwise.train.metrics import Meter, Metrics
from shardwise.train.optim import AdamW, LearningRate
from shardwise.train.settings import Settings
from shardwise.train.signals import StopRequest
from shardwise.train.trace_writer import write_trace


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` steps, `stopped` by a signal (its number), `diverged` at a step
    that is not finite and is not kept, `unsaved` (why) because a rank could not write, or done; the
    losses last seen."""

    step: int
    loss: float | None
    held_out_loss: float | None
    stopped: int | None = None
    diverged: int | None = None
    unsaved: str | None = None


def train(
    place: Place, settings: Settings, config: ModelConfig, weights: Path | None, resumed: int
) -> Outcome:
    """Train on this rank until the last step or a signal; every rank of the layout calls it. Saves
    at the end.

    `weights` is what to start from, None for weights drawn from the seed. With `resumed` above 0 it
    goes on from the checkpoint of that step in the run's folder.
    """
    run = settings.run
    folder = Path(settings.run.folder)
    mesh = make_mesh(Layout.parse(run.layout), place.rank, place.device, config.num_kv_heads)
    start = int(mesh.world.max(resumed)[0])  # under torchrun the first rank alone chose
    program = make_program(settings, config, mesh, weights, start)
    metrics = Metrics(folder, run.steps, start, run.tensorboard, active=place.rank == 0)
    metrics.say(f"kernels: {program.kernels}")
    try:
        with StopRequest(patient=place.world_size > 1) as stop:
            return run_steps(settings, program, mesh, metrics, stop, start)
    finally:
        metrics.close()


def run_steps(
    settings: Settings,
    program: Program,
    mesh: Mesh,
    metrics: Metrics,
    stop: StopRequest,
    start: int,
) -> Outcome:
    run = settings.run
    optimizer = settings.optimizer
    batches = make_batches(settings, mesh)
    lr = LearningRate(
        optimizer.lr,
        run.steps,
        optimizer.warmup_steps,
        optimizer.schedule,
        optimizer.final_lr,
        optimizer.decay_steps,
    )
    meter = make_meter(settings, program, mesh)
    loss = held_out_loss = stopped = None
    mesh.bytes_sent()  # what starting took is told nowhere
    if run.eval_every and start == 0:
        metrics.held_out(0, evaluate(settings, program, mesh), mesh.bytes_sent())
    for step in range(start + 1, run.steps + 1):
        rate = lr.at(step - 1)
        mesh.bytes_sent()  # from here on, those of this step
        mesh.trace.is_on = step == run.trace_step
        began = time.perf_counter()
        mine, norm = take_step(program, mesh, batches.batch(step - 1), rate, optimizer.max_norm)
        asked = [float(stop.signal == number) for number in STOP_SIGNALS]
        summed = all_loss(mesh, mine)
        asked = mesh.world.sum(*asked)
        seconds = time.perf_counter() - began
        if not math.isfinite(norm):
            return Outcome(step - 1, loss, held_out_loss, diverged=step)
        loss = summed
        stopped = next(
            (int(number) for number, ranks in zip(STOP_SIGNALS, asked, strict=True) if ranks), None
        )
        metrics.step(meter.read(step, loss, norm, rate, seconds))
        if mesh.trace.is_on and (told := write_trace(Path(run.folder), mesh, step)):
            metrics.say(f"step {step:>6}  {told}")
        last = step == run.steps or stopped is not None
        if run.eval_every and (step % run.eval_every == 0 or step == run.steps):
            held_out_loss = evaluate(settings, program, mesh)
            metrics.held_out(step, held_out_loss, mesh.bytes_sent())
            if not math.isfinite(held_out_loss):
                return Outcome(step - 1, loss, None, diverged=step)
        if last or (run.save_every and step % run.save_every == 0):
            try:
                save(settings, program, mesh, step)
            except OSError as error:  # on every rank alike
                return Outcome(step, loss, held_out_loss, unsaved=str(error))
        if stopped is not None:
            return Outcome(step, loss, held_out_loss, stopped)
    return Outcome(max(start, run.steps), loss, held_out_loss)


def take_step(
    program: Program, mesh: Mesh, batch: Batch, lr: float, max_norm: float
) -> tuple[float, float]:
    """One optimizer step on a global batch; returns this rank's term of its mean loss, and the
    gradient's norm. No step is taken with a norm that is not finite."""
    batch = on_device(batch, mesh.device)
    scale = 1 / max(1.0, *mesh.dp.sum(batch.num_targets))  # the only scaling of loss and gradients
    span = mesh.trace.span
    with torch.no_grad():  # F alone enables gradients
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


def all_loss(mesh: Mesh, mine: float) -> float:
    """The sum of what the ranks with a head have of a loss, on all ranks."""
    return mesh.pp.sum(*mesh.data.sum(mine))[0]


def evaluate(settings: Settings, program: Program, mesh: Mesh) -> float:
    """The mean loss over the held-out sequences, which is the same in every layout."""
    data = settings.data
    run = settings.run
    held_out = TokenFile(Path(data.folder), "held_out")
    rows = data.global_batch // (mesh.dp.size * mesh.layout.microbatches)
    summed = targets = 0.0
    for batch in held_out_batches(
        held_out,
        data.seq_len,
        rows,
        mesh.dp.rank,
        mesh.dp.size,
        run.eval_sequences,
        data.separate_documents,
    ):
        (microbatch,) = on_device(batch, mesh.device).microbatches
        summed += program.pipeline.evaluate(program.evaluation, microbatch)
        targets += batch.num_targets
    return all_loss(mesh, summed) / max(1.0, *mesh.dp.sum(targets))


def save(settings: Settings, program: Program, mesh: Mesh, step: int) -> None:
    path = checkpoint_path(Path(settings.run.folder), step)
    save_checkpoint(path, program.store, mesh, program.specs, step)
    if mesh.rank == 0 and settings.run.keep_checkpoints:
        remove_old(path, settings.run.keep_checkpoints)


def make_program(
    settings: Settings, config: ModelConfig, mesh: Mesh, weights: Path | None, resumed: int
) -> Program:
    optimizer = settings.optimizer
    dtype = DTYPES[settings.run.precision]
    run = settings.run
    grad_dtype = torch.float32 if run.gradients == "fp32" else dtype
    reduce_dtype = torch.float32 if run.reduction == "fp32" else grad_dtype
    update = AdamW(optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay).update
    offload = make_offload(run.offload, offload_folder(settings))
    schedule = read_csv(Path(run.pipeline_table)) if run.pipeline_table else None
    program = apply(
        config,
        mesh,
        dtype,
        grad_dtype,
        update,
        reduce_dtype,
        run.bucket_bytes,
        run.overlap,
        offload,
        schedule,
    )
    if resumed:
        checkpoint = Checkpoint(checkpoint_path(Path(run.folder), resumed), verify=False)
        load_state(checkpoint, program.store, program.specs)
    elif weights is None:
        draw_weights(program, run.seed)
    else:
        with closing(open_weights(weights, config)) as reader:
            read_weights(program, reader)
    return program


def offload_folder(settings: Settings) -> Path:
    """Where files with the optimizer's state lie. A link there puts them on another disk."""
    return Path(settings.run.folder) / "offload"


def make_batches(settings: Settings, mesh: Mesh) -> Batches:
    data = settings.data
    tokens = TokenFile(Path(data.folder), "train")
    return Batches(
        tokens,
        data.seq_len,
        data.global_batch,
        mesh.layout.microbatches,
        mesh.coord.dp,
        mesh.layout.dp,
        settings.run.seed,
        data.separate_documents,
    )


def make_meter(settings: Settings, program: Program, mesh: Mesh) -> Meter:
    tokens = settings.data.global_batch * settings.data.seq_len
    return Meter(
        mesh,
        tokens,
        flops_per_token(program.config, settings.data.seq_len),
        DTYPES[settings.run.precision],
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is."""
    if device.type == "cpu":
        return batch
    return replace(
        batch, microbatches=tuple(move(microbatch, device) for microbatch in batch.microbatches)
    )


def move(microbatch: MicroBatch, device: torch.device) -> MicroBatch:
    documents = microbatch.documents
    return MicroBatch(
        microbatch.tokens.to(device),
        microbatch.targets.to(device),
        microbatch.positions.to(device),
        None if documents is None else documents.to(device),
    )
