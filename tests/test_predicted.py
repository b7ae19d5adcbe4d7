"""Predicted = executed: what the planner says that a rank holds and sends, against real steps, byte
for byte."""

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise.parallel.mesh as mesh_module
import shardwise.parallel.pipeline.schedules as schedules_module
from examples import examples
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.layout import Layout
from shardwise.model import loss
from shardwise.model.layers import DTYPES
from shardwise.parallel.apply import apply
from shardwise.parallel.mesh import Axis, Mesh, Pending, make_mesh
from shardwise.parallel.pipeline.actions import (
    BUCKET_BYTES,
    Action,
    accumulate,
    lower,
    model_pieces,
    rank_pieces,
    stage_pieces,
)
from shardwise.parallel.pipeline.schedules import step_table
from shardwise.parallel.program import Program
from shardwise.parallel.zero import Store
from shardwise.params import model_specs, num_params, stage_units
from shardwise.plan import traffic
from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.buffers import Moment, moments
from shardwise.plan.ledger import (
    STATES,
    Precision,
    computed_bytes,
    element_bytes,
    shard_sizes,
    training_ledgers,
    unit_sizes,
)
from shardwise.plan.traffic import CommBytes, comm_bytes, data_bytes, pipeline_bytes, step_counts
from shardwise.precision import GradientPrecision
from shardwise.shards import local_shape
from shardwise.train.loop import take_step
from tiny_training import (
    FAMILIES,
    OPTIMIZER,
    RATE,
    SEQ_LEN,
    SEQUENCES,
    VOCAB,
    fill_store,
    global_batch,
    part_of,
    tiny_weights,
)

CPU = torch.device("cpu")
PRIMES = ModelConfig("llama", 3, 13, 17, 3, 1, 6, 97, 32)
MODELS = FAMILIES | {"primes": PRIMES, "primes-tied": replace(PRIMES, tied=True, num_layers=2)}
MODELS |= {
    "deep": replace(PRIMES, tied=True, num_layers=5),
    "deep-gpt2": replace(FAMILIES["gpt2"], num_layers=5),
}
DTYPE_CHOICES: list[tuple[Precision, GradientPrecision]] = [
    ("bf16", "same"),
    ("bf16", "fp32"),
    ("fp32", "same"),
]


# -- what a run does


@dataclass(frozen=True)
class Measured:
    """Of one rank, in bytes: what the store holds after each action of the last step's table, and
    after that step; the most at one time, with rows that arrive and copies of rows that are sent;
    what each step sends."""

    after_actions: list[dict[str, int]]
    after_step: dict[str, int]
    peak: int
    sent: list[dict[str, int]]


class Watch:
    """Follows what a store holds, and what its sums hold besides, from inside a step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.after_actions: list[dict[str, int]] = []
        self.arriving = self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, sum(self.program.store.held_bytes().values()) + self.arriving)

    def step(self, mesh: Mesh, step: int) -> None:
        """One step as training takes it, with a look after every contribution, action and
        allocation for a sum."""
        program = self.program
        store = self.program.store
        execute = self.program.pipeline.execute
        assert isinstance(store, Store)
        self.after_actions.clear()

        def executed(action: Action, *given: Any) -> None:
            execute(action, *given)
            self.after_actions.append(store.held_bytes())
            self.look()

        layout = mesh.layout
        batch = part_of(
            *global_batch(step, layout.dp * layout.microbatches), layout, mesh.data.rank
        )
        with (
            patch.object(mesh_module, "torch", WatchedTorch(self)),
            patch.object(program.pipeline, "execute", executed),
            patch.object(store, "add", added(store, self)),
            patch.object(Axis, "reduce_scatter", scattered(store, self)),
        ):
            take_step(program, mesh, batch, RATE.at(step), 0.5)
        self.look()


@dataclass(frozen=True)
class WatchedTorch:
    """torch, as the axes see it, but what they allocate is counted."""

    watch: Watch

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, like: Tensor) -> Tensor:
        self.watch.arriving += like.nbytes
        self.watch.look()
        return torch.empty_like(like)


def scattered(store: Store, watch: Watch) -> Any:
    """A reduce-scatter whose buffers count until the store lets go of what was to be done once they
    had arrived."""
    reduce_scatter = Axis.reduce_scatter

    def watched(axis: Axis, x: Tensor, *given: Any) -> Pending:
        before = watch.arriving
        units = store.units.values()
        own = {
            flat.untyped_storage().data_ptr()
            for unit in units
            for flat in (unit.grads, unit.grad_shard)
        }
        if x.untyped_storage().data_ptr() not in own:  # a copy of what is sent
            watch.arriving += x.nbytes
        pending = reduce_scatter(axis, x, *given)
        weakref.finalize(pending.then, forget, watch, watch.arriving - before)
        return pending

    return watched


def forget(watch: Watch, num_bytes: int) -> None:
    watch.arriving -= num_bytes


def added(store: Store, watch: Watch) -> Any:
    add = store.add

    def look_after(name: str, grad: Tensor) -> None:
        add(name, grad)
        watch.look()

    return look_after


def ready(
    rank: int,
    short: str,
    model: str,
    precision: Precision,
    gradients: GradientPrecision,
    bucket_bytes: int,
    overlap: bool,
) -> tuple[Program, Mesh]:
    config = MODELS[model]
    mesh = make_mesh(Layout.parse(short), rank, CPU, config.num_kv_heads)
    grad_dtype = DTYPES[precision] if gradients == "same" else DTYPES[gradients]
    program = apply(
        config,
        mesh,
        DTYPES[precision],
        grad_dtype,
        OPTIMIZER.update,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
    )
    fill_store(program.store, tiny_weights(config))
    return program, mesh


def steps_on(
    rank: int,
    world: int,
    short: str,
    model: str,
    precision: Precision,
    gradients: GradientPrecision,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
) -> Measured:
    program, mesh = ready(rank, short, model, precision, gradients, bucket_bytes, overlap)
    watch = Watch(program)
    sent = []
    for step in range(2):
        mesh.bytes_sent()
        watch.step(mesh, step)
        sent.append(mesh.bytes_sent())
    return Measured(watch.after_actions, program.store.held_bytes(), watch.peak, sent)


# -- against what is planned


@dataclass(frozen=True)
class Planned:
    states: dict[str, int]
    buffers: list[Moment]
    sent: dict[str, int | None]

    @property
    def peak(self) -> int:
        return sum(self.states.values()) + max(moment.total for moment in self.buffers)


def planned(
    short: str,
    config: ModelConfig,
    precision: Precision,
    gradients: GradientPrecision,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    stage: int = 0,
) -> Planned:
    layout = Layout.parse(short)
    ledger = training_ledgers(config, layout, precision, gradients)[stage]
    shards = shard_sizes(config, layout)
    held = stage_units(config, layout, stage)
    whole = {unit: size * layout.shard_size for unit, size in shards.items() if unit in held}
    table = step_table(config, layout, stage, layout.microbatches, overlap)
    pieces = rank_pieces(stage_pieces(config, layout), layout, stage)
    found = list(
        moments(
            table,
            pieces,
            layout,
            whole,
            computed_bytes(precision),
            element_bytes(layout, precision, gradients).gradients,
            bucket_bytes,
            overlap,
        )
    )
    if (bucket_bytes, overlap) == (BUCKET_BYTES, True):
        assert max(moment.total for moment in found) == ledger.rows["buffers"]
    sent = comm_bytes(config, layout, precision, gradients)
    if layout.pp > 1:
        sent = stage_bytes(config, layout, precision, gradients, stage)
    return Planned({row: ledger.rows[row] for row in STATES}, found, sent)


def stage_bytes(
    config: ModelConfig,
    layout: Layout,
    precision: Precision,
    gradients: GradientPrecision,
    stage: int,
) -> CommBytes:
    """What a rank of this stage sends to data ranks and to other stages, where a micro-batch is one
    sequence."""
    times = step_counts(config, layout, stage)
    microbatch = MicroBatchShape(1, SEQ_LEN)
    return {
        "dp": data_bytes(config, layout, stage, precision, gradients, times),
        "pp": pipeline_bytes(config, layout, stage, microbatch, computed_bytes(precision), times),
    }


def check_equal(measured: Measured, plan: Planned) -> None:
    assert measured.after_step == plan.states
    for sent in measured.sent:
        assert {axis: sent[axis] for axis in plan.sent} == plan.sent
    after = {moment.at: moment for moment in plan.buffers}  # the last moment of each action
    for at, held in enumerate(measured.after_actions):
        there = {"parameters": after[at].weights, "gradients": after[at].gradients, "optimizer": 0}
        assert held == {row: plan.states[row] + there[row] for row in STATES}, f"after action {at}"
    assert measured.peak == plan.peak


LAYOUTS = [
    *("dp1", "dp1.z3.m2", "dp3.m2"),
    *("dp2.z1.m3", "dp4.z1.s2"),
    *("dp3.z2", "dp4.z2.s2.m2", "dp2.z2.s1.m2"),
    *("dp3.z3.m2", "dp4.z3.s2.m2", "dp2.z3.s1.m2"),
    *("dp2.z3.keep.m2", "dp4.z3.s2.keep.m3"),
]


def every_dtype_on(rank: int, world: int, short: str, model: str) -> list[Measured]:
    return [steps_on(rank, world, short, model, *choice) for choice in DTYPE_CHOICES]


@pytest.mark.parametrize("short", LAYOUTS)
def test_measured_bytes_equal_the_plan(ranks: Ranks, short: str) -> None:
    """On every rank, in bf16 (gradients in either) and fp32: what is held after each action and
    after a step, the most held at any moment with rows that arrive, and what is sent in a step. No
    difference is left to name."""
    plans = [planned(short, MODELS["primes-tied"], *choice) for choice in DTYPE_CHOICES]
    for measured in ranks.run(Layout.parse(short).world_size, every_dtype_on, short, "primes-tied"):
        for each, plan in zip(measured, plans, strict=True):
            check_equal(each, plan)


@pytest.mark.parametrize(
    ("short", "model"),
    [("dp4.z3.s2", model) for model in ("gpt2", "qwen2", "primes")] + [("dp3.z2.m2", "qwen3")],
)
def test_every_family(ranks: Ranks, short: str, model: str) -> None:
    plan = planned(short, MODELS[model], "bf16", "same")
    for measured in ranks.run(
        Layout.parse(short).world_size, steps_on, short, model, "bf16", "same"
    ):
        check_equal(measured, plan)


@pytest.mark.parametrize(
    ("bucket_bytes", "overlap", "short"),
    [
        (500, True, short)
        for short in ("dp3.m2", "dp2.z1", "dp3.z2.m2", "dp4.z3.s2.m2", "dp2.z2.s1.m2")
    ]
    + [(500, False, "dp3.z2.m2")]
    + [(BUCKET_BYTES, False, short) for short in ("dp2.z1", "dp2.z3.m2", "dp2.z2.s1.m2")],
)
def test_buckets_and_overlap(ranks: Ranks, short: str, bucket_bytes: int, overlap: bool) -> None:
    """They change what is held for a while, not what is sent."""
    given = ("bf16", "fp32", bucket_bytes, overlap)
    plan = planned(short, MODELS["primes-tied"], *given)
    world_size = Layout.parse(short).world_size
    for measured in ranks.run(world_size, steps_on, short, "primes-tied", *given):
        check_equal(measured, plan)


PIPELINES = [
    *("pp3.zb-h1.m4", "pp2.interleaved.v2.m4", "dp2.pp2.z1.zb-h1.m3", "dp2.pp2.z3.gpipe.m2"),
    *(
        "dp2.pp2.z2.interleaved.v2.m2",
        "dp2.pp2.z3.keep.zb-h1.m3",
        "dp2.pp2.z3.keep.interleaved.v2.m2",
    ),
    *("dp2.pp3.z3.1f1b.m4", "dp2.pp2.z3.s1.zb-h1.m2"),
]


@pytest.mark.parametrize("short", PIPELINES)
def test_every_stage_holds_and_sends_what_was_planned(ranks: Ranks, short: str) -> None:
    """The same of every rank of a pipeline, after every action of its own table."""
    check_stages(ranks, short, "deep")


@pytest.mark.parametrize(
    "short", ["tp2.pp2.z1.1f1b.m3", "tp2.pp2.z3.zb-h1.m2.sp", "dp2.tp2.pp2.z3.keep.1f1b.m2"]
)
def test_so_does_a_part_of_a_stage(ranks: Ranks, short: str) -> None:
    check_stages(ranks, short, "deep-gpt2")


@pytest.mark.parametrize(("bucket_bytes", "overlap"), [(500, True), (BUCKET_BYTES, False)])
def test_buckets_and_overlap_of_stages(ranks: Ranks, bucket_bytes: int, overlap: bool) -> None:
    check_stages(ranks, "dp2.pp2.z3.zb-h1.m3", "deep", bucket_bytes, overlap)


def check_stages(
    ranks: Ranks, short: str, model: str, bucket_bytes: int = BUCKET_BYTES, overlap: bool = True
) -> None:
    layout = Layout.parse(short)
    given = ("bf16", "fp32", bucket_bytes, overlap)
    plans = [planned(short, MODELS[model], *given, stage) for stage in range(layout.pp)]
    for rank, measured in enumerate(ranks.run(layout.world_size, steps_on, short, model, *given)):
        check_equal(measured, plans[layout.coord(rank).pp])


@st.composite
def trained_layouts(draw: st.DrawFn, most_ranks: int = 4) -> Layout:
    dp = draw(st.integers(1, most_ranks))
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    groups = [size for size in range(1, dp + 1) if dp % size == 0]
    group = draw(st.sampled_from([None, *groups])) if shard != "none" else None
    return Layout(
        dp=dp,
        shard=shard,
        shard_group=group,
        keep=shard == "zero3" and draw(st.booleans()),
        microbatches=draw(st.integers(1, 3)),
    )


@settings(max_examples=examples(5))
@given(
    trained_layouts(),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(DTYPE_CHOICES),
    st.integers(400, 9000),
    st.booleans(),
)
def test_a_random_case(
    ranks: Ranks,
    layout: Layout,
    model: str,
    choice: tuple[Precision, GradientPrecision],
    bucket_bytes: int,
    overlap: bool,
) -> None:
    given = (*choice, bucket_bytes, overlap)
    plan = planned(str(layout), MODELS[model], *given)
    for measured in ranks.run(layout.world_size, steps_on, str(layout), model, *given):
        check_equal(measured, plan)


def evaluated_on(rank: int, world: int, short: str) -> tuple[int, int]:
    """Bytes sent by an evaluation and by the step after it."""
    program, mesh = ready(rank, short, "llama", "fp32", "same", BUCKET_BYTES, True)
    batch = part_of(*global_batch(0), mesh.layout, mesh.data.rank)
    mesh.bytes_sent()
    program.pipeline.evaluate(program.evaluation, batch.microbatches[0])
    before = mesh.bytes_sent()["dp"]
    take_step(program, mesh, batch, 1e-3, 0.0)
    return before, mesh.bytes_sent()["dp"]


@pytest.mark.parametrize(("short", "kept"), [("dp2.z1", True), ("dp2.z2", True), ("dp2.z3", False)])
def test_a_step_does_not_gather_again_after_an_evaluation(
    ranks: Ranks, short: str, kept: bool
) -> None:
    """The one difference between steps: stages 1 and 2 have whole weights already."""
    whole = 4 * sum(
        Layout.parse(short).padded(size) for size in unit_sizes(MODELS["llama"], Layout()).values()
    )
    planned_bytes = comm_bytes(MODELS["llama"], Layout.parse(short), "fp32")["dp"]
    for evaluation, step in ranks.run(2, evaluated_on, short):
        assert evaluation == whole // 2
        assert evaluation + step == planned_bytes + (0 if kept else evaluation)


# -- FSDP


def fsdp_on(
    rank: int, world: int, short: str, model: str
) -> list[tuple[dict[str, int], dict[str, int]]]:
    told = []
    for choice in DTYPE_CHOICES:
        program, mesh = ready(rank, short, model, *choice, BUCKET_BYTES, True)
        batch = part_of(*global_batch(0), mesh.layout, mesh.data.rank)
        mesh.bytes_sent()
        take_step(program, mesh, batch, 1e-3, 0.0)
        told.append((program.store.held_bytes(), mesh.bytes_sent()))
    return told


@pytest.mark.parametrize(
    ("short", "model"),
    [(short, "primes") for short in ("dp2.fsdp", "dp3.fsdp.m2", "dp2.fsdp.keep", "dp4.fsdp.s2.m3")]
    + [("dp3.fsdp.m2", "llama-tied"), ("dp3.fsdp.m2", "gpt2")]
    + [("dp2.tp3.fsdp.m2", "primes"), ("dp4.tp2.sp.fsdp.s2.keep", "gpt2")],
)
def test_fsdp_holds_and_sends_what_is_planned(ranks: Ranks, short: str, model: str) -> None:
    """Exactly on the first rank of each group, which has the most rows, of the first tensor rank,
    which has the most of a parameter. The last may own fewer rows: its weights and gradients are
    padded to the same, its optimizer state is not."""
    layout = Layout.parse(short)
    config = MODELS[model]
    told = ranks.run(layout.world_size, fsdp_on, short, model)
    for at, choice in enumerate(DTYPE_CHOICES):
        (ledger,) = training_ledgers(config, layout, *choice)
        states = {row: ledger.rows[row] for row in STATES}
        sent = comm_bytes(config, layout, *choice)
        assert {axis for axis, num_bytes in sent.items() if num_bytes is None} == (
            {"tp"} if layout.tp > 1 else set()
        )
        for rank, (held, bytes_sent) in enumerate(each[at] for each in told):
            coord = layout.coord(rank)
            if coord.tp == 0:
                optimizer = (
                    states["optimizer"] if coord.dp % layout.shard_size == 0 else held["optimizer"]
                )
                assert held == states | {"optimizer": optimizer}
                assert {axis: bytes_sent[axis] for axis in sent if sent[axis] is not None} == {
                    axis: num_bytes for axis, num_bytes in sent.items() if num_bytes is not None
                }
            assert all(held[row] <= states[row] for row in STATES)
            assert bytes_sent["dp"] <= sent["dp"]
        each_bytes = element_bytes(layout, *choice).optimizer
        elements = sum(
            math.prod(local_shape(spec, layout, layout.coord(rank)))
            for spec in model_specs(config)
            if spec.tied_to is None
            for rank in range(layout.tp)
        )
        groups = layout.dp // layout.shard_size
        assert sum(rank[at][0]["optimizer"] for rank in told) == each_bytes * elements * groups


# -- tensor parallel

NORMED = replace(
    FAMILIES["qwen3"], num_kv_heads=1, qkv_bias=True, mlp_bias=True, out_bias=True, ffn_size=21
)
CUT = {
    **{family: FAMILIES[family] for family in ("llama-tied", "gpt2", "qwen3")},
    "normed": NORMED,
    "odd": ModelConfig("llama", 3, 15, 50, 3, 3, 4, 131, 32, qkv_bias=True),
}


@dataclass(frozen=True)
class Case:
    layout: str
    model: str | ModelConfig
    precision: Precision = "fp32"
    small: bool = False
    """Whether chunks of a few rows of logits are forced."""

    @property
    def config(self) -> ModelConfig:
        return CUT[self.model] if isinstance(self.model, str) else self.model

    @property
    def microbatch(self) -> MicroBatchShape:
        layout = Layout.parse(self.layout)
        return MicroBatchShape(SEQUENCES // layout.dp // layout.microbatches, SEQ_LEN)


def chunks_of(module: Any, case: Case) -> AbstractContextManager[object]:
    """What `module` takes for the size of a chunk of logits."""
    return (
        patch.multiple(module, SOFTMAX_BYTES=2100, PRODUCT_BYTES=5000)
        if case.small
        else nullcontext()
    )


def sent_on(rank: int, world: int, cases: Sequence[Case]) -> list[dict[str, int]]:
    """What each step sends."""
    told = []
    for case in cases:
        layout = Layout.parse(case.layout)
        config = case.config
        dtype = DTYPES[case.precision]
        mesh = make_mesh(layout, rank, CPU, config.num_kv_heads)
        program = apply(config, mesh, dtype, dtype, OPTIMIZER.update)
        fill_store(program.store, tiny_weights(config))  # type: ignore[arg-type]
        batch = part_of(*global_batch(0), layout, mesh.dp.rank)
        mesh.bytes_sent()
        with chunks_of(loss, case):
            take_step(program, mesh, batch, 0.0, 0.0)
        told.append(mesh.bytes_sent())
    return told


def planned_bytes(case: Case) -> CommBytes:
    with chunks_of(traffic, case):
        return comm_bytes(
            case.config, Layout.parse(case.layout), case.precision, microbatch=case.microbatch
        )


TENSOR_LAYOUTS = [
    *("tp2.m3", "tp2.sp.z2.m2", "tp2.z3", "tp4.sp.m2", "dp2.tp2.sp.z3.keep.m2", "dp2.tp2.z3.s1.m2"),
    *("tp2.rc-selective", "tp2.sp.rc-full.m2", "tp2.sp.rc-selective"),
]
CONTEXT_LAYOUTS = ["cp3", "cp2.z3.m2", "tp2.cp2.sp.z2.m2", "cp2.rc-full", "cp2.rc-selective"]


@pytest.mark.parametrize(("number", "short"), list(enumerate(TENSOR_LAYOUTS + CONTEXT_LAYOUTS)))
def test_tensor_and_context_parallel_send_what_is_planned(
    ranks: Ranks, number: int, short: str
) -> None:
    """On every axis of every rank: activations, the softmax of each chunk of rows, gradients of
    norms, of learned positions, of q and k norms, and of kv heads that several ranks hold. Layouts
    take two of the models in turns."""
    models = ("llama-tied", "normed") if number % 2 else ("gpt2", "qwen3")
    cases = [Case(short, model) for model in models]
    cases += [Case(short, models[number // 2 % 2], "bf16", small=True)]
    plans = [planned_bytes(case) for case in cases]
    for mine in ranks.run(Layout.parse(short).world_size, sent_on, cases):
        for case, sent, plan in zip(cases, mine, plans, strict=True):
            assert {axis: sent[axis] for axis in plan} == plan, case


@pytest.mark.parametrize("short", ["cp2.a2a", "cp2.a2a.rc-full.m2", "tp2.cp2.a2a.sp.z2"])
def test_all_to_all_sends_what_is_planned(ranks: Ranks, short: str) -> None:
    cases = [Case(short, "gpt2"), Case(short, "gpt2", "bf16")]
    plans = [planned_bytes(case) for case in cases]
    for mine in ranks.run(Layout.parse(short).world_size, sent_on, cases):
        assert [
            {axis: sent[axis] for axis in plan} for sent, plan in zip(mine, plans, strict=True)
        ] == plans


PIPELINE_LAYOUTS = [
    "pp2.1f1b.m3",
    "pp2.zb-h1.m4",
    "dp2.pp2.z3.1f1b.m3",
    "dp2.pp2.z2.gpipe.m2",
    "tp2.pp2.1f1b.m2.sp",
]


@pytest.mark.parametrize(
    "short", [*PIPELINE_LAYOUTS, "pp2.cp2.1f1b.m2", "dp2.pp2.z3.keep.zb-h1.m3"]
)
def test_the_busiest_stage_of_a_pipeline_sends_what_is_planned(ranks: Ranks, short: str) -> None:
    """On each axis, of all ranks the one that sends most; tied embeddings count under pp."""
    cases = [
        Case(short, model, precision)
        for model in ("llama-tied", "gpt2")
        for precision in ("fp32", "bf16")
    ]  # type: ignore[arg-type]
    told = ranks.run(Layout.parse(short).world_size, sent_on, cases)
    for at, case in enumerate(cases):
        plan = planned_bytes(case)
        assert {axis: max(rank[at][axis] for rank in told) for axis in plan} == plan, case


def test_sizes_that_three_ranks_do_not_divide(ranks: Ranks) -> None:
    """Each collective is rounded down on its own, and there are many of a few rows."""
    cases = [
        Case(short, "odd", precision, small)
        for short in ("tp3", "tp3.z2.m2")
        for precision in ("fp32", "bf16")
        for small in (False, True)
    ]
    expected = [planned_bytes(case) for case in cases]
    for mine in ranks.run(3, sent_on, cases):
        assert [
            {axis: sent[axis] for axis in ("dp", "tp", "pp", "cp")} for sent in mine
        ] == expected


@st.composite
def cut_cases(draw: st.DrawFn) -> Case:
    """Any small model on two to four tensor ranks, and up to two data ranks."""
    tp = draw(st.integers(2, 4))
    kv_heads = draw(st.sampled_from([kv for kv in (1, 2, tp) if kv % tp == 0 or tp % kv == 0]))
    layer_norm = draw(st.booleans())
    learned = draw(st.booleans())
    config = ModelConfig(
        "llama",
        draw(st.integers(1, 3)),
        draw(st.integers(3, 17)),
        draw(st.integers(1, 23)),
        tp * draw(st.integers(1, 2)),
        kv_heads,
        4,
        VOCAB,
        32,
        tied=draw(st.booleans()),
        norm="layer" if layer_norm else "rms",
        gated=draw(st.booleans()),
        positions="learned" if learned else "rope",
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=not layer_norm and draw(st.booleans()),
    )
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    layout = Layout(
        dp=draw(st.integers(1, 2)) if tp == 2 else 1,
        tp=tp,
        shard=shard,
        microbatches=draw(st.integers(1, 2)),
        sequence_parallel=SEQ_LEN % tp == 0 and draw(st.booleans()),
    )
    return Case(str(layout), config, draw(st.sampled_from(["bf16", "fp32"])), draw(st.booleans()))


@settings(max_examples=examples(5))
@given(cut_cases())
def test_a_random_model_sends_what_is_planned(ranks: Ranks, case: Case) -> None:
    plan = planned_bytes(case)
    for (sent,) in ranks.run(Layout.parse(case.layout).world_size, sent_on, [case]):
        assert {axis: sent[axis] for axis in plan} == plan


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_layer_sends_what_is_published(t: int, b: int) -> None:
    """8 b s h (t - 1) / t elements, without sequence parallel (Shoeybi et al. 2019) and with
    (Korthikanti et al. 2022), whose norms' gradients are summed besides. What is recomputed is sent
    again."""
    config = replace(CATALOGUE["llama-2-7b"], num_layers=1)
    tokens = b * 2048
    half = 2 * tokens * config.hidden_size * (t - 1) // t

    def layer(short: str) -> int:
        layout = Layout.parse(short)
        deep, flat = (
            comm_bytes(replace(config, num_layers=n), layout, microbatch=MicroBatchShape(b, 2048))[
                "tp"
            ]
            for n in (2, 1)
        )
        assert deep is not None and flat is not None
        return deep - flat

    norms = 2 * 4 * 2 * config.hidden_size * (t - 1) // t
    assert layer(f"tp{t}") == layer(f"tp{t}.rc-selective") == 8 * half
    assert layer(f"tp{t}.sp") == 8 * half + norms
    assert layer(f"tp{t}.rc-full") == 12 * half
    assert layer(f"tp{t}.sp.rc-full") == 12 * half + norms
    assert layer(f"tp{t}.sp.rc-selective") == 10 * half + norms
    assert layer(f"tp{t}.m3") == 24 * half
    assert layer(f"dp2.tp{t}.sp.z2.m3") == 3 * (8 * half + norms)
    assert layer(f"dp2.tp{t}.sp.z1.m3") == 24 * half + norms
    assert layer(f"dp2.tp{t}.sp.fsdp.m3") == 24 * half + norms // 2, (
        "of the rows that a data rank has"
    )


def test_the_busiest_stage_is_reported() -> None:
    config = CATALOGUE["llama-2-7b"]

    def sent(short: str) -> int:
        found = comm_bytes(config, Layout.parse(short), microbatch=MicroBatchShape(1, 4096))["tp"]
        assert found is not None
        return found

    seam = 2 * 4096 * config.hidden_size
    assert sent("tp2") == 32 * 4 * seam + 2 * seam + 3 * 4096 * 4
    assert sent("tp2.pp4") == 8 * 4 * seam + seam + 3 * 4096 * 4, "the last, with the loss"


# -- context parallel


@pytest.mark.parametrize("c", [2, 4, 8])
def test_context_parallel_by_hand(c: int) -> None:
    """Llama-3.1-8B, 8192 tokens: 32 layers, 32 heads and 8 kv heads of 128, bf16. A ring sends keys
    and values c - 1 times forward and again backward, their gradients in fp32 as often (Liu et al.
    2023); an all-to-all sends q, k, v and the output once each way (Jacobs et al. 2023)."""
    config = CATALOGUE["llama-3.1-8b"]
    n = 8192 // c

    def sent(short: str, tokens: int = 8192) -> int:
        found = comm_bytes(config, Layout.parse(short), microbatch=MicroBatchShape(1, tokens))["cp"]
        assert found is not None
        return found

    kv = 8 * 128
    q = 32 * 128
    forward = (c - 1) * 2 * n * kv * 2
    backward = (c - 1) * 2 * n * kv * (2 + 4)
    assert sent(f"cp{c}") == sent(f"cp{c}.rc-selective") == 32 * (forward + backward)
    assert sent(f"cp{c}.rc-full") == 32 * (2 * forward + backward)
    assert sent(f"cp{c}.m3") == 3 * sent(f"cp{c}")
    assert sent(f"tp2.cp{c}") == sent(f"cp{c}") // 2 and sent(f"tp16.cp{c}") == sent(f"cp{c}") // 8
    assert sent(f"cp{c}", 8191) == sent(f"cp{c}"), "padded"
    once = n * (q + 2 * kv) * 2 * (c - 1) // c + n * q * 2 * (c - 1) // c
    assert sent(f"cp{c}.a2a") == 32 * 2 * once
    assert sent(f"cp{c}.a2a.rc-full") == 32 * 3 * once
    assert sent(f"cp{c}.pp2.l16-16") == sent(f"cp{c}") // 2


# -- the planner's short cuts


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    shape = draw(st.sampled_from([PRIMES, FAMILIES["gpt2"], FAMILIES["qwen3"]]))
    return replace(shape, num_layers=draw(st.integers(1, 5)), tied=draw(st.booleans()))


@given(models(), trained_layouts(9), st.integers(1, 7), st.sampled_from(DTYPE_CHOICES))
def test_two_microbatches_represent_all(
    config: ModelConfig,
    layout: Layout,
    microbatches: int,
    choice: tuple[Precision, GradientPrecision],
) -> None:
    """Counts and the most that is held for a while, against those of the whole table."""
    layout = replace(layout, microbatches=microbatches)
    table = lower(accumulate(microbatches), [model_pieces(config)], layout)
    counted = Counter((action.kind, action.unit) for action in table if action.unit)
    assert step_counts(config, layout, 0) == counted
    plan = planned(str(layout), config, *choice)  # holds the row `buffers` to the whole table
    assert max(moment.at for moment in plan.buffers) >= len(table) - 1


@given(trained_layouts(9), models(), st.integers(1, 400))
def test_a_few_buckets_represent_all(
    layout: Layout, config: ModelConfig, bucket_bytes: int
) -> None:
    """Equal buckets beyond those under way are left out: the most that arrives in bf16 is still
    that of two in turn, with a copy of what is sent where a unit is several."""
    table = step_table(config, layout, 0, layout.microbatches)
    groups = layout.data_size // layout.shard_size
    most = max(1, bucket_bytes // 2 // layout.data_size) * groups
    buckets = []
    for unit in (action.unit for action in table if action.kind == "REDUCE"):
        shard = layout.padded(unit_sizes(config, layout)[unit]) // layout.shard_size
        cut = [2 * layout.shard_size * min(most, shard - start) for start in range(0, shard, most)]
        buckets += [each * (2 if len(cut) > 1 and layout.shard_size > 1 else 1) for each in cut]
    expected = max(sum(buckets[max(0, at - 1) : at + 1]) for at in range(len(buckets)))
    if layout.shard_size == 1 and (layout.data_size == 1 or layout.shards("gradients")):
        expected = 0  # nothing to send, or only in `finish`
    plan = planned(str(layout), config, "bf16", "same", bucket_bytes)
    assert max(moment.arriving for moment in plan.buffers if moment.at < len(table)) == expected


# -- what is published


def elements_sent(config: ModelConfig, short: str) -> int:
    """In bf16, where a weight and a gradient have 2 bytes each."""
    dp = comm_bytes(config, Layout.parse(short))["dp"]
    assert dp is not None and dp % 2 == 0
    return dp // 2


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-405b", "qwen2.5-0.5b", "gpt2"])
@pytest.mark.parametrize("n", [8, 64, 1024, 1021])
def test_zero_volumes(model: str, n: int) -> None:
    """ZeRO, section 7: 2P elements a step with plain data parallel and stages 1 and 2, 3P with
    stage 3, times (n-1)/n.

    Two differences: units are padded to n ranks, by less than n elements each; and the weights that
    only the embedding or only the head uses are gathered once, not twice, since the head's backward
    follows its forward, and a backward that looks rows up reads no weights.
    """
    config = CATALOGUE[model]
    sizes = unit_sizes(config, Layout())
    params = sum(sizes.values())
    assert params == num_params(model_specs(config))
    padding = sum(-size % n for size in sizes.values())
    for short in (f"dp{n}", f"dp{n}.z1", f"dp{n}.z2"):
        assert elements_sent(config, short) == 2 * (params + padding) * (n - 1) // n
    once = [
        unit
        for unit in sizes
        if not unit.startswith("blocks.") and not (unit == "embed" and config.tied)
    ]
    less = sum(sizes[unit] + -sizes[unit] % n for unit in once)
    assert elements_sent(config, f"dp{n}.z3") == (3 * (params + padding) - less) * (n - 1) // n
    assert elements_sent(config, f"dp{n}.z3") == pytest.approx(
        3 * params, rel=less / params / 3 + 1 / n + 1e-3
    )
    assert (
        elements_sent(config, f"dp{n}.z3.keep") == 2 * (params + padding) * (n - 1) // n
    )  # all is gathered once


@pytest.mark.parametrize("m", [1, 2, 5, 1024])
def test_microbatches_multiply_the_traffic_of_stages_2_and_3(m: int) -> None:
    """One sum a step with plain data parallel and stage 1; stage 2 sums every micro-batch, (m +
    1)P, stage 3 gathers in every micro-batch too."""
    config = CATALOGUE["llama-3.1-8b"]
    n = 8
    params = num_params(model_specs(config)) * (n - 1) // n
    assert elements_sent(config, f"dp8.m{m}") == elements_sent(config, f"dp8.z1.m{m}") == 2 * params
    assert elements_sent(config, f"dp8.z2.m{m}") == (m + 1) * params
    assert elements_sent(config, f"dp8.z3.m{m}") == m * elements_sent(config, "dp8.z3")


def test_hybrid_sharding_sends_within_groups_and_once_across() -> None:
    """Groups of 4: 3/4 of each gather and reduction; then all 8 ranks sum a quarter in 2 groups,
    once a step."""
    config = CATALOGUE["llama-3.1-8b"]
    params = num_params(model_specs(config))
    for m in (1, 3):
        within = elements_sent(config, f"dp4.z3.m{m}")
        assert elements_sent(config, f"dp8.z3.s4.m{m}") == within + params // 4


def test_temporarily_gathered_weights() -> None:
    """Llama-3.1-8B at stage 3, by hand: when the head's gradient is summed, its weights and those
    of the last block, which come early, the gradient, and two buckets of 64 MiB, each as it arrives
    and as it is sent."""
    config = CATALOGUE["llama-3.1-8b"]
    sizes = unit_sizes(config, Layout())
    block = 2 * sizes["blocks.31"]
    final = 2 * sizes["final"]
    (ledger,) = training_ledgers(config, Layout.parse("dp8.z3"))
    head_backward = block + 2 * final
    bucket = 2 * (64 << 20)  # what arrives and a copy of what is sent
    assert ledger.rows["buffers"] == head_backward + 2 * bucket
    (kept,) = training_ledgers(config, Layout.parse("dp8.z3.keep"))
    assert kept.rows["buffers"] > 2 * (num_params(model_specs(config)) - sizes["embed"])
    for short, buffers in (("dp1", 0), ("dp8", bucket), ("dp8.z1", 2 * bucket)):
        assert training_ledgers(config, Layout.parse(short))[0].rows["buffers"] == buffers


def test_unknown_traffic_is_none() -> None:
    """Without a micro-batch what tensor and context parallel send; what pipeline stages do in any
    case."""
    config = CATALOGUE["llama-3.1-8b"]
    microbatch = MicroBatchShape(1, 64)
    for short in ("dp2.tp2.z1", "dp2.pp4.z1", "dp2.cp2.z1"):
        layout = Layout.parse(short)
        axis = short.split(".")[1][:2]
        sent = comm_bytes(config, layout)
        told = comm_bytes(config, layout, microbatch=microbatch)
        assert sent["dp"] and sent["dp"] == told["dp"]
        assert {axis for axis, num_bytes in sent.items() if num_bytes is None} == {axis}
        assert None not in told.values() and told[axis] > 0  # type: ignore[operator]
        assert all(told[other] == 0 for other in ("tp", "pp", "cp") if getattr(layout, other) == 1)
    whole, half = (comm_bytes(config, Layout.parse(short))["dp"] for short in ("dp2", "dp2.tp2"))
    assert whole is not None and half is not None
    assert half == pytest.approx(whole / 2, rel=1e-4)  # norms are not cut


def test_counting_does_not_grow_with_microbatches() -> None:
    """A plan of 1,024 of them runs through tables of two at most, and counts all."""
    config = CATALOGUE["llama-3.1-8b"]
    short = "dp8.z3.m1024"
    counted = []

    def counting(order: list[Action], *given: Any) -> list[Action]:
        counted.append(len(order))
        return lower(order, *given)

    with patch.object(schedules_module, "lower", counting):
        (ledger,) = training_ledgers(config, Layout.parse(short))
        sent = elements_sent(config, short)
    assert max(counted) == 4, "F and B of two"
    assert sent == 1024 * elements_sent(config, "dp8.z3")
    assert ledger.rows == training_ledgers(config, Layout.parse("dp8.z3.m2"))[0].rows
