"""PyTorch's `fully_shard` in our loop, against one process with plain autograd, torch's AdamW and
torch's clipping. What it holds and sends is compared with the plan in `test_predicted.py`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from memory import peak_bytes
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import STATES, Checkpoint
from shardwise.layout import Layout
from shardwise.measure.parity import Parity, Trial, compare
from shardwise.model.layers import DTYPES
from shardwise.parallel import fsdp, state_store
from shardwise.parallel.apply import apply, check_trainable
from shardwise.parallel.fsdp import FsdpStore, capacity_elements, chunk_rows
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned
from shardwise.params import model_specs
from shardwise.shards import Box, boxes, is_first_holder, local_shape, partial_axes
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.loop import take_step
from tiny_training import (
    FAMILIES,
    LLAMA,
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
MODELS = FAMILIES | {
    "one-kv": replace(LLAMA, num_kv_heads=1, qkv_bias=True, qk_norm=True, tied=True),
    "biased": replace(
        LLAMA, num_kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True, ffn_size=21
    ),
    "odd": ModelConfig(
        "llama", 2, 15, 50, 3, 3, 4, 97, 32, tied=True
    ),  # tp3 divides neither 50 nor 97
    "few": replace(FAMILIES["gpt2"], ffn_size=5),  # over tp4 some have one row of the MLP
}

Rectangle = tuple[str, Box, Tensor]


# -- a few steps, here and there


@dataclass(frozen=True)
class RankReport:
    """The result of one rank: that of the last step where there were several."""

    losses: list[float]
    norms: list[float]
    states: dict[Owned, list[Rectangle]]
    bytes_sent: dict[str, int]
    bytes_held: dict[str, int]


def build(
    rank: int, short: str, config: ModelConfig, precision: str, gradients: str
) -> tuple[Program, Mesh]:
    mesh = make_mesh(Layout.parse(short), rank, CPU, config.num_kv_heads)
    return apply(config, mesh, DTYPES[precision], DTYPES[gradients], OPTIMIZER.update), mesh


def ready(
    rank: int, short: str, model: str, precision: str = "fp32", gradients: str = "fp32"
) -> tuple[Program, Mesh]:
    program, mesh = build(rank, short, MODELS[model], precision, gradients)
    fill_store(program.store, tiny_weights(MODELS[model]))  # type: ignore[arg-type]
    return program, mesh


def read(program: Program) -> dict[Owned, list[Rectangle]]:
    owned = program.store.owned
    return {
        kind: [(spec.name, box, view.detach().clone()) for spec, box, view in owned(kind)]
        for kind in KINDS
    }


def step_once(program: Program, mesh: Mesh, step: int, max_norm: float) -> tuple[float, float]:
    tokens, targets = global_batch(step)
    batch = part_of(tokens, targets, mesh.layout, mesh.data.rank)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), max_norm)
    return mesh.data.sum(loss)[0], norm


def evaluate_once(program: Program, mesh: Mesh) -> float:
    """The mean loss of the first batch, and a look at what evaluation leaves behind."""
    tokens, targets = global_batch(0)
    batch = part_of(tokens, targets, mesh.layout, mesh.data.rank)
    summed = sum(
        program.pipeline.evaluate(program.evaluation, microbatch)
        for microbatch in batch.microbatches
    )
    assert isinstance(program.store, FsdpStore)
    assert all(isinstance(weight, DTensor) for weight in program.store.model.parameters()), (
        "gathered weights stay"
    )
    total, targets_seen = mesh.data.sum(summed, batch.num_targets)
    return total / targets_seen


def steps_on(
    rank: int,
    world: int,
    short: str,
    model: str,
    num_steps: int,
    max_norm: float = 0.0,
    precision: str = "fp32",
    gradients: str = "fp32",
    evaluated: bool = False,
) -> RankReport:
    program, mesh = ready(rank, short, model, precision, gradients)
    reports = []
    for step in range(num_steps):
        if evaluated:
            evaluate_once(program, mesh)
        mesh.bytes_sent()
        reports.append(step_once(program, mesh, step, max_norm))
    assert program.store.num_steps == num_steps
    losses, norms = zip(*reports, strict=True)
    sent = mesh.bytes_sent()
    held = program.store.held_bytes()
    return RankReport(list(losses), list(norms), read(program), sent, held)


def joined(
    reports: list[RankReport], kind: Owned, layout: Layout, config: ModelConfig
) -> dict[str, Tensor]:
    """Return whole parameters from the boxes of all ranks. Every element has one first owner, and
    the other owners have the same bits."""
    specs = {spec.name: spec for spec in model_specs(config) if spec.tied_to is None}
    whole = {name: torch.full(spec.shape, math.nan) for name, spec in specs.items()}
    owners = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in specs.items()}
    for rank, each in enumerate(reports):
        for name, box, values in each.states[kind]:
            assert values.shape == box.shape
            there = whole[name][box.slices]
            there.copy_(torch.where(there.isnan(), values.float(), there))
            assert torch.equal(there, values.float()), f"{kind} of {name} differs between ranks"
            spec = specs[name]
            owners[name][box.slices] += is_first_holder(
                spec, spec.part(box.part), layout, layout.coord(rank)
            )
    assert all(bool((count == 1).all()) for count in owners.values())
    return whole


# -- the same numbers as one process


@pytest.mark.parametrize(
    ("short", "family"),
    [
        ("dp3.fsdp", "llama-tied"),
        ("dp3.fsdp", "gpt2"),
        ("dp3.fsdp", "qwen3"),
        ("dp2.fsdp.m2", "gpt2"),
        ("dp4.fsdp.s2.m3", "qwen3"),
        ("dp2.fsdp.keep", "llama-tied"),
    ],
)
def test_one_step_has_the_gradient_of_one_process(ranks: Ranks, short: str, family: str) -> None:
    """Each gradient within 1e-5 of its size, loss and norm within 1e-6, with ever fewer targets
    from rank to rank and micro-batch to micro-batch and none at all in some; three ranks divide no
    matrix of these models evenly."""
    expected = plain_steps(FAMILIES[family], 1)
    layout = Layout.parse(short)
    reports = ranks.run(layout.world_size, steps_on, short, family, 1)
    for each in reports:
        assert each.losses == pytest.approx(expected.losses, rel=1e-6)
        assert each.norms == pytest.approx(expected.norms, rel=1e-6)
    assert worst(joined(reports, "gradient", layout, FAMILIES[family]), expected.grads) < 1e-5


@pytest.mark.parametrize(
    ("short", "family"),
    [
        ("dp2.fsdp.m2", "llama-tied"),
        ("dp3.fsdp", "llama-tied"),
        ("dp4.fsdp.s2", "gpt2"),
        ("dp3.fsdp.keep", "qwen3"),
    ],
)
def test_three_steps_end_where_torch_ends(ranks: Ranks, short: str, family: str) -> None:
    """Clipped at every step, decayed as torch decays. Weights within 1e-4 of their size: Adam
    divides by the root of tiny squares, so the gradients' rounding grows. The last gradients,
    unclipped, can still be read."""
    expected = plain_steps(FAMILIES[family], 3, MAX_NORM)
    layout = Layout.parse(short)
    assert min(expected.norms) > 2 * MAX_NORM, "every step is to be clipped"
    reports = ranks.run(layout.world_size, steps_on, short, family, 3, MAX_NORM)
    for each in reports:
        assert each.losses == pytest.approx(expected.losses, rel=1e-5)
        assert each.norms == pytest.approx(expected.norms, rel=1e-4)
    for kind, whole in zip(KINDS, states_of(expected), strict=True):
        assert worst(joined(reports, kind, layout, FAMILIES[family]), whole) < 1e-4, kind


def states_of(expected: Expected) -> tuple[dict[str, Tensor], ...]:
    return expected.grads, expected.weights, expected.exp_avg, expected.exp_avg_sq


def test_more_ranks_than_rows(ranks: Ranks) -> None:
    """Six ranks share the eight elements of a query norm two by two, so the last two have none:
    same bounds."""
    expected = plain_steps(FAMILIES["qwen3"], 2, MAX_NORM)
    layout = Layout.parse("dp6.fsdp")
    reports = ranks.run(6, steps_on, "dp6.fsdp", "qwen3", 2, MAX_NORM)
    assert not any(
        name.endswith("q_norm") for rank in (4, 5) for name, _, _ in reports[rank].states["master"]
    )
    assert reports[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert reports[0].norms == pytest.approx(expected.norms, rel=1e-5)
    for kind, whole in zip(KINDS, states_of(expected), strict=True):
        assert worst(joined(reports, kind, layout, FAMILIES["qwen3"]), whole) < 1e-4, kind


@pytest.mark.parametrize("short", ["dp2.fsdp.m2", "dp2.fsdp.keep", "dp2.tp2.sp.fsdp.m2"])
def test_evaluation_between_steps_changes_nothing(ranks: Ranks, short: str) -> None:
    """Bit for bit, nor does it send more in the step after; its loss is that of the step (summed in
    another order)."""
    world = Layout.parse(short).world_size
    plain = ranks.run(world, steps_on, short, "llama-tied", 3)
    mixed = ranks.run(world, steps_on, short, "llama-tied", 3, 0.0, "fp32", "fp32", True)
    for reports, other in zip(mixed, plain, strict=True):
        assert reports.losses == other.losses and reports.norms == other.norms
        assert reports.bytes_sent == other.bytes_sent and reports.bytes_held == other.bytes_held
        for (_, _, local), (_, _, same) in zip(
            reports.states["master"], other.states["master"], strict=True
        ):
            assert torch.equal(local, same)
    for loss in ranks.run(world, evaluated_on, short):
        assert loss == pytest.approx(plain[0].losses[0], rel=1e-6)


def evaluated_on(rank: int, world: int, short: str) -> float:
    return evaluate_once(*ready(rank, short, "llama-tied"))


@pytest.mark.parametrize("short", ["dp2.fsdp", "dp4.fsdp.s2"])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_bf16_keeps_fp32_masters(ranks: Ranks, short: str, gradients: str) -> None:
    """Gradients lie within 3 % of those in fp32 (a bf16 number has 8 bits, and weights, activations
    and gradients are all rounded to it), the loss within 0.5 %; masters lie as near after a step,
    and are no bf16 numbers."""
    exact = plain_steps(FAMILIES["llama-tied"], 1)
    layout = Layout.parse(short)
    reports = ranks.run(layout.world_size, steps_on, short, "llama-tied", 1, 0.0, "bf16", gradients)
    for each in reports:
        assert {grad.dtype for _, _, grad in each.states["gradient"]} == {DTYPES[gradients]}
        assert {master.dtype for _, _, master in each.states["master"]} == {torch.float32}
        assert each.losses == pytest.approx(exact.losses, rel=5e-3)
        assert each.norms == pytest.approx(exact.norms, rel=2e-2)
    assert worst(joined(reports, "gradient", layout, FAMILIES["llama-tied"]), exact.grads) < 3e-2
    masters = joined(reports, "master", layout, FAMILIES["llama-tied"])
    assert worst(masters, exact.weights) < 3e-2
    assert not any(torch.equal(master, master.bfloat16().float()) for master in masters.values())


def weights_on(rank: int, world: int) -> dict[str, tuple[torch.dtype, bool]]:
    """Return the dtype in which each parameter is held, and whether it is its master rounded."""
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


# -- what must not break a step


def broken_weight_on(rank: int, world: int) -> tuple[RankReport, RankReport]:
    """A step on a weight that is broken on the last rank alone, then one on what was there
    before."""
    program, mesh = ready(rank, "dp2.fsdp.m2", "llama")
    shard = next(shard for shard in program.store.shards if shard.spec.name == "norm")  # type: ignore[attr-defined]
    good = shard.master.clone()
    if rank == world - 1:
        shard.master[0] = math.nan
    _, norm = step_once(program, mesh, 0, MAX_NORM)
    assert math.isnan(norm) and program.store.num_steps == 0
    shard.master.copy_(good)
    loss, norm = step_once(program, mesh, 0, MAX_NORM)
    mended = RankReport([loss], [norm], read(program), {}, {})
    return mended, steps_on(rank, world, "dp2.fsdp.m2", "llama", 1, MAX_NORM)


def test_a_gradient_that_is_not_finite_is_neither_stepped_on_nor_kept(ranks: Ranks) -> None:
    for mended, straight in ranks.run(2, broken_weight_on):
        assert mended.losses == straight.losses and mended.norms == straight.norms
        for kind in KINDS:
            for (name, _, local), (_, _, other) in zip(
                mended.states[kind], straight.states[kind], strict=True
            ):
                assert torch.equal(local, other), f"{kind} of {name}"


def test_a_layout_with_nothing_to_cut_is_refused() -> None:
    for short, other in (
        ("dp1.fsdp", "dp1.z3"),
        ("dp1.fsdp.m4", "dp1.z3.m4"),
        ("dp2.fsdp.s1", "dp2.z3.s1"),
    ):
        with pytest.raises(
            ValueError, match="fsdp shards over at least 2 data ranks; z3 in its place works"
        ):
            check_trainable(Layout.parse(short))
        check_trainable(Layout.parse(other))
    check_trainable(Layout.parse("dp4.fsdp.s2"))


def test_a_rank_without_any_of_the_mlp_is_refused() -> None:
    config = replace(LLAMA, ffn_size=3)
    with pytest.raises(ValueError, match=r"tp4 leaves some for an ffn of 3; z3 in its place works"):
        check_trainable(Layout.parse("dp2.tp4.fsdp"), config)
    for short in ("dp2.tp4.z3", "dp2.tp2.fsdp"):
        check_trainable(Layout.parse(short), config)


# -- with tensor and sequence parallel

Case = tuple[str, str]
"""A layout and a model."""

ON_FOUR = [
    ("dp2.tp2.fsdp", "gpt2"), ("dp2.tp2.fsdp.m2", "one-kv"),
    ("dp2.tp2.sp.fsdp.keep.m2", "llama-tied"),
]  # fmt: skip
ON_SIX = [("dp2.tp3.fsdp", "odd"), ("dp3.tp2.sp.fsdp.m2", "qwen3")]
ON_EIGHT = [("dp4.tp2.fsdp.s2", "biased"), ("dp2.tp4.fsdp", "few")]


def cases_on(
    rank: int, world: int, cases: Sequence[Case], num_steps: int, spoil: str = ""
) -> list[RankReport]:
    with pytest.MonkeyPatch.context() as patch:
        if spoil:
            SPOILS[spoil](patch)
        return [steps_on(rank, world, *case, num_steps, MAX_NORM) for case in cases]


def check_case(case: Case, reports: list[RankReport], num_steps: int) -> None:
    """Losses within 1e-6 of plain torch on one process, norms 1e-5, gradients, weights and moments
    1e-4."""
    short, model = case
    expected = plain_steps(MODELS[model], num_steps, MAX_NORM)
    assert min(expected.norms) > MAX_NORM, "every step is to be clipped"
    for each in reports:
        assert each.losses == pytest.approx(expected.losses, rel=1e-6), case
        assert each.norms == pytest.approx(expected.norms, rel=1e-5), case
        assert (each.losses, each.norms) == (reports[0].losses, reports[0].norms), case
    for kind, whole in zip(KINDS, states_of(expected), strict=True):
        assert worst(joined(reports, kind, Layout.parse(short), MODELS[model]), whole) < 1e-4, (
            case,
            kind,
        )


@pytest.mark.parametrize("cases", [ON_FOUR, ON_SIX, ON_EIGHT], ids=["4", "6", "8"])
def test_what_tensor_ranks_share_is_whole_and_equal(ranks: Ranks, cases: list[Case]) -> None:
    """Norms, q and k norms, k and v of shared heads and biases are summed over the ranks that have
    a term of them; a vocabulary, an ffn or rows of a shard that do not divide are padded, and
    nobody sees it."""
    by_rank = ranks.run(Layout.parse(cases[0][0]).world_size, cases_on, cases, 3, timeout_s=120)
    for number, case in enumerate(cases):
        check_case(case, [reports[number] for reports in by_rank], 3)


@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_in_bf16_replicas_are_equal_too(ranks: Ranks, gradients: str) -> None:
    """Bit for bit after three clipped steps; losses are within 1 % of those in fp32."""
    expected = plain_steps(MODELS["biased"], 3, MAX_NORM)
    reports = ranks.run(4, steps_on, "dp2.tp2.sp.fsdp.m2", "biased", 3, MAX_NORM, "bf16", gradients)
    for each in reports:
        assert each.losses == pytest.approx(expected.losses, rel=1e-2)
    for kind in KINDS:
        joined(reports, kind, Layout.parse("dp2.tp2.sp.fsdp.m2"), MODELS["biased"])


def without_partial(axis: str, ending: str) -> Callable[[pytest.MonkeyPatch], None]:
    """No sum over `axis` of the gradients of parameters whose name ends so."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        def changed(spec: Any, part: Any, layout: Layout) -> tuple[str, ...]:
            found = partial_axes(spec, part, layout)
            return tuple(
                name for name in found if not (name == axis and spec.name.endswith(ending))
            )

        patch.setattr(fsdp, "partial_axes", changed)

    return spoil


def count_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_store, "is_first_holder", lambda *_: True)


SPOILS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "k and v": without_partial("kv_replica", "qkv"),
    "bias of k and v": without_partial("kv_replica", "qkv_bias"),
    "k norm": without_partial("tp", "k_norm"),
    "norm under sp": without_partial("tp", "norm"),
    "norm counts replicas": count_all,
}


@pytest.mark.parametrize(
    ("spoil", "short", "model"),
    [
        ("k and v", "dp2.tp2.fsdp", "one-kv"),
        ("bias of k and v", "dp2.tp2.sp.fsdp", "biased"),
        ("k norm", "dp2.tp2.fsdp", "qwen3"),
        ("norm under sp", "dp2.tp2.sp.fsdp", "llama"),
        ("norm counts replicas", "dp2.tp2.fsdp", "llama"),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    ranks: Ranks, spoil: str, short: str, model: str
) -> None:
    reports = [each for (each,) in ranks.run(4, cases_on, [(short, model)], 1, spoil)]
    with pytest.raises(AssertionError):
        check_case((short, model), reports, 1)


@given(
    st.sampled_from(sorted(MODELS)), st.sampled_from([2, 3, 4, 8]), st.integers(2, 5), st.booleans()
)
def test_what_tensor_ranks_share_lies_at_one_place(
    model: str, tp: int, num_shards: int, sequence: bool
) -> None:
    """All ranks of an axis over which a part is summed have the same rows of it, in a tensor of the
    same shape; and a sum over groups sets enough room aside for what any rank has."""
    layout = Layout(dp=num_shards, tp=tp, shard="fsdp", sequence_parallel=sequence)
    config = MODELS[model]
    assume(not layout.problems(config))
    for spec in model_specs(config):
        shapes = [local_shape(spec, layout, layout.coord(rank)) for rank in range(tp)]
        for rows, *columns in shapes:
            chunks = [chunk_rows(rows, shard, num_shards) for shard in range(num_shards)]
            assert max(stop - start for start, stop in chunks) * math.prod(
                columns
            ) <= capacity_elements(spec, layout)
        held = [boxes(spec, layout, layout.coord(rank)) for rank in range(tp)]
        for at, part in enumerate(spec.all_parts):
            for axis in partial_axes(spec, part, layout):
                for rank in range(tp):
                    for other in layout.ranks(axis, layout.coord(rank), config.num_kv_heads):
                        assert shapes[rank] == shapes[other]
                        local = held[rank][at]
                        theirs = held[other][at]
                        assert (local.start, local.local, local.shape) == (
                            theirs.start,
                            theirs.local,
                            theirs.shape,
                        )


def padding_on(rank: int, world: int, short: str) -> list[tuple[int, float]]:
    """Return the padding rows of the embedding and their contents, before and after two steps, for
    every state."""
    torch.use_deterministic_algorithms(True)  # fills new memory with what is not a number
    try:
        program, mesh = ready(rank, short, "odd")
    finally:
        torch.use_deterministic_algorithms(False)
    reports = [padding_of(program, mesh, KINDS[1:])]
    for step in range(2):
        step_once(program, mesh, step, MAX_NORM)
    return [*reports, padding_of(program, mesh, KINDS)]


def padding_of(program: Program, mesh: Mesh, kinds: Sequence[Owned]) -> tuple[int, float]:
    assert isinstance(program.store, FsdpStore)
    shard = next(shard for shard in program.store.shards if shard.spec.name == "embed")
    (box,) = boxes(shard.spec, mesh.layout, mesh.coord)
    found = torch.stack(
        [getattr(shard, kind).detach()[max(box.shape[0] - shard.first_row, 0) :] for kind in kinds]
    )
    return found.shape[1], float(found.abs().sum())


def test_padding_of_the_vocabulary_is_and_stays_zero(ranks: Ranks) -> None:
    """97 rows in three blocks of 33, of which the last has two of padding, on the last of its two
    ranks."""
    reports = ranks.run(6, padding_on, "dp2.tp3.fsdp")
    assert reports == [[(0, 0.0)] * 2] * 5 + [[(2, 0.0)] * 2]


@pytest.mark.parametrize(
    ("short", "model"), [("dp2.tp2.sp.fsdp.m2", "biased"), ("dp2.tp2.fsdp.keep", "one-kv")]
)
def test_parity_finds_it_equal(ranks: Ranks, short: str, model: str) -> None:
    found, *_ = ranks.run(4, compare_on, Trial(MODELS[model], Layout.parse(short)))
    assert found is not None and found.is_equal, found.first


def compare_on(rank: int, world: int, trial: Trial) -> Parity | None:
    return compare(Place(rank, world, CPU), trial)


def saved_on(
    rank: int, world: int, short: str, start: Path | None, target: Path
) -> tuple[float, float]:
    """Save the state in `start`, or one of two steps; loss and norm of the step after."""
    program, mesh = ready(rank, short, "biased")
    if start is not None:
        load_state(Checkpoint(start), program.store, program.specs)
    for step in range(2 if start is None else 0):
        step_once(program, mesh, step, MAX_NORM)
    save_checkpoint(target, program.store, mesh, program.specs, 2)
    return step_once(program, mesh, 2, MAX_NORM)


def test_checkpoints_go_to_other_layouts_and_back(ranks: Ranks, tmp_path: Path) -> None:
    """Bit for bit, each element saved once; the next step is the same but for the order of sums."""
    chain = ["dp2.tp2.sp.fsdp", "tp2", "dp2.tp2.fsdp.keep", "dp2.tp2.z3", "dp4.tp2.fsdp.s2"]
    paths = [tmp_path / str(number) for number in range(len(chain))]
    reports = [
        ranks.run(Layout.parse(short).world_size, saved_on, short, start, target)[0]
        for short, start, target in zip(chain, [None, *paths[:-1]], paths, strict=True)
    ]
    first, *others = map(Checkpoint, paths)
    whole = [
        (spec, box)
        for spec in model_specs(MODELS["biased"])
        for box in boxes(spec, Layout(), Layout().coord(0))
    ]
    for other in others:
        for (spec, box), state in product(whole, STATES):
            assert torch.equal(other.read(spec, state, box), first.read(spec, state, box)), (
                other.path,
                spec.name,
            )
    for loss, norm in reports[1:]:
        assert (loss, norm) == pytest.approx(reports[0], rel=1e-5)


# -- what a rank holds


@given(st.integers(1, 70), st.integers(1, 12))
def test_rows_are_cut_as_torch_chunks_them(num_rows: int, num_ranks: int) -> None:
    chunks = [list(chunk) for chunk in torch.arange(num_rows).chunk(num_ranks)]
    local = [list(range(*chunk_rows(num_rows, rank, num_ranks))) for rank in range(num_ranks)]
    assert local == chunks + [[]] * (num_ranks - len(chunks))


def built_on(rank: int, world: int, trace: Path) -> tuple[int, int, int]:
    """A model of which the embedding alone has 16 MB: its peak and largest allocation, and what is
    held at the end."""
    config = ModelConfig("llama", 2, 256, 512, 4, 2, 64, 16384, 32, tied=True)
    held = []

    def start() -> Program:
        program, _ = build(rank, f"dp{world}.fsdp", config, "fp32", "fp32")
        held.append(sum(program.store.held_bytes().values()))
        return program

    peak, largest = peak_bytes(start, trace / str(rank))
    return peak, largest, held[0]


def test_no_rank_ever_holds_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """Building it takes no more than what stays (and a few kilobytes), in no piece larger than a
    shard."""
    for peak, largest, held in ranks.run(4, built_on, tmp_path):
        assert held <= peak < held + 2**16
        assert largest == 16384 * 256 // 4 * 4
