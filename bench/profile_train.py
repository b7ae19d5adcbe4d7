"""Where the time of a training step goes, next to what the machine allows."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Literal, get_args

import torch
from torch.autograd import Function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record

from shardwise.kernels.native.training import NativeCausalAttention
from shardwise.kernels.reference.attention import BlockedAttention
from shardwise.layout import Layout
from shardwise.measure.train_step import (
    LR,
    MAX_NORM,
    WARMUP_STEPS,
    WORKLOAD,
    Workload,
    bench_program,
    check_bench,
    random_batches,
    wait_for_all,
)
from shardwise.model.loss import LinearCrossEntropy
from shardwise.parallel.apply import Program
from shardwise.parallel.context import RingAttention
from shardwise.parallel.launch import Place, device_of, run_ranks
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.tensor import Conjugate
from shardwise.params import flops_per_token, model_specs
from shardwise.train.loop import take_step

Group = Literal["products", "attention", "logits", "communication", "optimizer", "rest"]
STEP = "step"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
OF_STORE: dict[str, Group] = {
    "gather": "communication", "need": "communication", "free": "communication", "reduce": "communication",
    "finish": "communication", "clip": "optimizer", "step": "optimizer",
}  # fmt: skip
"""What the methods of a store are for: waiting, and casts for the wire, are part of
communication."""
FUNCTIONS: dict[type[Function], Group] = {
    BlockedAttention: "attention", NativeCausalAttention: "attention", RingAttention: "attention", Conjugate: "communication",
    LinearCrossEntropy: "logits",
}  # fmt: skip
OF_FUNCTION: dict[str, Group] = {
    f"{function.__name__}{way}": group
    for way in ("", "Backward")
    for function, group in FUNCTIONS.items()
}
MARKED: dict[str, Group] = OF_FUNCTION | {group: group for group in OF_STORE.values()}
PRODUCT_SIZE = 2048
COPY_ELEMENTS = 1 << 25
LIMIT_TRIES = 5


@dataclass(frozen=True)
class Limits:
    """What one rank reaches while all of them try at once."""

    product_flops: float
    """Of a bf16 product of two 2048 x 2048 matrices, a second."""
    copy_bytes: float
    """Read and written in a second by a copy of what no cache holds."""
    gather_bytes: float
    """Received in a second in an all-gather of the model's weights in bf16 among all ranks; 0 with
    one."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on rank 0, by what they are for, and what each would need at the
    machine's limit where that can be said.

    `products` are matrix products outside attention, the head's too; `logits` the passes over the
    logits between them; `rest` norms, activations, rotations, the embedding, sums of gradients, and
    Python. What gloo does beside the step takes its time from all of them. `step_s` is a step
    without the profiler, which itself slows the profiled one.
    """

    layout: str
    step_s: float
    seconds: dict[Group, float]
    needed: dict[Group, float]
    limits: Limits


def profile_layout(layout: Layout, workload: Workload = WORKLOAD) -> Breakdown:
    """Start the ranks of `layout`, take a few steps and profile one. Raises as `bench_layout`
    does."""
    check_bench(layout, workload)
    if layout.shard == "fsdp":
        raise ValueError(
            f"layout {layout}: the parts of PyTorch's fsdp cannot be told apart; z3 in its place works"
        )
    if device_of(0, layout.world_size).type != "cpu":
        raise ValueError(
            "the profile reads the time of CPUs; with CUDA_VISIBLE_DEVICES= in front it works"
        )
    breakdown: Breakdown = run_ranks(profile_rank, layout.world_size, layout, workload)
    return breakdown


def profile_rank(place: Place, layout: Layout, workload: Workload) -> Breakdown:
    mesh = make_mesh(layout, place.rank, place.device, workload.config.num_kv_heads)
    program = bench_program(mesh, workload)
    batches = random_batches(mesh, workload)
    for _ in range(WARMUP_STEPS):
        take_step(program, mesh, next(batches), LR, MAX_NORM)
    wait_for_all(mesh)
    began = time.perf_counter()
    take_step(program, mesh, next(batches), LR, MAX_NORM)
    wait_for_all(mesh)
    step_s = time.perf_counter() - began
    mesh.bytes_sent()
    with profiled(program, active=place.rank == 0) as events, record_function(STEP):
        take_step(program, mesh, next(batches), LR, MAX_NORM)
    sent = sum(num for axis, num in mesh.bytes_sent().items() if axis != "control")
    limits = measure_limits(mesh, workload)
    return Breakdown(
        str(layout),
        step_s,
        group_seconds(events),
        needed_seconds(mesh, workload, sent, limits),
        limits,
    )


@contextmanager
def profiled(program: Program, active: bool) -> Iterator[list[FunctionEvent]]:
    """Record the block with the store's methods marked; yields the list that holds the events
    afterwards."""
    events: list[FunctionEvent] = []
    if not active:
        yield events
        return
    for method, group in OF_STORE.items():
        mark(program.store, method, group)
    with record(activities=[ProfilerActivity.CPU]) as recorded:
        yield events
    events += recorded.events()


def mark(owner: object, method: str, group: Group) -> None:
    """Let a method of this one object record its time under the name of a group."""
    run: Callable[..., object] = getattr(owner, method)

    @wraps(run)
    def marked(*args: object, **options: object) -> object:
        with record_function(group):
            return run(*args, **options)

    setattr(owner, method, marked)


def group_seconds(events: Iterable[FunctionEvent]) -> dict[Group, float]:
    """The time spent in each event itself, by the group it belongs to. Only within the step, and on
    its thread."""
    seconds: dict[Group, float] = dict.fromkeys(get_args(Group), 0.0)
    for event in events:
        around = names_around(event)
        if around[-1] == STEP:
            seconds[group_of(around)] += event.self_cpu_time_total / 1e6
    return seconds


def names_around(event: FunctionEvent) -> list[str]:
    """The names of an event and of those around it, from the inside out."""
    around = event.cpu_parent
    return [event.name, *(names_around(around) if around is not None else [])]


def group_of(around: list[str]) -> Group:
    """That of the nearest name which has one; a product of the head is one, though the loss stands
    around it."""
    group = next((MARKED[name] for name in around if name in MARKED), None)
    if around[0] in PRODUCTS and group in (None, "logits"):
        return "products"
    return group or "rest"


def needed_seconds(
    mesh: Mesh, workload: Workload, sent_bytes: int, limits: Limits
) -> dict[Group, float]:
    """At the machine's limits: the model's operations at the speed of a large product; one reading
    and writing of the logits in bf16; the bytes sent at the speed of an all-gather; one reading and
    writing of what the optimizer touches (master weight and two moments in fp32, and the gradient
    read and the weight written in bf16)."""
    layout = mesh.layout
    config = workload.config
    tokens = (
        workload.sequences
        * workload.length
        * layout.microbatches
        / (layout.tp * layout.pp * layout.cp)
    )
    multiplied = flops_per_token(config, 0)
    seen = flops_per_token(config, workload.length)
    owned = sum(spec.numel for spec in model_specs(config) if not spec.tied_to) / (
        layout.tp * layout.pp
    )
    needed: dict[Group, float] = {
        "products": tokens * multiplied / limits.product_flops,
        "attention": tokens * (seen - multiplied) / limits.product_flops,
        "logits": tokens * config.vocab_size * 4 / limits.copy_bytes,
        "optimizer": owned / layout.shard_size * 28 / limits.copy_bytes,
    }
    return needed | (
        {"communication": sent_bytes / limits.gather_bytes} if limits.gather_bytes else {}
    )


def measure_limits(mesh: Mesh, workload: Workload) -> Limits:
    x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=mesh.device).bfloat16()
    product_s = best_s(mesh, lambda: x @ x)
    source = torch.zeros(COPY_ELEMENTS, device=mesh.device)
    target = torch.zeros_like(source)
    copy_s = best_s(mesh, lambda: target.copy_(source))
    size = mesh.world.size
    rank = mesh.world.rank
    numel = sum(spec.numel for spec in model_specs(workload.config) if not spec.tied_to)
    parts = torch.zeros(size, -(-numel // size), dtype=torch.bfloat16, device=mesh.device)
    gather_s = best_s(
        mesh, lambda: mesh.world.all_gather(parts[rank].clone(), parts.view(-1)).wait()
    )
    received = parts[0].nbytes * (size - 1)
    return Limits(2 * PRODUCT_SIZE**3 / product_s, 2 * source.nbytes / copy_s, received / gather_s)


def best_s(mesh: Mesh, work: Callable[[], object]) -> float:
    """The best time of a few, all ranks working at once."""
    best = float("inf")
    for _ in range(LIMIT_TRIES):
        wait_for_all(mesh)
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
