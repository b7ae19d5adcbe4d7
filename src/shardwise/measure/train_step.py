"""Benchmark of a training step: tokens per second and memory of any layout on this machine, on one
workload, so that layouts and other software can be compared."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardwise.config import ModelConfig
from shardwise.formats.families import LLAMA
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.kernels.training_registry import training_kernels
from shardwise.layout import Layout
from shardwise.measure.workload import StepSizes
from shardwise.parallel.apply import apply, check_trainable, draw_weights
from shardwise.parallel.launch import Place, device_of, run_ranks
from shardwise.parallel.memory import peak_memory_bytes, peak_resident_bytes, reset_peaks
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.plan.ledger import training_ledgers
from shardwise.train.data.batches import Batch, MicroBatch
from shardwise.train.loop import global_loss, take_step
from shardwise.train.optim import AdamW
from shardwise.train.signals import StopRequest
from shardwise.train.validate import check_batch, check_fits, check_joined

WARMUP_STEPS = 2
LR = 3e-4
MAX_NORM = 1.0


@dataclass(frozen=True)
class Workload:
    """A model and its micro-batches: `sequences` of `length` random tokens per data rank. Training
    is in bf16 with fp32 master weights."""

    config: ModelConfig
    sequences: int
    length: int


SHAPE = {
    "model_type": LLAMA.model_type,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
WORKLOAD = Workload(from_hugging_face(SHAPE), StepSizes.sequences, StepSizes.length)
"""70.8 M parameters; 435 GFLOP of matrix products per step and data rank."""


@dataclass(frozen=True)
class Measured:
    """Mean figures of the timed steps.

    Attributes:
        peak_resident_bytes: peak memory of the process of the rank that used most
        peak_gpu_bytes: peak memory of its GPU; None without one
        comm_bytes: bytes that rank 0 sent per step
        loss: the loss of the last step, the same in layouts of as many data ranks
        stopped: the number of the signal that ended it early; nothing else is then valid
    """

    step_s: float
    tokens_per_s: float
    peak_resident_bytes: int
    peak_gpu_bytes: int | None
    comm_bytes: int
    loss: float
    stopped: int | None = None


def bench_layout(layout: Layout, steps: int, workload: Workload) -> Measured:
    """Start the ranks of `layout` on this machine, or join those of torchrun, and time `steps`
    steps after a warm-up.

    Raises ValueError, before anything starts, for a layout that cannot train the workload or does
    not fit in memory; RankFailed or Stopped as `run_ranks` does.
    """
    check_bench(layout, workload)
    measured: Measured = run_ranks(measure, layout.world_size, layout, steps, workload)
    return measured


def check_bench(layout: Layout, workload: Workload) -> None:
    """Raise ValueError if a layout cannot run the workload on this machine."""
    check_trainable(layout, workload.config)
    training_kernels(device_of(0, layout.world_size), torch.bfloat16)
    length = workload.length
    positions = workload.config.max_positions
    if length > positions:
        raise ValueError(
            f"sequences of {length} tokens exceed the model's context length of {positions}"
        )
    check_joined(layout)
    states = max(stage.state_bytes for stage in training_ledgers(workload.config, layout))
    device = device_of(0, layout.world_size)
    check_fits(f"training with {layout}", states, layout, device)
    check_batch(
        workload.sequences * layout.microbatches * layout.dp, workload.length, layout, device
    )


def measure(place: Place, layout: Layout, steps: int, workload: Workload) -> Measured:
    """Time the steps on one rank; every rank returns the same, except for `comm_bytes`."""
    reset_peaks(place.device)
    mesh = make_mesh(layout, place.rank, place.device, workload.config.num_kv_heads)
    program = bench_program(mesh, workload)
    batches = random_batches(mesh, workload)
    with StopRequest(patient=place.world_size > 1) as stop:
        for _ in range(WARMUP_STEPS):
            take_step(program, mesh, next(batches), LR, MAX_NORM)
        wait_for_all(mesh)
        mesh.bytes_sent()
        began = time.perf_counter()
        for _ in range(steps):
            loss, _ = take_step(program, mesh, next(batches), LR, MAX_NORM)
            stopped = int(mesh.world.max(float(stop.signal or 0))[0])  # agree, as in training
            if stopped:
                return Measured(0.0, 0.0, 0, None, 0, 0.0, stopped)
        wait_for_all(mesh)
        step_s = (time.perf_counter() - began) / steps
    sent = mesh.bytes_sent()
    tokens = workload.sequences * workload.length * layout.microbatches * layout.dp
    resident, gpu = mesh.world.max(peak_resident_bytes(), peak_memory_bytes(mesh.device))
    return Measured(
        step_s,
        tokens / step_s,
        int(resident),
        int(gpu) if mesh.device.type == "cuda" else None,
        sum(sent[axis] for axis in ("dp", "tp", "pp", "cp")) // steps,
        global_loss(mesh, loss),
    )


def bench_program(mesh: Mesh, workload: Workload) -> Program:
    program = apply(workload.config, mesh, torch.bfloat16, torch.bfloat16, AdamW().update)
    draw_weights(program, seed=0)
    return program


def random_batches(mesh: Mesh, workload: Workload) -> Iterator[Batch]:
    """Yield batches of random tokens, different for each step and data rank, all with a target."""
    random = torch.Generator().manual_seed(1 + mesh.coord.dp)
    shape = workload.sequences, workload.length + 1
    positions = torch.arange(workload.length).expand(workload.sequences, -1)
    num_microbatches = mesh.layout.microbatches
    while True:
        drawn = [
            torch.randint(workload.config.vocab_size, shape, generator=random)
            for _ in range(num_microbatches)
        ]
        cut = (
            MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, None)
            for ids in drawn
        )
        yield Batch(tuple(cut), num_microbatches * workload.sequences * workload.length)


def wait_for_all(mesh: Mesh) -> None:
    """Wait until every rank and its device are done."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    mesh.world.barrier()
