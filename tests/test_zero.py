"""ZeRO: every stage, grouping, number of ranks and micro-batches computes what one process
computes, holds what it promises, and no table runs to its end with weights or gradients that are
not what they should be."""

import functools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from memory import peak_bytes
from ranks import RankFailed, Ranks
from shardwise.config import ModelConfig
from shardwise.formats import reader
from shardwise.formats.huggingface.write_folder import write_folder
from shardwise.formats.load import open_weights
from shardwise.layout import Layout
from shardwise.model import init
from shardwise.model.init import init_weights
from shardwise.model.layers import DTYPES
from shardwise.parallel import unit as units_of_state
from shardwise.parallel import zero
from shardwise.parallel.apply import apply, draw_weights, read_weights
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.program import Program
from shardwise.parallel.zero import BUCKET_BYTES, Store
from shardwise.params import Init, ParamSpec, model_specs, num_params, units
from shardwise.plan.ledger import Precision
from shardwise.train.loop import evaluate, take_step
from shardwise.train.rank import make_program
from shardwise.train.settings import Settings
from shardwise.train.validate import validated_run
from tiny_training import (
    FAMILIES,
    OPTIMIZER,
    RATE,
    Expected,
    build_data,
    digest,
    fill_store,
    global_batch,
    part_of,
    plain_steps,
    tiny_settings,
    tiny_weights,
    whole,
    worst,
)

CPU = torch.device("cpu")
MAX_NORM = 0.2
NUM_STEPS = 3
EVERYTHING = BUCKET_BYTES
ODD = ModelConfig(
    "llama", 2, 5, 7, 3, 1, 2, 97, 32, tied=True, qkv_bias=True
)  # primes; a last norm of 5 elements
MODELS = FAMILIES | {"odd": ODD, "odd-untied": replace(ODD, tied=False)}


# -- a few steps on many ranks


@dataclass(frozen=True)
class Case:
    """A few steps of one model on one layout."""

    layout: str
    family: str
    overlap: bool = True
    bucket_bytes: int = EVERYTHING
    poisoned: bool = False
    """Whether storage that comes fresh, or comes back, holds NaN."""
    evaluated: bool = False
    """Whether each step is followed by two evaluations."""
    precision: Precision = "fp32"

    @property
    def sequences(self) -> int:
        """The number of sequences, at least 12, that divides evenly among data ranks and micro-
        batches."""
        layout = Layout.parse(self.layout)
        each = layout.dp * layout.microbatches
        return -(-12 // each) * each


@dataclass(frozen=True)
class RankReport:
    """The result of one rank: whole tensors on the first, a digest of what they own on the
    others."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    digest: str
    shard_rank: int
    evaluations: list[float]


def poison(patch: pytest.MonkeyPatch) -> None:
    def fill_with_nan(flat: Tensor) -> None:
        if not flat.untyped_storage().nbytes():
            units_of_state.allocate_storage(flat)
            flat.fill_(torch.nan)

    empty_like = torch.empty_like
    patch.setattr(zero, "allocate_storage", fill_with_nan)
    patch.setattr(
        torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(torch.nan)
    )


def make(case: Case, rank: int) -> tuple[Program, Mesh]:
    config = MODELS[case.family]
    mesh = make_mesh(Layout.parse(case.layout), rank, CPU)
    dtype = DTYPES[case.precision]
    program = apply(
        config,
        mesh,
        dtype,
        dtype,
        OPTIMIZER.update,
        bucket_bytes=case.bucket_bytes,
        overlap=case.overlap,
    )
    fill_store(program.store, tiny_weights(config))
    return program, mesh


def step_once(program: Program, mesh: Mesh, step: int, sequences: int) -> tuple[float, float]:
    """The mean loss over all ranks and the norm."""
    batch = part_of(*global_batch(step, sequences), mesh.layout, mesh.data.rank)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), MAX_NORM)
    return mesh.world.sum(loss)[0], norm


def evaluate_once(program: Program, mesh: Mesh, sequences: int) -> float:
    """The mean loss of the first batch."""
    batch = part_of(*global_batch(0, sequences), mesh.layout, mesh.data.rank)
    summed = sum(program.pipeline.evaluate(program.evaluation, each) for each in batch.microbatches)
    total, targets = mesh.data.sum(summed, batch.num_targets)
    return total / targets


def assert_holds_only_shards(program: Program, mesh: Mesh, case: Case) -> None:
    """Check that a sharded state exists as a shard alone, of units padded to a multiple of the
    ranks."""
    layout = mesh.layout
    held = program.store.held_bytes()
    element = DTYPES[case.precision].itemsize
    padded = sum(layout.padded(num_params(owned)) for owned in units(program.specs).values())
    shard = padded // layout.shard_size
    assert held["optimizer"] == 4 * shard * (2 if case.precision == "fp32" else 3), (
        "moments, and masters unless fp32"
    )
    for row in ("gradients", "parameters"):
        assert held[row] == element * (shard if layout.shards(row) else padded), row


def run_case(case: Case, rank: int) -> RankReport:
    program, mesh = make(case, rank)
    losses = []
    norms = []
    evaluations = []
    assert_holds_only_shards(program, mesh, case)
    for step in range(NUM_STEPS):
        loss, norm = step_once(program, mesh, step, case.sequences)
        losses.append(loss)
        norms.append(norm)
        assert_holds_only_shards(program, mesh, case)
        for _ in range(2 if case.evaluated else 0):
            evaluations.append(evaluate_once(program, mesh, case.sequences))
            assert_holds_only_shards(program, mesh, case)
    states = {
        kind: whole(program.store, mesh, program.specs, kind)
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    grads = whole(program.store, mesh, program.specs, "gradient")
    if rank:
        grads = {}
        states = {}
    return RankReport(
        losses, norms, grads, states, digest(program.store), mesh.shard.rank, evaluations
    )


def cases_on(rank: int, world: int, cases: Sequence[Case]) -> list[RankReport]:
    reports = []
    for case in cases:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if case.poisoned:
                    poison(patch)
                reports.append(run_case(case, rank))
        except Exception as error:
            raise AssertionError(f"{case}") from error
    return reports


@functools.lru_cache(maxsize=64)
def expected_of(family: str, sequences: int) -> Expected:
    return plain_steps(MODELS[family], NUM_STEPS, MAX_NORM, sequences)


def check_case(case: Case, reports: Sequence[RankReport]) -> None:
    """Three clipped steps. Losses and norms within 1e-5 of one process, gradients within 1e-4 of
    their size: those of the third step, after two that divide by roots of tiny squares; weights and
    moments within 1e-4."""
    expected = expected_of(case.family, case.sequences)
    first = reports[0]
    assert min(expected.norms) > 1.2 * MAX_NORM, "every step is to be clipped"
    assert first.losses == pytest.approx(expected.losses, rel=1e-5), case
    assert first.norms == pytest.approx(expected.norms, rel=1e-5), case
    assert worst(first.grads, expected.grads) < 1e-4, case
    assert worst(first.states["master"], expected.weights) < 1e-4, case
    assert worst(first.states["exp_avg"], expected.exp_avg) < 1e-4, case
    assert worst(first.states["exp_avg_sq"], expected.exp_avg_sq) < 1e-4, case
    for other in reports:
        assert (other.losses, other.norms) == (first.losses, first.norms), case
        assert other.evaluations == first.evaluations
    replicas: dict[int, set[str]] = {}
    for each in reports:
        replicas.setdefault(each.shard_rank, set()).add(each.digest)
    assert {len(digests) for digests in replicas.values()} == {1}, f"{case}: replicas differ"


def run_cases(ranks: Ranks, world: int, cases: Sequence[Case]) -> dict[Case, list[RankReport]]:
    by_rank = ranks.run(world, cases_on, cases, timeout_s=120)
    reports = {case: [local[number] for local in by_rank] for number, case in enumerate(cases)}
    for case, local in reports.items():
        check_case(case, local)
    return reports


ON_ONE = [
    Case("z1", "llama"), Case("z2.m2", "gpt2"), Case("z3.keep.m2", "llama-tied"),
    Case("z3.m4", "odd", bucket_bytes=1, poisoned=True),
]  # fmt: skip
ON_TWO = [
    Case("dp2.z1.m4", "gpt2"), Case("dp2.z2.m3", "llama-tied"), Case("dp2.z3.m3", "gpt2"),
    Case("dp2.z3.keep.m2", "qwen3"), Case("dp2.z3.s1.m2", "llama"),
    Case("dp2.z2.m2", "odd-untied", overlap=False, poisoned=True),
]  # fmt: skip
ON_THREE = [
    Case("dp3.z1.m2", "qwen3"), Case("dp3.z2.m4", "mistral"), Case("dp3.z3.keep", "gpt2"),
    Case("dp3.z3", "qwen2"), Case("dp3.z1", "odd-untied", bucket_bytes=100, poisoned=True),
]  # fmt: skip
ON_FOUR = [
    Case("dp4.z1.s2.m3", "llama-tied"), Case("dp4.z2.s2.m2", "gpt2"), Case("dp4.z3.m4", "llama"),
    Case("dp4.z3.s1.m2", "odd"), Case("dp4.z3.s2.m3", "odd", bucket_bytes=64),
]  # fmt: skip
ON_FIVE = [Case("dp5.z3.m2", "odd-untied", bucket_bytes=150, poisoned=True)]
ON_EIGHT = [Case("dp8.z1.s4.m2", "odd"), Case("dp8.z3", "odd", poisoned=True)]


@pytest.mark.parametrize(
    "cases",
    [ON_ONE, ON_TWO, ON_THREE, ON_FOUR, ON_FIVE, ON_EIGHT],
    ids=["1", "2", "3", "4", "5", "8"],
)
def test_every_stage_computes_what_one_process_computes(ranks: Ranks, cases: list[Case]) -> None:
    """Loss, each gradient, norm, weights and moments; replicas equal bit for bit; nothing held
    between steps but what the stage promises. With odd sizes, more ranks than a unit has elements,
    and ranks that have no target at all."""
    reports = run_cases(ranks, Layout.parse(cases[0].layout).world_size, cases)
    assert list(reports) == cases


def test_some_ranks_own_nothing_of_a_unit_and_some_have_no_target() -> None:
    """So that the cases above are what they claim to be."""
    layout = Layout.parse("dp8.z3")
    (norm,) = units(model_specs(ODD))["final"]
    assert norm.numel == 5 and layout.padded(norm.numel) == 8
    parts = [part_of(*global_batch(0, 16), layout, rank).num_targets for rank in range(8)]
    assert parts[-1] == 0 and len(set(parts)) > 4


@settings(
    max_examples=examples(5), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)  # to shrink takes minutes
@given(st.data())
def test_drawn_layouts_compute_what_one_process_computes(ranks: Ranks, data: st.DataObject) -> None:
    groups, size = data.draw(
        st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (4, 1)]), "groups x size"
    )
    stage = data.draw(st.sampled_from(["", "z1", "z2", "z3", "z3.keep"]), "stage")
    words = [
        f"dp{groups * size}",
        stage,
        f"s{size}" if stage else "",
        f"m{data.draw(st.integers(1, 4), 'm')}",
    ]
    layout = str(Layout.parse(".".join(word for word in words if word)))
    family = data.draw(st.sampled_from([*MODELS]), "family")
    smallest = 1 if family.startswith("odd") else 2000
    bucket_bytes = data.draw(st.integers(smallest, 40_000) | st.just(EVERYTHING), "bucket bytes")
    case = Case(
        layout,
        family,
        data.draw(st.booleans(), "overlap"),
        bucket_bytes,
        data.draw(st.booleans(), "poisoned"),
    )
    assert len(run_cases(ranks, groups * size, [case])[case]) == groups * size


# -- bit for bit


@pytest.mark.parametrize(
    ("world", "stages", "smallest"),
    [
        (3, ["dp3.z1", "dp3.z2", "dp3.z3", "dp3.z3.keep"], [1]),
        (3, ["dp3.z2.m2", "dp3.z3.m2"], [100]),  # each micro-batch is summed over the ranks
        (4, ["dp4.z1.s2", "dp4.z2.s2", "dp4.z3.s2"], [200]),
    ],
)
def test_what_only_changes_where_states_lie_changes_no_bit(
    ranks: Ranks, world: int, stages: list[str], smallest: list[int]
) -> None:
    """Stages of the same cut, which add in the order of the ranks; sums that run beside the
    backward or are waited for; buckets from one element a rank to everything; evaluations between
    the steps; storage that comes back as NaN."""
    plain = [Case(layout, "odd") for layout in stages]
    last = stages[-1]
    turned = [
        Case(stages[0], "odd", overlap=False, bucket_bytes=500),
        *(Case(last, "odd", overlap, size) for overlap in (True, False) for size in smallest),
        *(Case(layout, "odd", poisoned=True, evaluated=True) for layout in stages[1:]),
    ]
    reports = run_cases(ranks, world, [*plain, *turned])
    expected = reports[plain[0]]
    for case, local in reports.items():
        for one, other in zip(local, expected, strict=True):
            assert (one.losses, one.norms, one.digest) == (
                other.losses,
                other.norms,
                other.digest,
            ), case


def test_in_bf16_the_stages_are_equal_too(ranks: Ranks) -> None:
    """Bit for bit, in buckets and not. With nothing cut the sums are those as well, added in fp32
    in the order of the ranks; only the norm adds squares in another order: masters within 1e-6."""
    words = ("dp3.z1", "dp3.z2", "dp3.z3", "dp3.z3.keep")
    cases = [Case(layout, "odd", poisoned=True, precision="bf16") for layout in words]
    cases += [
        Case(layout, "odd", overlap=False, bucket_bytes=30, precision="bf16") for layout in words
    ]
    first, *others, uncut = ranks.run(3, cases_on, [*cases, Case("dp3", "odd", precision="bf16")])[
        0
    ]
    for case, reports in zip(cases[1:], others, strict=True):
        assert (reports.losses, reports.norms, reports.digest) == (
            first.losses,
            first.norms,
            first.digest,
        ), case
    assert uncut.losses[0] == first.losses[0]
    assert uncut.norms == pytest.approx(first.norms, rel=1e-5)
    assert worst(uncut.states["master"], first.states["master"]) < 1e-6


def test_evaluation_tells_the_loss_of_one_process_twice(ranks: Ranks) -> None:
    """And nothing else changes (the test above): of z3 no whole weights stay (asserted after
    each)."""
    cases = [
        Case(f"dp2.{stage}.m2", "qwen3", evaluated=True)
        for stage in ("z1", "z2", "z3", "z3.keep", "m1")
    ]
    cases[-1] = Case("dp2", "qwen3", evaluated=True)
    reports = run_cases(ranks, 2, cases)
    expected = []
    program, mesh = make(Case("dp1", "qwen3"), 0)
    for steps in range(1, NUM_STEPS + 1):
        fill_store(program.store, plain_steps(MODELS["qwen3"], steps, MAX_NORM).weights)
        expected += [evaluate_once(program, mesh, 12)] * 2
    assert len(set(expected)) == NUM_STEPS
    for case, (first, _) in reports.items():
        assert first.evaluations == pytest.approx(expected, rel=1e-5), case
        assert first.evaluations[::2] == first.evaluations[1::2]


def refilled_on(rank: int, world: int, shorts: list[str]) -> list[float]:
    """Losses before and after all weights are written anew from outside."""
    reports = []
    for short in shorts:
        program, mesh = make(Case(short, "llama"), rank)
        reports.append(evaluate_once(program, mesh, 12))
        fill_store(
            program.store,
            {name: 2 * weight for name, weight in tiny_weights(MODELS["llama"]).items()},
        )
        reports.append(evaluate_once(program, mesh, 12))
    return reports


def test_weights_that_are_written_from_outside_are_gathered_again(ranks: Ranks) -> None:
    before, after = ranks.run(1, refilled_on, ["dp1"])[0]
    assert abs(before - after) > 0.1
    for reports in ranks.run(2, refilled_on, ["dp2.z1", "dp2.z2", "dp2.z3"]):
        assert reports == pytest.approx([before, after] * 3, rel=1e-6)


# -- precision of the sums

MATRIX = ParamSpec("norm", (3, 5), ("embed", "ffn"), Init("normal", 1.0), unit="final")


def sum_on(
    rank: int, world: int, short: str, grad_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> list[Tensor]:
    """Sums of two micro-batches, where the first rank brings 256 and the others 1 each: whole, as
    each is reported."""
    mesh = make_mesh(Layout.parse(short), rank, CPU)
    store = Store(
        mesh, {"final": (MATRIX,)}, torch.bfloat16, grad_dtype, OPTIMIZER.update, reduce_dtype
    )
    reports = []
    for num_microbatches in (1, 2):
        for microbatch in range(num_microbatches):
            store.add(
                "norm",
                torch.full((3, 5), 1.0 if rank or microbatch else 256.0, dtype=torch.bfloat16),
            )
            if mesh.layout.shards("gradients") or microbatch == num_microbatches - 1:
                store.reduce("final")
        store.finish()
        (found,) = whole(store, mesh, [MATRIX], "gradient").values()
        reports.append(found)
    return reports


@pytest.mark.parametrize("short", ["dp4", "dp4.z1", "dp4.z2", "dp4.z3", "dp4.z3.s2", "dp4.z1.s1"])
def test_bf16_gradients_are_summed_in_fp32(ranks: Ranks, short: str) -> None:
    """256 + 1 + 1 + 1 is 259, in bf16 (steps of 2 at 256) rounded to even 260; of sums in bf16 256
    would be left, as where they are asked for. In groups of two the sums of each are rounded first:
    256 + 1 to 256, 2, then 258. A gradient in fp32 keeps 259 and, with a second micro-batch of
    ones, 263."""
    (one, two), *others = ranks.run(4, sum_on, short, torch.bfloat16, torch.float32)
    grouped = short == "dp4.z3.s2"
    assert torch.equal(one, torch.full((3, 5), 258.0 if grouped else 260.0))
    assert 258 <= float(two[0, 0]) <= 264 and bool((two == two[0, 0]).all())
    assert all(torch.equal(two, other) for _, other in others)
    (one, two), *_ = ranks.run(4, sum_on, short, torch.float32, torch.float32)
    assert torch.equal(one, torch.full((3, 5), 259.0)) and torch.equal(
        two, torch.full((3, 5), 263.0)
    )


@pytest.mark.parametrize("short", ["dp4.z1", "dp4.z2", "dp4.z3"])
def test_sums_in_bf16_lose_what_they_are_told_to_lose(ranks: Ranks, short: str) -> None:
    (one, _), *_ = ranks.run(4, sum_on, short, torch.bfloat16, torch.bfloat16)
    assert torch.equal(one, torch.full((3, 5), 256.0))


# -- what is there when


def replay(short: str, overlap: bool) -> set[str]:
    """Action by action: the whole weights that are there are those between GATHER and FREE, whole
    gradients those that had a contribution and no REDUCE since (a sum under way holds its own a
    little longer). Returns the kinds seen."""
    program, mesh = make(Case(short, "llama-tied", overlap), 0)
    batch = part_of(*global_batch(0), mesh.layout, 0)
    gathered: set[str] = set()
    contributed: set[str] = set()
    for action in program.table:
        with torch.no_grad():
            program.pipeline.execute(action, batch.microbatches, 1.0)
        if action.kind == "GATHER":
            gathered.add(action.unit)
        elif action.kind == "FREE":
            gathered.remove(action.unit)
        elif action.kind == "B":
            contributed |= set(program.pipeline.work.pieces[action.piece].units)
        elif action.kind == "REDUCE":
            contributed.remove(action.unit)
        state = program.store.units.items()
        if mesh.layout.shards("parameters"):
            assert {
                name for name, unit in state if unit.weights.untyped_storage().nbytes()
            } == gathered, action
        if mesh.layout.shards("gradients"):
            whole_grads = {name for name, unit in state if unit.grads.untyped_storage().nbytes()}
            late = whole_grads - contributed
            assert contributed <= whole_grads and len(late) <= (zero.IN_FLIGHT if overlap else 0), (
                action
            )
    assert not contributed and (not gathered or not mesh.layout.shards("parameters"))
    return {action.kind for action in program.table}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("short", ["z2.m2", "z3.m2", "z3.keep.m3"])
def test_whole_buffers_are_there_only_as_the_table_says(short: str, overlap: bool) -> None:
    freed = {"FREE"} if short.startswith("z3") else set()
    assert replay(short, overlap) == {"F", "B", "GATHER", "REDUCE"} | freed


def gradient_by(table: Sequence[Action], short: str) -> dict[str, Tensor]:
    """The gradient of the second step by another table: by then every buffer has been used, and
    holds what is stale."""
    program, mesh = make(Case(short, "llama-tied"), 0)
    step_once(program, mesh, 0, 12)
    step_once(replace(program, table=list(table)), mesh, 1, 12)
    return whole(program.store, mesh, program.specs, "gradient")


def outcome_by(table: Sequence[Action], short: str, expected: dict[str, Tensor]) -> str:
    try:
        found = gradient_by(table, short)
    except (AssertionError, KeyError):
        return "refused"
    return "right" if worst(found, expected) < 1e-6 else "silently wrong"


SPOILED = ["m2", "z1.m2", "z2.m2", "z3", "z3.m2", "z3.keep.m2"]


@pytest.mark.parametrize("short", ["z1.m2", "z2.m2", "z3.m2", "z3.keep.m2"])
def test_no_table_that_lacks_an_action_is_silently_wrong(short: str) -> None:
    """Each GATHER, F, B and REDUCE left out in turn is refused. Without a FREE the numbers are the
    same, and so without a REDUCE of a micro-batch before the last, whose gradient is then summed
    with the next, and without the F of the head, which its B does then, as in a pipeline."""
    program, _ = make(Case(short, "llama-tied"), 0)
    table = program.table
    expected = gradient_by(program.table, short)
    last = Layout.parse(short).microbatches - 1
    for at, action in enumerate(table):
        outcome = outcome_by([*table[:at], *table[at + 1 :]], short, expected)
        harmless = action.kind == "FREE" or (action.kind == "REDUCE" and action.microbatch < last)
        harmless |= action.kind == "F" and action.piece == "head"
        assert outcome == ("right" if harmless else "refused"), f"without {action}: {outcome}"


@pytest.mark.parametrize("short", ["z3.m2", "z3.keep.m2"])
def test_no_free_that_comes_too_early_goes_unnoticed(short: str) -> None:
    """Each FREE moved up before the last use of what it gives back."""
    program, _ = make(Case(short, "llama-tied"), 0)
    table = program.table
    pieces = program.pipeline.work.pieces
    expected = gradient_by(table, short)
    moved = 0
    for at, action in enumerate(table):
        if action.kind == "FREE":
            used = (i for i in reversed(range(at)) if table[i].kind in ("F", "B"))
            use = next(
                i for i in used if action.unit in pieces[table[i].piece].reads(table[i].kind)
            )
            early = [*table[:use], action, *table[use:at], *table[at + 1 :]]
            assert outcome_by(early, short, expected) == "refused", f"{action} before {table[use]}"
            moved += 1
    assert moved >= 4


@settings(max_examples=examples(30))
@given(st.sampled_from(SPOILED), st.data())
def test_no_table_with_an_action_elsewhere_is_silently_wrong(
    short: str, data: st.DataObject
) -> None:
    program, _ = make(Case(short, "llama-tied"), 0)
    table = list(program.table)
    expected = gradient_by(table, short)
    for _ in range(data.draw(st.integers(1, 2), "moves")):
        kinds = ("GATHER", "FREE", "REDUCE")
        places = [at for at, action in enumerate(table) if action.kind in kinds]
        action = table.pop(data.draw(st.sampled_from(places), "from"))
        table.insert(data.draw(st.integers(0, len(table)), "to"), action)
    assert outcome_by(table, short, expected) in ("refused", "right")


# -- first weights

LARGER = ModelConfig(
    "llama", 9, 512, 1408, 8, 4, 64, 4096, 64
)  # 31 M parameters: 123 MB of fp32 weights
CONSTANT_BYTES = 6 << 20
"""What building may take beside the states: strips of 4 MB as they are read, or blocks of 1 MB as
they are drawn. The largest matrix takes 8."""


def begin(
    rank: int, config: ModelConfig, short: str, precision: str, folder: Path | None
) -> tuple[Program, Mesh]:
    """A program with its first weights, from a folder or drawn from seed 3."""
    mesh = make_mesh(Layout.parse(short), rank, CPU)
    program = apply(config, mesh, DTYPES[precision], DTYPES[precision], OPTIMIZER.update)
    if folder is None:
        draw_weights(program, 3)
    else:
        with closing(open_weights(folder, config)) as reader:
            read_weights(program, reader)
    return program, mesh


def peak_on(
    rank: int, world: int, short: str, precision: str, folder: Path | None, traces: Path
) -> tuple[int, int]:
    """The most bytes that building took at a time, and what is held then."""
    kept: list[Program] = []
    peak, _ = peak_bytes(
        lambda: kept.append(begin(rank, LARGER, short, precision, folder)[0]),
        traces / f"{precision}-{rank}.json",
    )
    return peak, sum(kept[0].store.held_bytes().values())


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("larger") / "folder"
    layout = Layout()
    drawn = (
        (spec.name, init_weights(spec, layout, layout.coord(0), 3, torch.bfloat16))
        for spec in model_specs(LARGER)
    )
    write_folder(path, LARGER, model_specs(LARGER), drawn, torch.bfloat16)
    return path


@pytest.mark.parametrize(
    ("source", "precision"), [("drawn", "fp32"), ("drawn", "bf16"), ("folder", "fp32")]
)
def test_no_rank_ever_holds_the_whole_model(
    ranks: Ranks, larger_folder: Path, tmp_path: Path, source: str, precision: str
) -> None:
    """Each of four ranks takes a quarter of the states, 16 bytes per parameter, and little more:
    not even a matrix. A file is mapped, not resident, but the allocator counts it too."""
    size = num_params(model_specs(LARGER))
    folder = larger_folder if source == "folder" else None
    mapped = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0
    assert max(4 * spec.numel for spec in model_specs(LARGER)) > CONSTANT_BYTES
    for peak, held in ranks.run(4, peak_on, "dp4.z3", precision, folder, tmp_path):
        assert 16 * size / 4 <= held <= 16 * size / 4 * 1.0001
        assert held <= peak <= held + mapped + CONSTANT_BYTES


def first_on(
    rank: int, world: int, shorts: list[str], family: str, folder: Path | None
) -> list[dict[str, Tensor]]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            init, "BLOCK_ELEMENTS", 50
        )  # so that tiny tensors have many blocks and strips
        patch.setattr(reader, "STRIP_ELEMENTS", 70)
        for short in shorts:
            program, mesh = begin(rank, MODELS[family], short, "fp32", folder)
            found.append(whole(program.store, mesh, program.specs, "master"))
    return found


@pytest.mark.parametrize(
    ("family", "source"),
    [("gpt2", "drawn"), ("llama", "drawn"), ("gpt2", "folder"), ("qwen3", "folder")],
)
def test_first_weights_are_the_same_in_every_layout(
    ranks: Ranks, tmp_path: Path, family: str, source: str
) -> None:
    """Bit for bit; those of a folder are what was written."""
    config = MODELS[family]
    weights = tiny_weights(MODELS[family])
    folder = None
    if source == "folder":
        folder = tmp_path / "folder"
        write_folder(folder, config, model_specs(config), weights.items(), torch.float32)
    ((one,),) = ranks.run(1, first_on, ["dp1"], family, folder)
    for reports in ranks.run(3, first_on, ["dp3", "dp3.z1", "dp3.z2.m2", "dp3.z3"], family, folder):
        for found in reports:
            assert all(torch.equal(found[name], value) for name, value in one.items())
    assert folder is None or all(torch.equal(one[name], value) for name, value in weights.items())
    assert one.keys() == weights.keys()


# -- evaluation, as the loop does it


def held_out_on(rank: int, world: int, changes: list[Settings]) -> list[float]:
    reports = []
    for changed in changes:
        mesh = make_mesh(Layout.parse(changed.run.layout), rank, CPU)
        program = make_program(validated_run(changed), mesh, 0)
        reports.append(evaluate(changed, program, mesh))
    return reports


def test_ranks_that_run_out_of_held_out_sequences_still_gather(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Five sequences on three ranks: the last one has fewer, and none may wait for another for
    ever."""
    data = build_data(tmp_path)

    def changed(layout: str, limit: int) -> Settings:
        return tiny_settings(
            data, tmp_path / "run", layout=layout, eval_sequences=limit, global_batch=6
        )

    limits = (1, 4, 5)
    (expected,) = ranks.run(1, held_out_on, [changed("dp1", limit) for limit in limits])
    for layout in ("dp3.z3", "dp3.z1.m2"):
        for reports in ranks.run(3, held_out_on, [changed(layout, limit) for limit in limits]):
            assert reports == pytest.approx(expected, rel=1e-6)


def fail_between_gathers(rank: int, world: int) -> None:
    program, mesh = make(Case("dp2.z3", "llama"), rank)
    if rank == 1:
        raise ValueError("rank one gives up")
    step_once(program, mesh, 0, 12)


def test_a_rank_that_fails_is_named_by_those_that_gather_from_it(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank one gives up") as caught:
        ranks.run(2, fail_between_gathers)
    assert "then rank 0: " in str(caught.value)
