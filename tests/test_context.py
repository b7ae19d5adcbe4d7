"""Context parallel: ring and all-to-all compute what one process computes of whole sequences,
whatever their length, windows and documents; all ranks have as much to do, send what is counted,
and save once."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from examples import examples
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import STATES, Checkpoint
from shardwise.kernels.reference import attention
from shardwise.kernels.reference.attention import (
    MaskSpec,
    attend_rectangle,
    attend_rectangle_backward,
    attention_naive,
    build_mask,
    log_sum_exp,
)
from shardwise.layout import Layout
from shardwise.model.batch import MicroBatch
from shardwise.model.layers import DTYPES, Attend
from shardwise.model.loss import IGNORE_INDEX
from shardwise.parallel import apply as applied
from shardwise.parallel import context
from shardwise.parallel.context import AllToAll, Pairs, Passing, local_part, make_attend
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Axis, Mesh, Pending, make_mesh
from shardwise.parallel.program import Program
from shardwise.params import model_specs, num_params
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.loop import take_step
from shardwise.train.rank import train
from shardwise.train.settings import Settings
from shardwise.train.validate import validated_run
from tiny_training import (
    FAMILIES,
    LLAMA,
    RATE,
    SEQ_LEN,
    SEQUENCES,
    VOCAB,
    Expected,
    agreed,
    build_data,
    each_case,
    filled_program,
    plain_loss,
    plain_steps,
    seeded,
    share_of,
    tiny_settings,
    worst,
    worst_part,
)

CPU = torch.device("cpu")
MAX_NORM = 0.2
NUM_STEPS = 2
HUGE = 1e3
"""What padding holds here: nobody may see it."""

# -- attention alone


@dataclass(frozen=True)
class Attention:
    """Attention over whole sequences that are cut over ranks; `rows` and `block_bytes` are the
    kernel's."""

    tokens: int
    window: int | None = None
    num_documents: int | None = None
    all_to_all: bool = False
    kv_heads: int = 2
    groups: int = 2
    dtype: torch.dtype = torch.float64
    rows: int = 64
    block_bytes: int = 4 << 20
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        heads = self.kv_heads * self.groups
        layers = frozenset({0} if self.window else ())
        return replace(
            LLAMA,
            num_heads=heads,
            num_kv_heads=self.kv_heads,
            sliding_window=self.window,
            windowed_layers=layers,
        )

    def documents(self) -> Tensor | None:
        """Draw the documents of three sequences, each with its own; they begin and end anywhere,
        and some may have no token."""
        if self.num_documents is None:
            return None
        return (
            torch.randint(self.num_documents, (3, self.tokens), generator=seeded(self.seed))
            .sort(-1)
            .values
        )


def own_tokens(num_tokens: int, layout: Layout, rank: int) -> Tensor:
    """Return the tokens of a sequence that lie on a rank, in their order there; padding is
    negative."""
    at = torch.arange(num_tokens)[None]
    return local_part(MicroBatch(at, at, at, None), layout, rank).targets[0]


def errors_of(case: Attention, axis: Axis) -> list[float]:
    """Return how far this rank's y, dq, dk and dv are from the definition in fp64, relative to
    those of whole sequences, or to 1 where a gradient vanishes."""
    random = seeded(case.seed)
    heads = case.config.num_heads
    layout = Layout(cp=axis.size, all_to_all=case.all_to_all)
    shapes = [
        (3, case.tokens, number, 4) for number in (heads, case.kv_heads, case.kv_heads, heads)
    ]
    whole = [
        torch.randn(shape, generator=random, dtype=torch.float64).to(case.dtype) for shape in shapes
    ]
    q, k, v = [x.double().requires_grad_() for x in whole[:3]]
    documents = case.documents()
    y = attention_naive(q, k, v, case.window, documents)
    wanted = [y.detach(), *torch.autograd.grad(y, (q, k, v), whole[3].double())]
    at = own_tokens(case.tokens, layout, axis.rank)
    padding = (at < 0)[:, None, None]
    *local, dy = (x[:, at.clamp(min=0)].masked_fill(padding, HUGE) for x in whole)
    held = [x.requires_grad_() for x in local]
    y = make_attend(case.config, layout, axis, documents)(0, *held)
    found = [y.detach(), *torch.autograd.grad(y, held, dy.masked_fill(padding, 0))]
    assert not any(grad[:, at < 0].any() for grad in found[1:]), "no gradient of padding"
    assert {x.dtype for x in found} == {case.dtype}
    off = [
        x[:, at >= 0].double() - all_[:, at[at >= 0]] for x, all_ in zip(found, wanted, strict=True)
    ]
    return [float(x.norm() / max(1.0, all_.norm())) for x, all_ in zip(off, wanted, strict=True)]


def attend_on(
    rank: int, world: int, cases: Sequence[Attention], spoil: str = ""
) -> list[list[float]]:
    axis = make_mesh(Layout(cp=world), rank, CPU).cp
    found = []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK_ROWS", case.rows)
            patch.setattr(attention, "BLOCK_BYTES", case.block_bytes)
            if spoil:
                SPOILS[spoil](patch)
            found.append(errors_of(case, axis))
    return found


def largest(by_rank: list[list[list[float]]], number: int) -> float:
    """The largest error of a case on any rank; of what is no number, infinite."""
    errors = [error for local in by_rank for error in local[number]]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def check_attention(
    ranks: Ranks, world: int, cases: Sequence[Attention], bound: float = 1e-10
) -> None:
    by_rank = ranks.run(world, attend_on, cases)
    for number, case in enumerate(cases):
        assert largest(by_rank, number) < bound, case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_attention_of_a_cut_sequence_is_that_of_the_whole(ranks: Ranks, world: int) -> None:
    """Within 1e-10 in fp64, so ring and all-to-all are also equal to each other. Chunks have 1
    token, 4, or 4 of which the last are padding; windows are shorter and longer than a chunk; with
    nine documents most hops see nothing."""
    lengths = (2 * world, 8 * world, 7 * world + 1)
    windows = (None, 1, 3, 11)
    cases = [Attention(*each) for each in itertools.product(lengths, windows, (None, 2, 9))]
    cases += [replace(case, all_to_all=True, kv_heads=world) for case in cases[::2]]
    cases += [Attention(1), Attention(world + 1, 2, 2), Attention(8 * world, kv_heads=1, groups=3)]
    check_attention(ranks, world, cases)


@pytest.mark.parametrize("world", [2, 4])
def test_attention_rounds_no_more_than_on_one_rank(ranks: Ranks, world: int) -> None:
    """fp32 within 1e-6. bf16 within 6e-3: inputs and outputs have 8 bits, hops are merged in
    fp32."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        cases = [
            Attention(64, window, number, dtype=dtype)
            for window in (None, 20)
            for number in (None, 5)
        ]
        check_attention(
            ranks, world, [*cases, Attention(64, all_to_all=True, kv_heads=4, dtype=dtype)], bound
        )


@st.composite
def attentions(draw: st.DrawFn, world: int) -> Attention:
    all_to_all = draw(st.booleans(), "a2a")
    kv_heads = (
        world * draw(st.integers(1, 2)) if all_to_all else draw(st.integers(1, 3), "kv heads")
    )
    return Attention(
        draw(st.integers(1, 40), "tokens"),
        draw(st.none() | st.integers(1, 42), "window"),
        draw(st.none() | st.integers(1, 12), "documents"),
        all_to_all,
        kv_heads,
        draw(st.integers(1, 3), "groups"),
        rows=draw(st.integers(1, 8), "rows"),
        block_bytes=draw(st.integers(1, 1 << 12), "bytes"),
        seed=draw(st.integers(0, 99), "seed"),
    )


@settings(max_examples=examples(8), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data(), st.integers(2, 4))
def test_any_length_window_and_documents(ranks: Ranks, data: st.DataObject, world: int) -> None:
    check_attention(ranks, world, data.draw(st.lists(attentions(world), min_size=6, max_size=12)))


def order_on(rank: int, world: int) -> list[str]:
    """Return what forward and backward do, in order; several matmuls in a row are one."""
    reports: list[str] = []
    pass_on = Axis.pass_on
    arrived = Passing.arrived

    def name(x: Tensor) -> str:
        return "kv" if x.dtype == torch.bfloat16 else "gradients"

    def sends(axis: Axis, x: Tensor, out: Tensor) -> Pending:
        reports.append(f"sends {name(x)}")
        return pass_on(axis, x, out)

    def waits(passing: Passing) -> Tensor:
        reports.append(f"waits for {name(passing.received)}")
        return arrived(passing)

    def multiplies(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        return lambda *given: (reports.append("multiplies"), function(*given))[1]  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axis, "pass_on", sends)
        patch.setattr(Passing, "arrived", waits)
        patch.setattr(context, "attend_rectangle", multiplies(attend_rectangle))
        patch.setattr(context, "attend_rectangle_backward", multiplies(attend_rectangle_backward))
        errors_of(Attention(24, dtype=torch.bfloat16), make_mesh(Layout(cp=world), rank, CPU).cp)
    return [what for what, _ in itertools.groupby(reports)]


def test_a_hop_is_under_way_while_the_one_before_is_worked_on(ranks: Ranks) -> None:
    hop = ["sends kv", "multiplies", "waits for kv"]
    first = ["sends gradients", "waits for kv"]
    passed = ["waits for gradients", "sends gradients"]
    backward = [
        *hop,
        "sends kv",
        "multiplies",
        *first,
        "multiplies",
        *passed,
        "waits for gradients",
    ]
    assert ranks.run(3, order_on) == [[*hop, *hop, "multiplies", *backward]] * 3


# -- which tokens a rank has


@st.composite
def cuts(draw: st.DrawFn) -> Layout:
    tp = draw(st.integers(1, 3), "tp")
    return Layout(
        cp=draw(st.integers(2, 5), "cp"),
        tp=tp,
        all_to_all=draw(st.booleans(), "a2a"),
        sequence_parallel=tp > 1 and draw(st.booleans(), "sp"),
    )


@given(cuts(), st.integers(1, 60), st.booleans())
def test_every_token_is_on_one_rank_and_padding_is_nobodys(
    layout: Layout, num_tokens: int, packed: bool
) -> None:
    """Positions of padding are those of some token, so that learned ones have a row."""
    tokens = torch.arange(2 * num_tokens).view(2, -1)
    whole = MicroBatch(tokens, tokens + 1000, tokens % num_tokens, tokens // 7 if packed else None)
    parts = [local_part(whole, layout, rank) for rank in range(layout.cp)]
    size, rest = divmod(layout.padded_tokens(num_tokens), layout.cp)
    assert rest == 0 and (not layout.sequence_parallel or size % layout.tp == 0)
    assert size * layout.cp - num_tokens < 2 * layout.cp * layout.tp, (
        "no more padding than it takes"
    )
    seen = []
    for rank, local in enumerate(parts):
        assert local.tokens.shape == local.targets.shape == local.positions.shape == (2, size)
        at = own_tokens(num_tokens, layout, rank)
        real = local.targets[0] != IGNORE_INDEX
        assert torch.equal(at >= 0, real) and bool((local.targets[:, ~real] == IGNORE_INDEX).all())
        assert bool((local.positions >= 0).all()) and bool((local.positions < num_tokens).all())
        seen += at[real].tolist()
        for name in ("tokens", "targets", "positions", "documents"):
            found = getattr(local, name)
            expected = getattr(whole, name)
            assert (found is None) == (expected is None)
            assert expected is None or torch.equal(found[:, real], expected[:, at[real]]), name
        assert local.documents is None or bool((local.documents[:, ~real] == -1).all()), (
            "no document has this number"
        )
        chunks = torch.arange(size * layout.cp).chunk(layout.sequence_chunks)
        mine_of = (
            chunks[rank] if layout.all_to_all else torch.cat([chunks[rank], chunks[-1 - rank]])
        )
        assert torch.equal(at, mine_of.where(mine_of < num_tokens, IGNORE_INDEX)), (
            "a chunk from either end"
        )
    assert sorted(seen) == list(range(num_tokens))


def pairs_seen(pairs: Pairs, source: int, num_tokens: int) -> int:
    """Return the number of (query, key) pairs in the rectangles of a hop."""
    return sum(
        int((~build_mask(spec, slice(0, num_tokens // 2), slice(0, num_tokens // 2), CPU)).sum())
        for _, _, spec in pairs.of(source, num_tokens)
    )


@given(
    st.integers(2, 6),
    st.integers(1, 5),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 5),
)
def test_every_pair_is_seen_once_and_all_ranks_have_as_much_work(
    cp: int, size: int, window: int | None, num_documents: int | None
) -> None:
    """Ranks have equal work at every hop, which ends when the slowest rank is done. Windows and
    documents mask what they mask."""
    num_tokens = 2 * cp * size
    whole = Attention(num_tokens, window, num_documents).documents()
    every = slice(0, num_tokens)
    expected = int((~build_mask(MaskSpec(0, window, whole, whole), every, every, CPU)).sum())
    total = 0
    for hop in range(cp):
        seen = []
        for rank in range(cp):
            source = (rank - hop) % cp
            axis = Axis("cp", rank, cp, CPU)
            seen.append(pairs_seen(Pairs(axis, window, whole), source, 2 * size))
        total += sum(seen)
        if window is None and whole is None:
            assert set(seen) == {2 * size * size if hop else size * (2 * size + 1)}
    assert total == expected


# -- a few steps of every family

MODELS = FAMILIES | {
    "three": replace(LLAMA, num_heads=6, num_kv_heads=3, tied=True),
    "four": replace(LLAMA, num_kv_heads=4, qk_norm=True),
    "one-kv": replace(LLAMA, num_kv_heads=1, qkv_bias=True, qk_norm=True, ffn_size=21),
    "full": replace(FAMILIES["gpt2"], max_positions=15),
}


@dataclass(frozen=True)
class Case:
    """A few steps of one model on one layout. `text` is plain (no documents), packed, or answers: a
    target has only the last quarter of a sequence, so some context ranks may have none."""

    layout: str
    model: str
    seq_len: int = SEQ_LEN
    text: str = "plain"
    precision: str = "fp32"

    def batch(self, step: int) -> MicroBatch:
        """Row by row with ever fewer targets; the last three have none. Packed documents begin
        anywhere."""
        random = seeded(100 + step)
        shape = (SEQUENCES, self.seq_len)
        window = torch.randint(VOCAB, (SEQUENCES, self.seq_len + 1), generator=random)
        kept = torch.rand(shape, generator=random) < torch.linspace(1.0, 0.1, SEQUENCES)[:, None]
        kept[-3:] = False
        positions = torch.arange(self.seq_len).repeat(SEQUENCES, 1)
        documents = None
        if self.text == "answers":
            kept[:, : -self.seq_len // 4] = False
        elif self.text == "packed":
            documents = torch.randint(5, shape, generator=random).sort(-1).values
            goes_on = documents[:, 1:] == documents[:, :-1]
            kept[:, :-1] &= goes_on
            starts = positions[:, 1:].masked_fill(goes_on, 0)
            positions[:, 1:] -= starts.cummax(1).values
        return MicroBatch(
            window[:, :-1].contiguous(),
            torch.where(kept, window[:, 1:], IGNORE_INDEX),
            positions,
            documents,
        )


State = dict[str, Tensor]


@dataclass(frozen=True)
class RankReport:
    """The result of one rank; whole tensors on the first alone. `grads` are those of the first
    step."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    grads: State
    states: dict[str, State]


def states_of(program: Program, mesh: Mesh) -> dict[str, State]:
    return {kind: agreed(program.store, mesh, program.specs, kind) for kind in STATES}


def make(case: Case, rank: int) -> tuple[Program, Mesh]:
    return filled_program(
        MODELS[case.model], Layout.parse(case.layout), rank, DTYPES[case.precision]
    )


def step_once(program: Program, mesh: Mesh, case: Case, step: int) -> tuple[float, float]:
    batch = share_of(case.batch(step), mesh.layout, mesh.coord.dp)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), MAX_NORM)
    return mesh.data.sum(loss)[0], norm


def run_case(case: Case, rank: int, num_steps: int) -> RankReport:
    program, mesh = make(case, rank)
    losses = []
    norms = []
    grads: State = {}
    for step in range(num_steps):
        loss, norm = step_once(program, mesh, case, step)
        losses.append(loss)
        norms.append(norm)
        grads = grads or agreed(program.store, mesh, program.specs, "gradient")
    batch = share_of(case.batch(0), mesh.layout, mesh.coord.dp)
    summed = sum(program.pipeline.evaluate(program.evaluation, each) for each in batch.microbatches)
    evaluation = mesh.data.sum(summed)[0] / mesh.dp.sum(batch.num_targets)[0]
    states = states_of(program, mesh)
    return RankReport(losses, norms, evaluation, {} if rank else grads, {} if rank else states)


def cases_on(
    rank: int, world: int, cases: Sequence[Case], num_steps: int, spoil: str = ""
) -> list[RankReport]:
    return each_case(
        cases, lambda case: run_case(case, rank, num_steps), SPOILS[spoil] if spoil else None
    )


@functools.lru_cache(maxsize=64)
def expected_of(model: str, num_steps: int, seq_len: int, text: str) -> Expected:
    batches = [Case("dp1", model, seq_len, text).batch(step) for step in range(num_steps)]
    return plain_steps(MODELS[model], num_steps, MAX_NORM, batches=batches)


def check_first_step(case: Case, first: RankReport) -> None:
    """Loss and norm within 1e-6 of plain torch on one process, the gradient of every part of every
    parameter 1e-5."""
    expected = expected_of(case.model, 1, case.seq_len, case.text)
    assert first.losses[:1] == pytest.approx(expected.losses, rel=1e-6), case
    assert first.norms[:1] == pytest.approx(expected.norms, rel=1e-6), case
    assert worst_part(MODELS[case.model], first.grads, expected.grads) < 1e-5, case


def check_case(case: Case, reports: Sequence[RankReport]) -> None:
    """The first step; and after three clipped ones losses, norms and an evaluation within 1e-5,
    weights and moments 1e-4: steps divide by roots of tiny squares."""
    config = MODELS[case.model]
    expected = expected_of(case.model, NUM_STEPS, case.seq_len, case.text)
    first = reports[0]
    evaluated = plain_loss(config, expected.weights, case.batch(0))
    check_first_step(case, first)
    assert min(expected.norms) > MAX_NORM, "every step is to be clipped"
    assert first.losses == pytest.approx(expected.losses, rel=1e-5), case
    assert first.norms == pytest.approx(expected.norms, rel=1e-5), case
    assert first.evaluation == pytest.approx(float(evaluated), rel=1e-5), case
    for kind, wanted in zip(
        STATES, (expected.weights, expected.exp_avg, expected.exp_avg_sq), strict=True
    ):
        assert worst(first.states[kind], wanted) < 1e-4, (case, kind)
    for other in reports:
        assert (other.losses, other.norms, other.evaluation) == (
            first.losses,
            first.norms,
            first.evaluation,
        ), case


ON_TWO = [
    *(Case("cp2", family) for family in ("llama", "gpt2", "qwen3", "mistral")),
    Case("cp2.a2a", "gpt2"),
    Case("cp2.z1", "llama", text="answers"), Case("cp2.z2.m4", "qwen3"),
    Case("cp2.z3", "llama-tied", 13),
    Case("cp2.fsdp", "qwen2", 13, "packed"), Case("cp2.m2", "one-kv", text="packed"),
    Case("cp2", "full", 15),
    Case("cp2.m2", "mistral", 13, "packed"), Case("cp2.a2a.m2", "mistral", 13, "packed"),
    Case("cp2.a2a", "full", 15),
    Case("tp2.sp", "qwen3", 13, "packed"), Case("cp2.rc-full.m2", "mistral"),
    Case("cp2.z3.keep.m2", "gpt2", text="answers"),
]  # fmt: skip
ON_THREE = [
    Case("cp3", "llama", 13),
    Case("cp3.z2", "mistral", text="packed"),
    Case("cp3.a2a.m2", "three", 13),
]
ON_FOUR = [
    Case("cp4", "qwen3", 29, "packed"), Case("cp4.a2a", "gpt2", 13),
    Case("cp4.fsdp", "llama-tied", text="packed"),
    Case("dp2.cp2.z2.m3", "mistral"), Case("dp2.cp2.z3.s2", "gpt2", 15, "packed"),
    Case("dp2.cp2.m2", "llama", text="answers"),
    Case("tp2.cp2.sp.m2", "one-kv", 15, "packed"), Case("tp2.cp2.a2a", "four", text="packed"),
]  # fmt: skip


@pytest.mark.parametrize("cases", [ON_TWO, ON_THREE, ON_FOUR], ids=["2", "3", "4"])
def test_every_family_computes_what_one_process_computes(ranks: Ranks, cases: list[Case]) -> None:
    """Loss, each gradient, norm, weights, moments, and an evaluation; whatever several ranks own is
    equal bit for bit. Targets are unequal over ranks, some micro-batches have none, and lengths
    that do not divide are padded: `full` has no position beyond its last token."""
    by_rank = ranks.run(
        Layout.parse(cases[0].layout).world_size, cases_on, cases, NUM_STEPS, timeout_s=120
    )
    for number, case in enumerate(cases):
        check_case(case, [local[number] for local in by_rank])


def same(one: dict[str, State], other: dict[str, State]) -> bool:
    return all(
        torch.equal(one[kind][name], value)
        for kind in STATES
        for name, value in other[kind].items()
    )


def test_in_bf16_replicas_are_equal_too(ranks: Ranks) -> None:
    """And losses are within 1% of those in fp32, 8 bits being what they are."""
    cases = [
        Case(short, "mistral", 13, "packed", "bf16") for short in ("cp2.m2", "cp2.z3", "cp2.a2a")
    ]
    expected = expected_of("mistral", NUM_STEPS, 13, "packed")
    for reports in ranks.run(2, cases_on, cases, NUM_STEPS)[0]:
        assert reports.losses == pytest.approx(expected.losses, rel=1e-2)


def test_a_step_is_the_same_bit_for_bit_when_it_is_repeated(ranks: Ranks) -> None:
    one, again = ranks.run(3, cases_on, [Case("cp3.z2", "mistral", text="packed")] * 2, 2)[0]
    assert (one.losses, one.norms, one.evaluation) == (again.losses, again.norms, again.evaluation)
    assert same(one.states, again.states)


# -- what is broken on purpose

Spoil = Callable[[pytest.MonkeyPatch], None]


def put(where: object, name: str, value: object) -> Spoil:
    return lambda patch: patch.setattr(where, name, value)


def data_as_dp(patch: pytest.MonkeyPatch) -> None:
    """Sums over dp run over dp x cp."""
    patch.setattr(Mesh, "dp", property(lambda mesh: mesh.data), raising=False)


def mask_specs(change: Callable[[MaskSpec], MaskSpec]) -> Spoil:
    """Change the mask of the rectangles of the ring."""
    return put(context, "MaskSpec", lambda *given: change(MaskSpec(*given)))


def merge_without_rescale(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, part_lse))
    out.add_(part * (part_lse - lse).exp())


def zero_where_nothing_is_seen(scores: Tensor, softmax: Tensor) -> Tensor:
    found = log_sum_exp(scores, softmax)
    return found.where(found > torch.finfo(found.dtype).min, 0)


def stops_early(dtype: torch.dtype) -> Spoil:
    """Do not send what is of `dtype`, keys or gradients of bf16, on its last hop."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        def pass_on(x: Tensor, axis: Axis) -> Passing:
            if x.dtype == dtype and next(hops) % (axis.size - 1) == 0:
                return Passing(x, x.clone(), Pending(axis))
            return honest(x, axis)

        hops = itertools.count(1)
        honest = context.pass_on
        patch.setattr(context, "pass_on", pass_on)

    return spoil


def gradients_count_twice(patch: pytest.MonkeyPatch) -> None:
    arrived = Passing.arrived
    patch.setattr(
        Passing,
        "arrived",
        lambda passing: arrived(passing) * (1 + (passing.sent.dtype == torch.float32)),
    )


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Drop the rectangles that a window masks only in part."""
    of = Pairs.of

    def fewer(pairs: Pairs, source: int, num_tokens: int) -> list[tuple[slice, slice, MaskSpec]]:
        return [
            each
            for each in of(pairs, source, num_tokens)
            if each[2].offset < (pairs.window or num_tokens)
        ]

    patch.setattr(Pairs, "of", fewer)


PLAIN = Attention(24)
BF16 = Attention(24, dtype=torch.bfloat16)
TRADED = Attention(24, 5, 3, True, 3)
WINDOWED = Attention(24, 6)
PACKED = Attention(24, None, 5)
chunks_of = context.chunks_of
tokens_for_heads = context.tokens_for_heads
sees_everything: Callable[..., Tensor] = lambda q, k, v, *_: attention_naive(q, k, v)  # noqa: E731
traded_and_seen: Callable[..., AllToAll] = lambda *given: AllToAll(*given[:-1], sees_everything)  # noqa: E731
of_attention: dict[str, tuple[Attention, Spoil]] = {
    "later chunk first": (PLAIN, put(context, "chunks_of", lambda *of: chunks_of(*of)[::-1])),
    "chunks side by side": (
        PLAIN,
        put(context, "chunks_of", lambda rank, _: (2 * rank, 2 * rank + 1)),
    ),
    "one token nearer": (
        WINDOWED,
        mask_specs(lambda spec: replace(spec, offset=max(0, spec.offset - 1))),
    ),
    "no window in a hop": (
        WINDOWED,
        mask_specs(lambda s: replace(s, window=None if s.offset else s.window)),
    ),
    "partly in the window": (WINDOWED, narrow),
    "documents of rows": (
        PACKED,
        mask_specs(lambda spec: replace(spec, column_documents=spec.row_documents)),
    ),
    "no documents": (PACKED, mask_specs(lambda spec: replace(spec, row_documents=None))),
    "nothing seen is 0": (PACKED, put(attention, "log_sum_exp", zero_where_nothing_is_seen)),
    "largest score alone": (
        PLAIN,
        put(attention, "log_sum_exp", lambda scores, _: scores.amax(-1, keepdim=True)),
    ),
    "not rescaled": (PLAIN, put(context, "merge", merge_without_rescale)),
    "own softmax": (
        PLAIN,
        put(
            context,
            "attend_rectangle_backward",
            lambda *given: attend_rectangle_backward(*given[:-1]),
        ),
    ),
    "no delta": (
        PLAIN,
        put(context, "row_delta", lambda dy, y, kv: attention.row_delta(dy, y * 0, kv)),
    ),
    "keys go one hop too few": (BF16, stops_early(torch.bfloat16)),
    "gradients go one hop too few": (BF16, stops_early(torch.float32)),
    "gradients count twice": (BF16, gradients_count_twice),
    "heads in another order": (
        TRADED,
        put(context, "tokens_for_heads", lambda *x: tokens_for_heads(*x).flip(2)),
    ),
    "all-to-all sees everything": (TRADED, put(context, "AllToAll", traded_and_seen)),
}


def local_positions(whole: MicroBatch, layout: Layout, rank: int) -> MicroBatch:
    local = local_part(whole, layout, rank)
    return replace(local, positions=torch.arange(local.tokens.shape[1]).expand_as(local.tokens))


def alone(
    config: ModelConfig, layout: Layout, axis: Axis, documents: Tensor | None, *attention: object
) -> Attend:
    return make_attend(config, layout, axis, None, *attention)  # type: ignore[arg-type]


of_steps: dict[str, tuple[Case, Spoil]] = {
    "targets counted by every rank": (Case("cp2", "llama"), data_as_dp),
    "positions start anew": (Case("cp2", "llama"), put(applied, "local_part", local_positions)),
    "padding has targets": (Case("cp2", "llama", 13), put(context, "IGNORE_INDEX", 0)),
    "documents are not passed": (
        Case("cp2", "llama", text="packed"),
        put(applied, "make_attend", alone),
    ),
}
SPOILS: dict[str, Spoil] = {name: spoil for name, (_, spoil) in (of_attention | of_steps).items()}


@pytest.mark.parametrize("spoil", of_attention)
def test_attention_that_is_broken_on_purpose_is_found(ranks: Ranks, spoil: str) -> None:
    """Far outside what an honest one keeps to, 1e-10 in fp64 and 6e-3 in bf16."""
    case = of_attention[spoil][0]
    assert largest(ranks.run(3, attend_on, [case], spoil), 0) > (
        0.1 if case.dtype == torch.bfloat16 else 1e-3
    )


def test_what_is_not_broken_is_fine(ranks: Ranks) -> None:
    check_attention(ranks, 3, [PLAIN, TRADED, WINDOWED, PACKED])
    check_attention(ranks, 3, [BF16], 6e-3)


@pytest.mark.parametrize("spoil", of_steps)
def test_a_step_that_is_broken_on_purpose_is_found(ranks: Ranks, spoil: str) -> None:
    case = of_steps[spoil][0]
    first = ranks.run(2, cases_on, [case], 1, spoil)[0][0]
    with pytest.raises(AssertionError):
        check_first_step(case, first)


# -- bytes


def sent_on(rank: int, world: int, cases: Sequence[Case]) -> list[dict[str, int]]:
    """Return the bytes that one rank sends in a step, by axis, and in the evaluation of a micro-
    batch on the context axis."""
    reports = []
    for case in cases:
        program, mesh = make(case, rank)
        batch = share_of(case.batch(0), mesh.layout, mesh.coord.dp)
        mesh.bytes_sent()
        take_step(program, mesh, batch, 0.0, 0.0)
        sent = {str(name): axis.bytes_sent for name, axis in mesh.axes.items()}
        mesh.bytes_sent()
        program.pipeline.evaluate(program.evaluation, batch.microbatches[0])
        reports.append({**sent, "evaluation": mesh.cp.bytes_sent})
    return reports


@pytest.mark.parametrize(
    "shorts",
    [
        ["cp2", "cp2.a2a", "cp2.m3.z2", "cp2.rc-full", "cp2.fsdp"],
        ["cp3.m2"],
        ["cp4.a2a.m2", "tp2.cp2.sp", "dp2.cp2.z3.m3"],
    ],
    ids=["2", "3", "4"],
)
def test_a_layer_sends_keys_and_values_around_the_ring(ranks: Ranks, shorts: list[str]) -> None:
    """Bytes for S bytes of keys and values on each of c ranks: the ring sends (c - 1) S in the
    forward; in the backward they pass around again, and their gradients in fp32. All-to-all sends
    (c - 1) / c of q, k and v one way and of the output the other, and again in the backward."""
    cases = [
        Case(short, "four", 13, precision=precision)
        for short in shorts
        for precision in ("fp32", "bf16")
    ]
    config = MODELS["four"]
    layout = Layout.parse(shorts[0])
    by_rank = ranks.run(layout.world_size, sent_on, cases)
    for number, case in enumerate(cases):
        layout = Layout.parse(case.layout)
        element = DTYPES[case.precision].itemsize
        c = layout.cp
        m = layout.microbatches
        heads = config.num_heads // layout.tp
        tokens = SEQUENCES // layout.dp // m * layout.padded_tokens(13) // c
        one = tokens * heads * config.head_dim  # elements of any of q, k, v and the output
        forward = (c - 1) * 2 * one * element
        backward = (c - 1) * 2 * one * (element + 4)
        if layout.all_to_all:
            forward = backward = 4 * one * element * (c - 1) // c
        times = 2 if layout.recompute == "full" else 1
        for local in by_rank:
            sent = local[number]
            assert sent["cp"] == config.num_layers * m * (times * forward + backward), case
            assert sent["evaluation"] == config.num_layers * forward, case


def test_other_axes_send_what_they_do_without_it(ranks: Ranks) -> None:
    """Data ranks are dp x cp, and tensor ranks send for the tokens that they have."""
    cases = [Case(short, "four") for short in ("dp2.z2", "cp2.z2", "dp2.z3", "cp2.z3", "tp2.sp")]
    *of_data, of_tp = ranks.run(2, sent_on, cases)[0]
    for one, other in (of_data[:2], of_data[2:]):
        assert all(one[axis] == other[axis] for axis in ("data", "shard", "replicate", "tp"))
    (both,) = ranks.run(4, sent_on, [Case("tp2.cp2.sp", "four", 2 * SEQ_LEN)])[0]
    assert both["tp"] == of_tp["tp"] > 0


# -- checkpoints


def saved_on(
    rank: int, world: int, case: Case, path: Path | None, again: Path
) -> tuple[dict[str, State], float]:
    """The state that was read, or that two steps made, saved; and the loss of the next step, for
    which the weights are there."""
    program, mesh = make(case, rank)
    if path is not None:
        load_state(Checkpoint(path), program.store, program.specs)
    for step in range(0 if path else 2):
        step_once(program, mesh, case, step)
    save_checkpoint(again, program.store, mesh, program.specs, 2)
    return states_of(program, mesh), step_once(program, mesh, case, 2)[0]


def elements_in(path: Path) -> int:
    total = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            total += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    return total


def test_a_checkpoint_goes_to_any_layout_and_back_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    """And holds each element once: three states of P parameters. From each the next step has the
    same loss."""
    case = Case("cp2.z1", "one-kv", 13)
    path = tmp_path / "first"
    state, loss = ranks.run(2, saved_on, case, None, path)[0]
    assert elements_in(path) == 3 * num_params(model_specs(MODELS["one-kv"]))
    for number, short in enumerate(["cp4.z3", "tp2.cp2.sp", "cp2.z1"]):
        last = path
        path = tmp_path / str(number)
        world = Layout.parse(short).world_size
        found, next_loss = ranks.run(world, saved_on, replace(case, layout=short), last, path)[0]
        assert same(found, state), short
        assert elements_in(path) == elements_in(last), short
        assert next_loss == pytest.approx(loss, rel=1e-6)


# -- runs, and what is refused


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def train_on(rank: int, world: int, runs: Sequence[Settings]) -> None:
    for run in runs:
        Path(run.run.folder).mkdir(exist_ok=True)
        train(Place(rank, world, CPU), validated_run(run), 0)


def test_a_run_tells_the_losses_of_one_rank(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Losses of training and of held-out text are within 1e-6 until weights have been stepped and
    1e-5 from then on: sequences of 15 tokens with separate documents, and more held-out sequences
    than divide evenly among data ranks."""

    def runs(*layouts: str) -> list[Settings]:
        return [
            tiny_settings(
                data,
                tmp_path / layout,
                layout=layout,
                seq_len=15,
                separate_documents=True,
                num_kv_heads=2,
                steps=4,
                eval_sequences=27,
                save_every=0,
            )
            for layout in layouts
        ]

    def reports(layout: str) -> list[dict[str, float]]:
        rows = [
            json.loads(line)
            for line in (tmp_path / layout / "metrics.jsonl").read_text().splitlines()
        ]
        return [
            {key: row[key] for key in ("step", "loss", "grad_norm", "held_out_loss") if key in row}
            for row in rows
        ]

    by_world = {1: ["dp1"], 2: ["cp2", "cp2.a2a.z3.m2"], 4: ["dp2.cp2.z2"]}
    for world, layouts in by_world.items():
        ranks.run(world, train_on, runs(*layouts))
    expected = reports("dp1")
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 3, 4, 4]
    for layout in (*by_world[2], *by_world[4]):
        for row, wanted in zip(reports(layout), expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-6 if row["step"] <= 1 else 1e-5), layout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layout": "cp2.a2a"},
            r"a2a shards heads over tp x cp = 2, which 1 kv heads do not allow; the ring \(no "
            r"a2a\)",
        ),
        (
            {"layout": "tp2.cp2.a2a", "num_kv_heads": 2},
            r"over tp x cp = 4, which 2 kv heads do not allow; the ring",
        ),
        ({"layout": "dp2.a2a"}, "a2a is a method of context parallel; add cp2, or leave a2a out"),
        ({"layout": "cp2", "seq_len": 65}, "seq_len 65 exceeds the model's context length of 64"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(
    data: Path, tmp_path: Path, changes: dict[str, str | int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        validated_run(tiny_settings(data, tmp_path / "run", **changes))
