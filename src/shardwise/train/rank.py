"""Training on one rank: builds its program, data and metrics, and runs the loop."""

from contextlib import closing
from pathlib import Path

import torch

from shardwise.formats.run_checkpoint import Checkpoint, checkpoint_path
from shardwise.kernels.description import describe_kernels
from shardwise.model.layers import DTYPES
from shardwise.parallel.apply import apply, draw_weights, read_weights
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.offload import make_offload
from shardwise.parallel.pipeline.table_csv import read_csv
from shardwise.parallel.program import Program
from shardwise.params import flops_per_token
from shardwise.precision import accumulates_in_fp32
from shardwise.train.checkpoint import load_state
from shardwise.train.data.batches import Batches, TokenFile
from shardwise.train.loop import Outcome, run_steps
from shardwise.train.metrics import Meter, Metrics
from shardwise.train.optim import AdamW
from shardwise.train.planned_memory import out_of_memory
from shardwise.train.settings import OptimizerSettings, Run, Settings
from shardwise.train.signals import StopRequest


class OutOfMemory(Exception):
    """A rank ran out of memory; the message says what the plan counted and what to try."""


def train(place: Place, run: Run, resumed: int) -> Outcome:
    """Train on this rank until the last step or a signal, and save. Every rank of the layout calls
    it. A run continues from its checkpoint of step `resumed`, if that is above 0. Raises
    OutOfMemory."""
    try:
        return train_to_end(place, run, resumed)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(out_of_memory(run)) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device or the machine had no memory left; torch's CPU allocator raises a
    plain RuntimeError."""
    is_named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_named or "can't allocate memory" in str(error)


def train_to_end(place: Place, run: Run, resumed: int) -> Outcome:
    settings = run.settings.run
    mesh = make_mesh(run.layout, place.rank, place.device, run.config.num_kv_heads)
    start = int(mesh.world.max(resumed)[0])  # under torchrun only the first rank looked
    program = make_program(run, mesh, start)
    folder = Path(settings.folder)
    active = place.rank == 0
    shows_mfu = place.device.type == "cuda"
    metrics = Metrics(folder, settings.steps, start, settings.tensorboard, active, shows_mfu)
    kernels = describe_kernels(program.kernels, place.device.type, settings.precision)
    metrics.log(f"kernels: {kernels}")
    try:
        with StopRequest(patient=place.world_size > 1) as stop:
            batches = make_batches(run.settings, mesh)
            meter = make_meter(run.settings, program, mesh)
            return run_steps(run.settings, program, mesh, batches, meter, metrics, stop, start)
    finally:
        metrics.close()


def make_program(run: Run, mesh: Mesh, step: int) -> Program:
    """Build the program of this rank, with the state of the checkpoint of `step`, or with the first
    weights if that is 0."""
    settings = run.settings.run
    dtype = DTYPES[settings.precision]
    in_fp32 = accumulates_in_fp32(settings.gradients, run.layout.microbatches)
    grad_dtype = torch.float32 if in_fp32 else dtype
    program = apply(
        run.config,
        mesh,
        dtype,
        grad_dtype,
        make_optimizer(run.settings.optimizer).update,
        torch.float32 if settings.reduction == "fp32" else grad_dtype,
        settings.bucket_bytes,
        settings.overlap,
        make_offload(settings.offload, offload_folder(run.settings)),
        read_csv(Path(settings.pipeline_table)) if settings.pipeline_table else None,
    )
    if step:
        checkpoint = Checkpoint(checkpoint_path(Path(settings.folder), step), verify=False)
        load_state(checkpoint, program.store, program.specs)
    elif run.weights is None:
        draw_weights(program, settings.seed)
    else:
        from shardwise.formats.load import open_weights  # reads every format; most runs need none

        with closing(open_weights(run.weights, run.config)) as reader:
            read_weights(program, reader)
    return program


def offload_folder(settings: Settings) -> Path:
    """Return the folder of files with optimizer states. A link there puts them on another disk."""
    return Path(settings.run.folder) / "offload"


def make_optimizer(settings: OptimizerSettings) -> AdamW:
    return AdamW(settings.beta1, settings.beta2, settings.eps, settings.weight_decay)


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
    flops = flops_per_token(program.config, settings.data.seq_len)
    return Meter(mesh, tokens, flops, DTYPES[settings.run.precision])
