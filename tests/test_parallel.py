"""Data parallel against one process that knows nothing of it: plain autograd of the summed loss over the global count
of targets, and torch's own AdamW and clipping."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranks import RankFailed, Ranks
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import Program, apply, check_trainable, draw_weights
from shardwise.parallel.mesh import Mesh, make_mesh, ring_all_reduce_bytes
from shardwise.params import model_specs, num_params, units
from shardwise.train.loop import DTYPES, take_step
from shardwise.train.optim import AdamW, LearningRate
from tiny_training import FAMILIES, global_batch, part_of, tiny_weights

CPU = torch.device("cpu")
LAYOUTS = ["dp1", "dp1.m4", "dp2", "dp2.m2", "dp3", "dp4"]
OPTIMIZER = AdamW(eps=1e-6)
RATE = LearningRate(1e-2, 4, 2, "cosine")
DTYPE_WORDS = {"bf16": "bfloat16", "fp32": "float32"}
MAX_NORM = 0.5
UNCLIPPED = 0.0


# -- collectives --------------------------------------------------------------------------------------------


def reduce_on(rank: int, world: int, values: list[Tensor], operation: str, dtype: torch.dtype | None) -> object:
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
        assert after == no_bytes(), "bytes are told once"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bf16_is_summed_in_fp32_and_rounded_once(ranks: Ranks, world: int) -> None:
    """Bit for bit; a sum in bf16 would lose the small terms: 256 + 1 is 256 there."""
    drawn = torch.randn(999, generator=torch.Generator().manual_seed(world)).bfloat16()
    first = [torch.tensor([256.0 if r == 0 else 1.0]) for r in range(world)]
    values = [torch.cat([first[r], drawn.float() * 3.0**r]).bfloat16() for r in range(world)]
    exact = torch.stack(values).double().sum(0)
    for x, sent, _ in ranks.run(world, reduce_on, values, "sum", torch.float32):
        torch.testing.assert_close(x, exact.float().bfloat16(), rtol=0, atol=0)
        assert x.dtype == torch.bfloat16 and x[0] == torch.tensor(255.0 + world).bfloat16()
        assert sent["dp"] == ring_all_reduce_bytes(1000 * 4, world), "what travels is fp32"


def numbers_on(rank: int, world: int) -> object:
    axis = make_mesh(Layout(dp=world), rank, CPU).world
    told = axis.sum(rank, 2**40 + rank, 0.1), axis.max(rank, -rank), axis.gather(10.0 * rank)
    axis.barrier()
    return told, axis.bytes_sent, axis.control_bytes_sent


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_numbers_for_reports(ranks: Ranks, world: int) -> None:
    """In fp64, so that counts of tokens stay exact; their bytes are told apart from those of the work."""
    for (summed, highest, gathered), sent, control in ranks.run(world, numbers_on):
        assert summed[:2] == [sum(range(world)), world * 2**40 + sum(range(world))]
        assert summed[2] == pytest.approx(0.1 * world, rel=1e-15)
        assert highest == [world - 1, 0]
        assert gathered == [10.0 * r for r in range(world)]
        assert (sent, control) == (0, sum(ring_all_reduce_bytes(8 * n, world) for n in (3, 2, world, 1)))


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
            assert (place, size, tuple(members)) == (expected.index(rank), len(expected), expected), name


# -- a few steps, here and there ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a rank tells after its steps: those of the last step, then the state."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    bytes_sent: dict[str, int]
    num_steps: int


def ready(rank: int, layout: Layout, family: str, precision: str, gradients: str) -> tuple[Program, Mesh]:
    mesh = make_mesh(layout, rank, CPU)
    program = apply(FAMILIES[family], mesh, DTYPES[precision], DTYPES[gradients], OPTIMIZER.update)
    for name, values in tiny_weights(FAMILIES[family]).items():
        program.store.set_weights(name, values)
    return program, mesh


def steps_on(
    rank: int, world: int, short: str, family: str, num_steps: int, precision: str = "fp32", gradients: str = "fp32",
    max_norm: float = UNCLIPPED, spoil: str = "",
) -> Told:  # fmt: skip
    layout = Layout.parse(short)
    program, mesh = ready(rank, layout, family, precision, gradients)
    store, losses, norms = program.store, [], []
    if spoil == "nan" and rank == world - 1:  # of one rank alone
        store.weights(("norm",))["norm"].data[0] = math.nan
    for step in range(num_steps):
        tokens, targets = global_batch(step)
        if spoil == "no targets":
            targets = torch.full_like(targets, -100)
        batch = part_of(tokens, targets, layout, mesh.data.rank)
        mesh.bytes_sent()
        loss, norm = take_step(program, mesh, batch, RATE.at(step), max_norm)
        losses.append(mesh.world.sum(loss)[0])
        norms.append(norm)

    def cloned(which: str) -> dict[str, Tensor]:
        views = (unit.views(getattr(unit, which)) for unit in store.units.values())
        return {name: view.detach().clone() for view in views for name, view in view.items()}

    return Told(losses, norms, cloned("grads"), cloned("weights"), cloned("master"), mesh.bytes_sent(), store.num_steps)


def plain_steps(family: str, num_steps: int) -> Told:
    """The same on one process, with what everybody trusts."""
    config = FAMILIES[family]
    weights = {name: w.requires_grad_() for name, w in tiny_weights(config).items()}
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == wide] for wide in (True, False))
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    losses, norms, grads = [], [], {}
    for step in range(num_steps):
        tokens, targets = global_batch(step)
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        logits = Transformer(config).forward(weights, tokens, positions, Causal(config))
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        loss = summed / int((targets != -100).sum())
        theirs.zero_grad()
        loss.backward()
        grads = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)))
        for group in theirs.param_groups:
            group["lr"] = RATE.at(step)
        theirs.step()
        losses.append(loss.item())
    final = {name: w.detach() for name, w in weights.items()}
    return Told(losses, norms, grads, final, final, {}, num_steps)


def relative(mine: Tensor, other: Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_has_the_gradient_of_one_process(ranks: Ranks, layout: str, family: str) -> None:
    """Each gradient within 1e-5 of its size, loss and norm within 1e-6, on every rank, with ever fewer targets from
    rank to rank and micro-batch to micro-batch and none at all in some."""
    expected = plain_steps(family, 1)
    world = Layout.parse(layout).world_size
    for told in ranks.run(world, steps_on, layout, family, 1):
        assert told.grads.keys() == expected.grads.keys()
        assert told.losses == pytest.approx(expected.losses, rel=1e-6)
        assert told.norms == pytest.approx(expected.norms, rel=1e-6)
        errors = {name: relative(grad, expected.grads[name]) for name, grad in told.grads.items()}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("layout", ["dp1", "dp2.m2", "dp4"])
def test_three_steps_end_where_torch_ends(ranks: Ranks, layout: str, family: str) -> None:
    """Clipped at every step, decayed as torch decays. Weights within 1e-4 of their size: Adam divides by the root of
    tiny squares, so the gradients' rounding grows. Replicas are equal bit for bit."""
    expected = plain_steps(family, 3)
    assert min(expected.norms) > 2 * MAX_NORM, "every step is to be clipped"
    first, *others = ranks.run(Layout.parse(layout).world_size, steps_on, layout, family, 3, "fp32", "fp32", MAX_NORM)
    assert first.num_steps == 3
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.norms == pytest.approx(expected.norms, rel=1e-4)
    errors = {name: relative(weight, expected.weights[name]) for name, weight in first.weights.items()}
    assert max(errors.values()) < 1e-4, errors
    for other in others:
        assert other.losses == first.losses and other.norms == first.norms
        for name, weight in first.weights.items():
            assert torch.equal(weight, other.weights[name]), f"{name} differs between replicas"


@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["dp1.m4", "dp2", "dp4"])
def test_bf16_keeps_fp32_masters(ranks: Ranks, layout: str, gradients: str) -> None:
    """The weights are the masters rounded, on every rank alike; gradients lie within 3 % of those in fp32 (a bf16
    number has 8 bits, and weights, activations and gradients are all rounded to it), the loss within 0.5 %."""
    exact = plain_steps("llama-tied", 1)
    for told in ranks.run(Layout.parse(layout).world_size, steps_on, layout, "llama-tied", 1, "bf16", gradients):
        assert {str(grad.dtype) for grad in told.grads.values()} == {f"torch.{DTYPE_WORDS[gradients]}"}
        assert told.losses == pytest.approx(exact.losses, rel=5e-3)
        assert told.norms == pytest.approx(exact.norms, rel=2e-2)
        errors = {name: relative(grad, exact.grads[name]) for name, grad in told.grads.items()}
        assert max(errors.values()) < 3e-2, errors
    first, *others = ranks.run(Layout.parse(layout).world_size, steps_on, layout, "llama-tied", 3, "bf16", gradients)
    for name, master in first.masters.items():
        assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float()), name
        assert torch.equal(first.weights[name], master.bfloat16()), f"{name} is not its master rounded"
        assert all(torch.equal(master, other.masters[name]) for other in others)
    start = tiny_weights(FAMILIES["llama-tied"])
    moved = {name: relative(master, start[name]) for name, master in first.masters.items()}
    assert min(moved.values()) > 1e-3, "a step in bf16 alone would round the change of large weights away"


@pytest.mark.parametrize("layout", ["dp1", "dp1.m4", "dp2", "dp2.m2", "dp3", "dp4"])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_bytes_sent_are_those_predicted(ranks: Ranks, layout: str, gradients: str) -> None:
    """2 P (n - 1) / n elements of 4 bytes a step, whatever gradients are kept in and however many micro-batches; a ring
    of three cuts each unit into thirds, so a byte of a unit may be rounded away."""
    n, specs = Layout.parse(layout).dp, model_specs(FAMILIES["llama-tied"])
    by_unit = [4 * sum(spec.numel for spec in owned) for owned in units(specs).values()]
    assert sum(by_unit) == 4 * num_params(specs)
    exact = 2 * 4 * num_params(specs) * (n - 1) / n
    for told in ranks.run(n, steps_on, layout, "llama-tied", 1, "bf16", gradients):
        assert told.bytes_sent["dp"] == sum(ring_all_reduce_bytes(num_bytes, n) for num_bytes in by_unit)
        assert 0 <= exact - told.bytes_sent["dp"] < (len(by_unit) if n == 3 else 1e-9)
        assert [told.bytes_sent[axis] for axis in ("tp", "pp", "cp")] == [0, 0, 0]


# -- what must not break a step -----------------------------------------------------------------------------


def no_targets_on(rank: int, world: int, layout: str) -> Told:
    return steps_on(rank, world, layout, "llama", 2, max_norm=MAX_NORM, spoil="no targets")


def broken_weight_on(rank: int, world: int, layout: str) -> Told:
    return steps_on(rank, world, layout, "llama", 1, max_norm=MAX_NORM, spoil="nan")


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_a_step_without_any_target_does_not_divide_by_zero(ranks: Ranks, layout: str) -> None:
    for told in ranks.run(Layout.parse(layout).world_size, no_targets_on, layout):
        assert told.losses == told.norms == [0.0, 0.0]
        assert all(bool(weight.isfinite().all()) for weight in told.weights.values())


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_a_gradient_that_is_not_finite_is_not_stepped_on(ranks: Ranks, layout: str) -> None:
    """One rank has a broken weight: all see it in the norm, and none moves, so all keep the state before."""
    start = tiny_weights(FAMILIES["llama"])
    world = Layout.parse(layout).world_size
    for rank, told in enumerate(ranks.run(world, broken_weight_on, layout)):
        assert math.isnan(told.norms[0]) and told.num_steps == 0
        for name, weight in told.weights.items():
            if rank < world - 1 or name != "norm":
                assert torch.equal(weight, start[name]), name


# -- first weights ------------------------------------------------------------------------------------------


def drawn_on(rank: int, world: int, layout: str, seed: int) -> dict[str, Tensor]:
    mesh = make_mesh(Layout.parse(layout), rank, CPU)
    program = apply(FAMILIES["gpt2"], mesh, torch.float32, torch.float32, OPTIMIZER.update)
    draw_weights(program, mesh, seed)
    return {name: view.clone() for name, state, view in program.store.state() if state == "master"}


def test_first_weights_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, drawn_on, "dp1.m2", 7)
    (other,) = ranks.run(1, drawn_on, "dp1", 8)
    assert not torch.equal(expected["embed"], other["embed"])
    for told in ranks.run(3, drawn_on, "dp3", 7):
        assert all(torch.equal(told[name], expected[name]) for name in expected)


# -- what cannot be trained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dp2.tp2", "pp2.m2", "dp2.z1", "cp2", "dp2.rc-full", "dp4.z3.s2", "dp2.fsdp"])
def test_layouts_that_are_planned_only_are_refused_by_name(layout: str) -> None:
    plan = Layout.parse(layout)
    with pytest.raises(ValueError, match=rf"layout {plan} can be planned but not trained yet") as caught:
        check_trainable(plan, FAMILIES["llama"])
    check_trainable(Layout.parse(str(caught.value).rsplit(": ", 1)[1]))  # what it names instead does train


@settings(max_examples=40)
@given(st.integers(1, 64), st.integers(1, 64))
def test_data_parallel_with_accumulation_is_trainable(dp: int, microbatches: int) -> None:
    check_trainable(Layout(dp=dp, microbatches=microbatches), FAMILIES["gpt2"])


def fail_in_a_collective(rank: int, world: int) -> None:
    mesh = make_mesh(Layout(dp=world), rank, CPU)
    if rank == 1:
        raise ValueError("rank one gives up")
    x = torch.ones(1 << 16)
    mesh.data.all_reduce(x).wait()


def test_a_collective_that_breaks_off_names_its_axis(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank one gives up") as caught:
        ranks.run(2, fail_in_a_collective)
    assert "then rank 0: shardwise.parallel.mesh.CollectiveFailed: a collective of axis data" in str(caught.value)
