"""PyTorch's `fully_shard` in our loop, against one process with plain autograd, torch's AdamW and torch's clipping.
What it holds and sends is compared with the plan in `test_predicted.py`."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from memory import peak_bytes
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import Program, check_trainable, make_context
from shardwise.parallel.fsdp import FsdpStore, chunk_rows, make_fsdp
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.unit import Owned
from shardwise.params import Box, model_specs
from shardwise.train.loop import DTYPES, take_step
from tiny_training import (
    FAMILIES,
    OPTIMIZER,
    RATE,
    Expected,
    fill_store,
    global_batch,
    part_of,
    plain_steps,
    tiny_weights,
    worst,
)

CPU = torch.device("cpu")
MAX_NORM = 0.5
KINDS: tuple[Owned, ...] = ("gradient", "master", "exp_avg", "exp_avg_sq")

Rectangle = tuple[str, Box, Tensor]


# -- a few steps, here and there ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What one rank tells after its steps, of the last one where there were several."""

    losses: list[float]
    norms: list[float]
    states: dict[Owned, list[Rectangle]]
    bytes_sent: dict[str, int]
    bytes_held: dict[str, int]


def build(rank: int, short: str, config: ModelConfig, precision: str, gradients: str) -> tuple[Program, Mesh]:
    mesh = make_mesh(Layout.parse(short), rank, CPU)
    dtype, specs = DTYPES[precision], model_specs(config)
    context = functools.partial(make_context, Transformer(config), dtype)
    parts = make_fsdp(config, specs, mesh, dtype, DTYPES[gradients], OPTIMIZER.update, context)
    return Program(config, specs, *parts), mesh  # type: ignore[arg-type]


def ready(rank: int, short: str, family: str, precision: str, gradients: str) -> tuple[Program, Mesh]:
    program, mesh = build(rank, short, FAMILIES[family], precision, gradients)
    fill_store(program.store, tiny_weights(FAMILIES[family]))
    return program, mesh


def read(program: Program) -> dict[Owned, list[Rectangle]]:
    owned = program.store.owned
    return {kind: [(spec.name, box, view.detach().clone()) for spec, box, view in owned(kind)] for kind in KINDS}


def step_once(program: Program, mesh: Mesh, step: int, max_norm: float) -> tuple[float, float]:
    tokens, targets = global_batch(step)
    batch = part_of(tokens, targets, mesh.layout, mesh.data.rank)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), max_norm)
    return mesh.world.sum(loss)[0], norm


def evaluate_once(program: Program, mesh: Mesh) -> float:
    """The mean loss of the first batch, and a look at what evaluation leaves behind."""
    tokens, targets = global_batch(0)
    batch = part_of(tokens, targets, mesh.layout, mesh.data.rank)
    summed = sum(program.pipeline.evaluate(program.evaluation, microbatch) for microbatch in batch.microbatches)
    assert isinstance(program.store, FsdpStore)
    assert all(isinstance(weight, DTensor) for weight in program.store.model.parameters()), "gathered weights stay"
    total, targets_seen = mesh.data.sum(summed, batch.num_targets)
    return total / targets_seen


def steps_on(
    rank: int, world: int, short: str, family: str, num_steps: int, max_norm: float = 0.0, precision: str = "fp32",
    gradients: str = "fp32", evaluated: bool = False,
) -> Told:  # fmt: skip
    program, mesh = ready(rank, short, family, precision, gradients)
    told = []
    for step in range(num_steps):
        if evaluated:
            evaluate_once(program, mesh)
        mesh.bytes_sent()
        told.append(step_once(program, mesh, step, max_norm))
    assert program.store.num_steps == num_steps
    losses, norms = zip(*told, strict=True)
    sent = mesh.bytes_sent()
    held = program.store.held_bytes()
    return Told(list(losses), list(norms), read(program), sent, held)


def joined(told: list[Told], kind: Owned, layout: Layout, config: ModelConfig) -> dict[str, Tensor]:
    """Whole parameters from the rectangles of all ranks. Every element is owned by one rank of each group, and equal
    in all groups, bit for bit."""
    shapes = {spec.name: spec.shape for spec in model_specs(config) if spec.tied_to is None}
    replicas = layout.data_size // layout.shard_size
    whole = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    owners = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for rank, each in enumerate(told):
        for name, box, values in each.states[kind]:
            assert values.shape == box.shape
            if rank < layout.shard_size:
                whole[name][box.slices] = values.float()
            assert torch.equal(whole[name][box.slices], values.float()), f"{name} differs between groups"
            owners[name][box.slices] += 1
    assert all(bool((count == replicas).all()) for count in owners.values())
    return whole


# -- the same numbers as one process ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3"])
@pytest.mark.parametrize("short", ["dp2.fsdp", "dp3.fsdp", "dp2.fsdp.m2", "dp4.fsdp.s2.m3", "dp2.fsdp.keep"])
def test_one_step_has_the_gradient_of_one_process(ranks: Ranks, short: str, family: str) -> None:
    """Each gradient within 1e-5 of its size, loss and norm within 1e-6, with ever fewer targets from rank to rank and
    micro-batch to micro-batch and none at all in some; three ranks divide no matrix of these models evenly."""
    expected, layout = plain_steps(FAMILIES[family], 1), Layout.parse(short)
    told = ranks.run(layout.world_size, steps_on, short, family, 1)
    for each in told:
        assert each.losses == pytest.approx(expected.losses, rel=1e-6)
        assert each.norms == pytest.approx(expected.norms, rel=1e-6)
    assert worst(joined(told, "gradient", layout, FAMILIES[family]), expected.grads) < 1e-5


@pytest.mark.parametrize(("short", "family"), [
    ("dp2.fsdp.m2", "llama-tied"), ("dp3.fsdp", "llama-tied"), ("dp4.fsdp.s2", "gpt2"), ("dp3.fsdp.keep", "qwen3"),
])  # fmt: skip
def test_three_steps_end_where_torch_ends(ranks: Ranks, short: str, family: str) -> None:
    """Clipped at every step, decayed as torch decays. Weights within 1e-4 of their size: Adam divides by the root of
    tiny squares, so the gradients' rounding grows. The last gradients, unclipped, can still be read."""
    expected, layout = plain_steps(FAMILIES[family], 3, MAX_NORM), Layout.parse(short)
    assert min(expected.norms) > 2 * MAX_NORM, "every step is to be clipped"
    told = ranks.run(layout.world_size, steps_on, short, family, 3, MAX_NORM)
    for each in told:
        assert each.losses == pytest.approx(expected.losses, rel=1e-5)
        assert each.norms == pytest.approx(expected.norms, rel=1e-4)
    for kind, whole in zip(KINDS, states_of(expected), strict=True):
        assert worst(joined(told, kind, layout, FAMILIES[family]), whole) < 1e-4, kind


def states_of(expected: Expected) -> tuple[dict[str, Tensor], ...]:
    return expected.grads, expected.weights, expected.exp_avg, expected.exp_avg_sq


def test_more_ranks_than_rows(ranks: Ranks) -> None:
    """Six ranks share the eight elements of a query norm two by two, so the last two have none: same bounds."""
    expected, layout = plain_steps(FAMILIES["qwen3"], 2, MAX_NORM), Layout.parse("dp6.fsdp")
    told = ranks.run(6, steps_on, "dp6.fsdp", "qwen3", 2, MAX_NORM)
    assert not any(name.endswith("q_norm") for rank in (4, 5) for name, _, _ in told[rank].states["master"])
    assert told[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert told[0].norms == pytest.approx(expected.norms, rel=1e-5)
    for kind, whole in zip(KINDS, states_of(expected), strict=True):
        assert worst(joined(told, kind, layout, FAMILIES["qwen3"]), whole) < 1e-4, kind


@pytest.mark.parametrize("short", ["dp2.fsdp.m2", "dp2.fsdp.keep"])
def test_evaluation_between_steps_changes_nothing(ranks: Ranks, short: str) -> None:
    """Bit for bit, nor does it send more in the step after; its loss is that of the step (summed in another order)."""
    plain = ranks.run(2, steps_on, short, "llama-tied", 3)
    mixed = ranks.run(2, steps_on, short, "llama-tied", 3, 0.0, "fp32", "fp32", True)
    for told, other in zip(mixed, plain, strict=True):
        assert told.losses == other.losses and told.norms == other.norms
        assert told.bytes_sent == other.bytes_sent and told.bytes_held == other.bytes_held
        for (_, _, mine), (_, _, same) in zip(told.states["master"], other.states["master"], strict=True):
            assert torch.equal(mine, same)
    for loss in ranks.run(2, evaluated_on, short):
        assert loss == pytest.approx(plain[0].losses[0], rel=1e-6)


def evaluated_on(rank: int, world: int, short: str) -> float:
    return evaluate_once(*ready(rank, short, "llama-tied", "fp32", "fp32"))


@pytest.mark.parametrize("short", ["dp2.fsdp", "dp4.fsdp.s2"])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_bf16_keeps_fp32_masters(ranks: Ranks, short: str, gradients: str) -> None:
    """Gradients lie within 3 % of those in fp32 (a bf16 number has 8 bits, and weights, activations and gradients are
    all rounded to it), the loss within 0.5 %; masters lie as near after a step, and are no bf16 numbers."""
    exact, layout = plain_steps(FAMILIES["llama-tied"], 1), Layout.parse(short)
    told = ranks.run(layout.world_size, steps_on, short, "llama-tied", 1, 0.0, "bf16", gradients)
    for each in told:
        assert {grad.dtype for _, _, grad in each.states["gradient"]} == {DTYPES[gradients]}
        assert {master.dtype for _, _, master in each.states["master"]} == {torch.float32}
        assert each.losses == pytest.approx(exact.losses, rel=5e-3)
        assert each.norms == pytest.approx(exact.norms, rel=2e-2)
    assert worst(joined(told, "gradient", layout, FAMILIES["llama-tied"]), exact.grads) < 3e-2
    masters = joined(told, "master", layout, FAMILIES["llama-tied"])
    assert worst(masters, exact.weights) < 3e-2
    assert not any(torch.equal(master, master.bfloat16().float()) for master in masters.values())


def weights_on(rank: int, world: int) -> dict[str, tuple[torch.dtype, bool]]:
    """Of every parameter the dtype in which it is held, and whether it is its master rounded."""
    program, mesh = ready(rank, "dp2.fsdp", "gpt2", "bf16", "bf16")
    step_once(program, mesh, 0, MAX_NORM)
    assert isinstance(program.store, FsdpStore)
    return {
        shard.spec.name: (shard.local.dtype, torch.equal(shard.local, shard.master.bfloat16()))
        for shard in program.store.shards
    }


def test_bf16_weights_are_their_masters_rounded(ranks: Ranks) -> None:
    names = [spec.name for spec in model_specs(FAMILIES["gpt2"]) if spec.tied_to is None]
    assert ranks.run(2, weights_on) == [dict.fromkeys(names, (torch.bfloat16, True))] * 2


# -- what must not break a step -----------------------------------------------------------------------------


def broken_weight_on(rank: int, world: int) -> tuple[Told, Told]:
    """A step on a weight that is broken on the last rank alone, then one on what was there before."""
    program, mesh = ready(rank, "dp2.fsdp.m2", "llama", "fp32", "fp32")
    shard = next(shard for shard in program.store.shards if shard.spec.name == "norm")  # type: ignore[attr-defined]
    good = shard.master.clone()
    if rank == world - 1:
        shard.master[0] = math.nan
    _, norm = step_once(program, mesh, 0, MAX_NORM)
    assert math.isnan(norm) and program.store.num_steps == 0
    shard.master.copy_(good)
    loss, norm = step_once(program, mesh, 0, MAX_NORM)
    mended = Told([loss], [norm], read(program), {}, {})
    return mended, steps_on(rank, world, "dp2.fsdp.m2", "llama", 1, MAX_NORM)


def test_a_gradient_that_is_not_finite_is_neither_stepped_on_nor_kept(ranks: Ranks) -> None:
    for mended, straight in ranks.run(2, broken_weight_on):
        assert mended.losses == straight.losses and mended.norms == straight.norms
        for kind in KINDS:
            for (name, _, mine), (_, _, other) in zip(mended.states[kind], straight.states[kind], strict=True):
                assert torch.equal(mine, other), f"{kind} of {name}"


def test_a_layout_with_nothing_to_cut_is_refused() -> None:
    for short, other in (("dp1.fsdp", "dp1.z3"), ("dp1.fsdp.m4", "dp1.z3.m4"), ("dp2.fsdp.s1", "dp2.z3.s1")):
        with pytest.raises(ValueError, match="fsdp cuts over at least 2 data ranks; z3 in its place works"):
            check_trainable(Layout.parse(short))
        check_trainable(Layout.parse(other))
    check_trainable(Layout.parse("dp4.fsdp.s2"))


# -- what a rank holds --------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 12))
def test_rows_are_cut_as_torch_chunks_them(num_rows: int, num_ranks: int) -> None:
    chunks = [list(chunk) for chunk in torch.arange(num_rows).chunk(num_ranks)]
    mine = [list(range(*chunk_rows(num_rows, rank, num_ranks))) for rank in range(num_ranks)]
    assert mine == chunks + [[]] * (num_ranks - len(chunks))


def built_on(rank: int, world: int, trace: Path) -> tuple[int, int, int]:
    """A model of which the embedding alone has 16 MB: its peak and largest allocation, and what is held at the end."""
    config = ModelConfig("llama", 2, 256, 512, 4, 2, 64, 16384, 32, tied=True)
    held = []

    def start() -> Program:
        program, _ = build(rank, f"dp{world}.fsdp", config, "fp32", "fp32")
        held.append(sum(program.store.held_bytes().values()))
        return program

    peak, largest = peak_bytes(start, trace / str(rank))
    return peak, largest, held[0]


def test_no_rank_ever_holds_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """Building it takes no more than what stays (and a few kilobytes), in no piece larger than a shard."""
    for peak, largest, held in ranks.run(4, built_on, tmp_path):
        assert held <= peak < held + 2**16
        assert largest == 16384 * 256 // 4 * 4
