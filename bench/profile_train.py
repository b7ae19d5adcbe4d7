"""Time of a training step by part, next to the limits of the machine."""

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
from shardwise.parallel.context import RingAttention
from shardwise.parallel.launch import Place, device_of, run_ranks
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.parallel.tensor import Conjugate
from shardwise.params import flops_per_token, model_specs
from shardwise.train.loop import take_step

Group = Literal["products", "attention", "logits", "communication", "optimizer", "rest"]
STEP = "step"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
OF_STORE: dict[str, Group] = {
    "gather": "communication", "need": "communication", "free": "communication",
    "reduce": "communication", "finish": "communication", "clip": "optimizer",
    "step": "optimizer",
}  # fmt: skip
"""Groups of the methods of a store. Communication includes waits, and casts to the dtype that is
sent."""
FUNCTIONS: dict[type[Function], Group] = {
    BlockedAttention: "attention", NativeCausalAttention: "attention",
    RingAttention: "attention", Conjugate: "communication", LinearCrossEntropy: "logits",
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
    """Rates of one rank while all ranks run at once.

    Attributes:
        product_flops: FLOP/s of a bf16 product of two 2048 x 2048 matrices.
        copy_bytes: Bytes read and written per second by a copy that fits in no cache.
        gather_bytes: Bytes received per second in an all-gather of the model's bf16 weights among
            all ranks; 0 with one rank.
    """

    product_flops: float
    copy_bytes: float
    gather_bytes: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on rank 0 by group, and the time that each would need at the machine's
    limits, where that is known.

    `products` are matrix products outside attention, including the head's; `logits` the other
    passes over the logits; `rest` norms, activations, RoPE, the embedding, sums of gradients, and
    Python. The threads of gloo slow all groups down. `step_s` is a step without the profiler, which
    slows the profiled one.
    """

    layout: str
    step_s: float
    seconds: dict[Group, float]
    needed: dict[Group, float]
    limits: Limits


def profile_layout(layout: Layout, workload: Workload = WORKLOAD) -> Breakdown:
    """Start the ranks of `layout`, take a few steps and profile one. Raises what `bench_layout`
    raises, and ValueError for fsdp and for GPUs."""
    check_bench(layout, workload)
    if layout.shard == "fsdp":
        raise ValueError(
            f"layout {layout}: the parts of PyTorch's fsdp cannot be separated; use z3 instead"
        )
    if device_of(0, layout.world_size).type != "cpu":
        raise ValueError(
            "the profile measures the time of CPUs; set CUDA_VISIBLE_DEVICES= to use them"
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
    start = time.perf_counter()
    take_step(program, mesh, next(batches), LR, MAX_NORM)
    wait_for_all(mesh)
    step_s = time.perf_counter() - start
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
    """Record the block with the store's methods marked; the yielded list gets the events."""
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
    """Make a method of this object record its time under the name of a group."""
    run: Callable[..., object] = getattr(owner, method)

    @wraps(run)
    def marked(*args: object, **options: object) -> object:
        with record_function(group):
            return run(*args, **options)

    setattr(owner, method, marked)


def group_seconds(events: Iterable[FunctionEvent]) -> dict[Group, float]:
    """Return the own time of the events of the step, on its thread, by group."""
    seconds: dict[Group, float] = dict.fromkeys(get_args(Group), 0.0)
    for event in events:
        around = names_around(event)
        if around[-1] == STEP:
            seconds[group_of(around)] += event.self_cpu_time_total / 1e6
    return seconds


def names_around(event: FunctionEvent) -> list[str]:
    """Return the names of an event and of those around it, innermost first."""
    around = event.cpu_parent
    return [event.name, *(names_around(around) if around is not None else [])]


def group_of(around: list[str]) -> Group:
    """Return the group of the innermost name that has one; a product of the head is a product,
    although it is inside the loss."""
    group = next((MARKED[name] for name in around if name in MARKED), None)
    if around[0] in PRODUCTS and group in (None, "logits"):
        return "products"
    return group or "rest"


def needed_seconds(
    mesh: Mesh, workload: Workload, sent_bytes: int, limits: Limits
) -> dict[Group, float]:
    """Return the time of each group at the machine's limits.

    Operations of the model run at the speed of a large product. Logits are read and written once in
    bf16. Bytes are sent at the speed of an all-gather. The optimizer reads and writes master weight
    and two moments in fp32, reads the gradient and writes the weight in bf16.
    """
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
    """Return the best of a few times, with all ranks working at once."""
    best = float("inf")
    for _ in range(LIMIT_TRIES):
        wait_for_all(mesh)
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
