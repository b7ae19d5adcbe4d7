"""Data parallel against one process that knows nothing of it: plain autograd of the summed loss
over the global count of targets, and torch's own AdamW and clipping. Both the simple class and the
store with nothing cut are held to it."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from ranks import RankFailed, Ranks
from shardwise.layout import Layout, Shard, ring_bytes
from shardwise.model.layers import DTYPES
from shardwise.parallel import mesh as meshes
from shardwise.parallel.apply import apply, check_trainable, draw_weights
from shardwise.parallel.data import DataParallel
from shardwise.parallel.mesh import Mesh, add_rows, make_mesh
from shardwise.parallel.pipeline.executor import Pipeline
from shardwise.parallel.program import Program
from shardwise.params import model_specs, num_params, units
from shardwise.train.data.batches import Batch
from shardwise.train.loop import take_step
from tiny_training import (
    FAMILIES,
    OPTIMIZER,
    RATE,
    digest,
    fill_store,
    global_batch,
    part_of,
    plain_steps,
    relative,
    seeded,
    tiny_weights,
    whole,
    worst,
)

CPU = torch.device("cpu")
LAYOUTS = ["dp1", "dp1.m4", "dp2", "dp2.m2", "dp3", "dp4"]
DTYPE_WORDS = {"bf16": "bfloat16", "fp32": "float32"}
MAX_NORM = 0.5
UNCLIPPED = 0.0


# -- collectives


def reduce_on(
    rank: int, world: int, values: list[Tensor], operation: str, dtype: torch.dtype | None
) -> object:
    mesh = make_mesh(Layout(dp=world), rank, CPU)
    x = values[rank].clone()
    mesh.replicate.all_reduce(x, operation, dtype).wait()  # type: ignore[arg-type]
    return x, mesh.bytes_sent(), mesh.bytes_sent()


def no_bytes() -> dict[str, int]:
    return {"dp": 0, "tp": 0, "pp": 0, "cp": 0, "control": 0}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("operation", ["sum", "max"])
def test_all_reduce_and_its_bytes(ranks: Ranks, world: int, operation: str) -> None:
    values = [torch.tensor([[1.0, -2.0, 0.5]] * 4) * (r + 1) for r in range(world)]
    expected = torch.stack(values).sum(0) if operation == "sum" else torch.stack(values).amax(0)
    for x, sent, after in ranks.run(world, reduce_on, values, operation, None):
        torch.testing.assert_close(x, expected, rtol=0, atol=0)
        assert sent == no_bytes() | {"dp": 2 * 48 * (world - 1) // world}
        assert after == no_bytes(), "bytes are reported once"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bf16_is_summed_in_fp32_and_rounded_once(ranks: Ranks, world: int) -> None:
    """Bit for bit, in the order of the ranks; a sum in bf16 would lose the small terms: 256 + 1 is
    256 there. What travels is bf16."""
    drawn = torch.randn(1199, generator=seeded(world)).bfloat16()
    first = [torch.tensor([256.0 if r == 0 else 1.0]) for r in range(world)]
    values = [torch.cat([first[r], drawn.float() * 3.0**r]).bfloat16() for r in range(world)]
    exact = torch.stack(values).double().sum(0)
    for x, sent, _ in ranks.run(world, reduce_on, values, "sum", torch.float32):
        torch.testing.assert_close(x, exact.float().bfloat16(), rtol=0, atol=0)
        assert x.dtype == torch.bfloat16 and x[0] == torch.tensor(255.0 + world).bfloat16()
        assert sent["dp"] == 2 * 1200 * 2 * (world - 1) // world


def refused_on(rank: int, world: int) -> str:
    x = torch.ones(7, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        make_mesh(Layout(dp=world), rank, CPU).data.all_reduce(x, dtype=torch.float32)
    with pytest.raises(AssertionError):
        make_mesh(Layout(dp=world), rank, CPU).data.all_reduce(
            x[:4].view(2, 2), dtype=torch.float32
        )
    return "refused"


def test_what_cannot_be_halved_is_not_summed_wider(ranks: Ranks) -> None:
    assert ranks.run(2, refused_on) == ["refused", "refused"]


def rows_of(case: "Case", rank: int) -> Tensor:
    """The input of a rank to a reduce-scatter: a row [S] per rank."""
    return torch.randn(case.world, case.size, generator=seeded(10 * case.size + rank)).to(
        case.dtype
    )


@dataclass(frozen=True)
class Case:
    """One reduce-scatter of `size` elements a rank."""

    world: int
    size: int
    dtype: torch.dtype
    wider: torch.dtype | None
    accumulate: bool
    in_place: bool
    """Whether the result overwrites this rank's row of what is summed."""


CASES = [
    Case(0, size, dtype, wider, accumulate, in_place)
    for size in (1, 7, 50)
    for dtype, wider in (
        (torch.float32, None),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None),
    )
    for accumulate, in_place in ((False, False), (True, False), (False, True))
]


def scatter_on(rank: int, world: int, cases: list[Case]) -> list[tuple[Tensor, int]]:
    axis = make_mesh(Layout(dp=world), rank, CPU).data
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "SUM_ELEMENTS", 8)  # so that short rows are added in several slices
        for case in cases:
            x = rows_of(case, rank)
            out = x[rank] if case.in_place else torch.full((case.size,), 0.5, dtype=case.dtype)
            before = axis.bytes_sent
            axis.reduce_scatter(x, out, case.wider, case.accumulate).wait()
            reports.append((out.clone(), axis.bytes_sent - before))
    return reports


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_reduce_scatter_is_the_sum_of_every_rank_s_row(ranks: Ranks, world: int) -> None:
    """Bit for bit: the sum in the order of the ranks in the wider dtype, what was there last, then
    rounded once."""
    cases = [replace(case, world=world) for case in CASES]
    for rank, reports in enumerate(ranks.run(world, scatter_on, cases)):
        for case, (out, sent) in zip(cases, reports, strict=True):
            total = rows_of(case, 0)[rank].to(case.wider or case.dtype)
            for other in range(1, world):
                total = total + rows_of(case, other)[rank]
            expected = (total + 0.5 if case.accumulate else total).to(case.dtype)
            assert torch.equal(out, expected), case
            assert sent == world * case.size * case.dtype.itemsize * (world - 1) // world, case


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_rows_are_added_slice_by_slice(n: int, size: int, step: int, accumulate: bool) -> None:
    """Into one of the rows too, of which each slice is read before it is written."""
    rows = torch.randn(n, size, generator=seeded(n * 100 + size)).bfloat16()
    exact = rows.double().sum(0)
    for out in (torch.ones(size, dtype=torch.bfloat16), rows[n - 1]):
        before = out.double()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meshes, "SUM_ELEMENTS", step)
            add_rows(rows, out, torch.float32, accumulate)
        torch.testing.assert_close(out.double(), exact + before * accumulate, rtol=2**-8, atol=1e-5)


def gather_on(rank: int, world: int, size: int) -> list[tuple[Tensor, int]]:
    axis = make_mesh(Layout(dp=world), rank, CPU).data
    reports = []
    for in_place in (False, True):
        out = torch.full((world * size,), math.nan)
        part = out.view(world, size)[rank] if in_place else torch.empty(size)
        part.copy_(torch.arange(size) + 100.0 * rank)
        before = axis.bytes_sent
        axis.all_gather(part, out).wait()
        reports.append((out, axis.bytes_sent - before))
    return reports


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_gather_puts_parts_in_the_order_of_ranks(ranks: Ranks, world: int) -> None:
    expected = torch.cat([torch.arange(7) + 100.0 * rank for rank in range(world)])
    for reports in ranks.run(world, gather_on, 7):
        for out, sent in reports:
            assert torch.equal(out, expected)
            assert sent == 7 * 4 * (world - 1)


def numbers_on(rank: int, world: int) -> object:
    axis = make_mesh(Layout(dp=world), rank, CPU).world
    reports = axis.sum(rank, 2**40 + rank, 0.1), axis.max(rank, -rank), axis.gather(10.0 * rank)
    axis.barrier()
    return reports, axis.bytes_sent, axis.control_bytes_sent


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_numbers_for_reports(ranks: Ranks, world: int) -> None:
    """Scalars are summed in fp64, so that counts of tokens stay exact; their bytes are counted
    apart."""
    for (summed, highest, gathered), sent, control in ranks.run(world, numbers_on):
        assert summed[:2] == [sum(range(world)), world * 2**40 + sum(range(world))]
        assert summed[2] == pytest.approx(0.1 * world, rel=1e-15)
        assert highest == [world - 1, 0]
        assert gathered == [10.0 * r for r in range(world)]
        assert (sent, control) == (0, sum(ring_bytes(2 * 8 * n, world) for n in (3, 2, world, 1)))


def mesh_on(rank: int, world: int, layout: str) -> object:
    mesh = make_mesh(Layout.parse(layout), rank, CPU)
    found = {name: (axis.rank, axis.size, axis.gather(rank)) for name, axis in mesh.axes.items()}
    return found, mesh.coord


@pytest.mark.parametrize("layout", ["dp4", "tp2.dp2", "pp2.cp2", "tp2.dp2.pp2", "dp4.z1.s2"])
def test_axes_are_those_of_the_layout(ranks: Ranks, layout: str) -> None:
    """Every axis holds the ranks that the layout says, in its order."""
    plan = Layout.parse(layout)
    for rank, (found, coord) in enumerate(ranks.run(plan.world_size, mesh_on, layout)):
        assert coord == plan.coord(rank)
        for name, (place, size, members) in found.items():
            expected = plan.ranks(name, coord)
            assert (place, size, tuple(members)) == (
                expected.index(rank),
                len(expected),
                expected,
            ), name


# -- a few steps, here and there


@dataclass(frozen=True)
class RankReport:
    """The result of a rank after its steps: gradients and bytes of the last one, the state, and
    whole weights."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    bytes_sent: dict[str, int]
    num_steps: int
    digest: str
    dtypes: tuple[torch.dtype, ...]


def ready(
    rank: int, layout: Layout, family: str, precision: str, gradients: str
) -> tuple[Program, Mesh]:
    mesh = make_mesh(layout, rank, CPU)
    program = apply(FAMILIES[family], mesh, DTYPES[precision], DTYPES[gradients], OPTIMIZER.update)
    fill_store(program.store, tiny_weights(FAMILIES[family]))
    return program, mesh


def batch_of(step: int, mesh: Mesh, with_targets: bool = True) -> Batch:
    tokens, targets = global_batch(step)
    return part_of(
        tokens,
        targets if with_targets else torch.full_like(targets, -100),
        mesh.layout,
        mesh.data.rank,
    )


def steps_on(
    rank: int,
    world: int,
    short: str,
    family: str,
    num_steps: int,
    precision: str = "fp32",
    gradients: str = "fp32",
    max_norm: float = UNCLIPPED,
    spoil: str = "",
) -> RankReport:
    program, mesh = ready(rank, Layout.parse(short), family, precision, gradients)
    store = program.store
    losses = []
    norms = []
    if spoil == "nan" and rank == world - 1:  # of one rank alone
        store.weights(("norm",))["norm"].data[0] = math.nan
    for step in range(num_steps):
        mesh.bytes_sent()
        loss, norm = take_step(
            program, mesh, batch_of(step, mesh, spoil != "no targets"), RATE.at(step), max_norm
        )
        losses.append(mesh.world.sum(loss)[0])
        norms.append(norm)
    sent = mesh.bytes_sent()
    names = [
        spec.name for spec in program.specs if spec.tied_to is None and mesh.layout.shard == "none"
    ]
    weights = {name: weight.detach().clone() for name, weight in store.weights(names).items()}
    grads, masters = (whole(store, mesh, program.specs, kind) for kind in ("gradient", "master"))
    dtypes = tuple(
        view.dtype for kind in ("gradient", "master") for _, _, view in store.owned(kind)
    )
    return RankReport(
        losses, norms, grads, weights, masters, sent, store.num_steps, digest(store), dtypes
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_has_the_gradient_of_one_process(ranks: Ranks, layout: str, family: str) -> None:
    """Each gradient within 1e-5 of its size, loss and norm within 1e-6, on every rank, with ever
    fewer targets from rank to rank and micro-batch to micro-batch and none at all in some."""
    expected = plain_steps(FAMILIES[family], 1)
    world = Layout.parse(layout).world_size
    for reports in ranks.run(world, steps_on, layout, family, 1):
        assert reports.losses == pytest.approx(expected.losses, rel=1e-6)
        assert reports.norms == pytest.approx(expected.norms, rel=1e-6)
        assert worst(reports.grads, expected.grads) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("layout", ["dp1", "dp2.m2", "dp4"])
def test_three_steps_end_where_torch_ends(ranks: Ranks, layout: str, family: str) -> None:
    """Clipped at every step, decayed as torch decays. Weights within 1e-4 of their size: Adam
    divides by the root of tiny squares, so the gradients' rounding grows. Replicas are equal bit
    for bit."""
    expected = plain_steps(FAMILIES[family], 3, MAX_NORM)
    assert min(expected.norms) > 2 * MAX_NORM, "every step is to be clipped"
    first, *others = ranks.run(
        Layout.parse(layout).world_size, steps_on, layout, family, 3, "fp32", "fp32", MAX_NORM
    )
    assert first.num_steps == 3
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.norms == pytest.approx(expected.norms, rel=1e-4)
    assert worst(first.weights, expected.weights) < 1e-4
    assert worst(first.masters, first.weights) == 0
    for other in others:
        assert other.losses == first.losses and other.norms == first.norms
        assert other.digest == first.digest, "replicas differ"
        assert worst(other.weights, first.weights) == 0


@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["dp1.m4", "dp2", "dp4", "dp3.z1", "dp2.z2.m2", "dp4.z3"])
def test_bf16_keeps_fp32_masters(ranks: Ranks, layout: str, gradients: str) -> None:
    """Gradients lie within 3 % of those in fp32 (a bf16 number has 8 bits, and weights, activations
    and gradients are all rounded to it), the loss within 0.5 %. Masters are fp32, and keep what
    bf16 weights would round away."""
    exact = plain_steps(FAMILIES["llama-tied"], 1)
    for reports in ranks.run(
        Layout.parse(layout).world_size, steps_on, layout, "llama-tied", 1, "bf16", gradients
    ):
        assert set(reports.dtypes) == {DTYPES[gradients], torch.float32}
        assert reports.losses == pytest.approx(exact.losses, rel=5e-3)
        assert reports.norms == pytest.approx(exact.norms, rel=2e-2)
        assert worst(reports.grads, exact.grads) < 3e-2
    first, *_ = ranks.run(
        Layout.parse(layout).world_size, steps_on, layout, "llama-tied", 3, "bf16", gradients
    )
    start = tiny_weights(FAMILIES["llama-tied"])
    for name, master in first.masters.items():
        assert not torch.equal(master, master.bfloat16().float()), name
        assert relative(master, start[name]) > 1e-3, (
            "a step in bf16 alone would round the change of large weights away"
        )


@pytest.mark.parametrize("layout", ["dp1.m4", "dp2", "dp4"])
def test_bf16_weights_are_the_masters_rounded(ranks: Ranks, layout: str) -> None:
    """Every rank refuses alike."""
    first, *others = ranks.run(
        Layout.parse(layout).world_size, steps_on, layout, "llama-tied", 3, "bf16", "bf16"
    )
    for reports in (first, *others):
        assert reports.digest == first.digest
        for name, master in first.masters.items():
            assert torch.equal(reports.weights[name], master.bfloat16()), (
                f"{name} is not its master rounded"
            )


@pytest.mark.parametrize("layout", ["dp1", "dp1.m4", "dp2", "dp2.m2", "dp3", "dp4"])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_bytes_sent_are_those_predicted(ranks: Ranks, layout: str, gradients: str) -> None:
    """2 P (n - 1) / n elements a step, in the dtype of the gradients, however many micro-batches; a
    unit of state is padded to a multiple of the ranks."""
    plan = Layout.parse(layout)
    specs = model_specs(FAMILIES["llama-tied"])
    padded = sum(plan.padded(sum(spec.numel for spec in owned)) for owned in units(specs).values())
    assert 0 <= padded - num_params(specs) < plan.dp * len(units(specs))
    for reports in ranks.run(plan.dp, steps_on, layout, "llama-tied", 1, "bf16", gradients):
        assert (
            reports.bytes_sent["dp"]
            == 2 * padded * DTYPES[gradients].itemsize * (plan.dp - 1) // plan.dp
        )
        assert [reports.bytes_sent[axis] for axis in ("tp", "pp", "cp")] == [0, 0, 0]


# -- the simple class


@dataclass(frozen=True)
class Simple:
    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def simple_steps_on(
    rank: int, world: int, short: str, family: str, num_steps: int, max_norm: float
) -> Simple:
    """Through the executor and the table of the store."""
    config = FAMILIES[family]
    mesh = make_mesh(Layout.parse(short), rank, CPU)
    fast = apply(config, mesh, torch.float32, torch.float32, OPTIMIZER.update)
    store = DataParallel(mesh, tiny_weights(config), OPTIMIZER.update)
    program = replace(fast, store=store, pipeline=Pipeline(fast.pipeline.work, store, mesh))  # type: ignore[arg-type]
    grads: dict[str, Tensor] = {}
    losses = []
    norms = []
    clip = store.clip

    def clip_and_look(max_norm: float) -> float:
        grads.update(
            {name: grad.clone() for name, grad in store.grads.items()}
        )  # it scales them in place
        return clip(max_norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "clip", clip_and_look)
        for step in range(num_steps):
            loss, norm = take_step(program, mesh, batch_of(step, mesh), RATE.at(step), max_norm)
            losses.append(mesh.world.sum(loss)[0])
            norms.append(norm)
    return Simple(
        losses, norms, grads, {name: weight.detach() for name, weight in store.master.items()}
    )


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("dp1.m3", "llama"),
        ("dp2.m2", "gpt2"),
        ("dp3", "qwen3"),
        ("dp4", "llama-tied"),
        ("dp4.m3", "qwen2"),
    ],
)
def test_the_simple_class_is_one_process_and_the_store_is_the_simple_class(
    ranks: Ranks, layout: str, family: str
) -> None:
    """Three clipped steps. To one process gradients within 1e-4, weights within 1e-4. To each other
    within 2e-5: only the order of sums differs."""
    world = Layout.parse(layout).world_size
    expected = plain_steps(FAMILIES[family], 3, MAX_NORM)
    simple, *others = ranks.run(world, simple_steps_on, layout, family, 3, MAX_NORM)
    for other in others:
        assert (other.losses, other.norms) == (simple.losses, simple.norms)
        assert worst(other.weights, simple.weights) == 0
    assert simple.losses == pytest.approx(expected.losses, rel=1e-5)
    assert simple.norms == pytest.approx(expected.norms, rel=1e-5)
    assert worst(simple.grads, expected.grads) < 1e-4
    assert worst(simple.weights, expected.weights) < 1e-4
    store = ranks.run(world, steps_on, layout, family, 3, "fp32", "fp32", MAX_NORM)[0]
    assert store.losses == pytest.approx(simple.losses, rel=1e-6)
    assert store.norms == pytest.approx(simple.norms, rel=1e-6)
    assert worst(store.grads, simple.grads) < 2e-5
    assert worst(store.weights, simple.weights) < 2e-5


# -- what must not break a step


def no_targets_on(rank: int, world: int, layout: str) -> RankReport:
    return steps_on(rank, world, layout, "llama", 2, max_norm=MAX_NORM, spoil="no targets")


def broken_weight_on(rank: int, world: int, layout: str) -> RankReport:
    return steps_on(rank, world, layout, "llama", 1, max_norm=MAX_NORM, spoil="nan")


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp2.z2.m2"])
def test_a_step_without_any_target_does_not_divide_by_zero(ranks: Ranks, layout: str) -> None:
    for reports in ranks.run(Layout.parse(layout).world_size, no_targets_on, layout):
        assert reports.losses == reports.norms == [0.0, 0.0]
        assert all(bool(weight.isfinite().all()) for weight in reports.weights.values())


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_a_gradient_that_is_not_finite_is_not_stepped_on(ranks: Ranks, layout: str) -> None:
    """One rank has a broken weight: all see it in the norm, and none moves, so all keep the state
    before."""
    start = tiny_weights(FAMILIES["llama"])
    world = Layout.parse(layout).world_size
    for rank, reports in enumerate(ranks.run(world, broken_weight_on, layout)):
        assert math.isnan(reports.norms[0]) and reports.num_steps == 0
        for name, weight in reports.weights.items():
            if rank < world - 1 or name != "norm":
                assert torch.equal(weight, start[name]), name


# -- first weights


def drawn_on(rank: int, world: int, layout: str, seed: int) -> dict[str, Tensor]:
    mesh = make_mesh(Layout.parse(layout), rank, CPU)
    program = apply(FAMILIES["gpt2"], mesh, torch.float32, torch.float32, OPTIMIZER.update)
    draw_weights(program, seed)
    return whole(program.store, mesh, program.specs, "master")


def test_first_weights_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, drawn_on, "dp1.m2", 7)
    (other,) = ranks.run(1, drawn_on, "dp1", 8)
    assert not torch.equal(expected["embed"], other["embed"])
    for reports in ranks.run(3, drawn_on, "dp3", 7):
        assert all(torch.equal(reports[name], expected[name]) for name in expected)


# -- what cannot be trained


@pytest.mark.parametrize("short", ["pp2.zb-auto@0.01.m4", "dp2.pp2.fsdp"])
def test_what_cannot_be_trained_is_refused_with_what_can(short: str) -> None:
    with pytest.raises(ValueError, match="works"):
        check_trainable(Layout.parse(short), FAMILIES["llama"])


@settings(max_examples=examples(40))
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from(["none", "zero1", "zero2", "zero3"]),
)
def test_data_parallel_with_accumulation_is_trainable(
    groups: int, size: int, microbatches: int, shard: Shard
) -> None:
    """Whatever is cut of it, in groups too."""
    group = None if shard == "none" else size
    layout = Layout(dp=groups * size, microbatches=microbatches, shard=shard, shard_group=group)
    check_trainable(layout, FAMILIES["gpt2"])
    check_trainable(replace(layout, keep=shard == "zero3"), FAMILIES["gpt2"])


def fail_in_a_collective(rank: int, world: int) -> None:
    mesh = make_mesh(Layout(dp=world), rank, CPU)
    if rank == 1:
        raise ValueError("rank one gives up")
    x = torch.ones(1 << 16)
    mesh.data.all_reduce(x).wait()


def test_a_collective_that_breaks_off_names_its_axis(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank one gives up") as caught:
        ranks.run(2, fail_in_a_collective)
    assert (
        "then rank 0: shardwise.parallel.mesh.CollectiveFailed: a collective of axis data"
        in str(caught.value)
    )
