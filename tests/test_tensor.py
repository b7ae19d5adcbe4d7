"""Tensor and sequence parallel: each seam, every family and the cases that break elsewhere compute
what one process computes, send what is published, and are saved once."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from ranks import RankFailed, Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import STATES, Checkpoint
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.layout import Layout
from shardwise.measure.parity import Parity, Trial, compare
from shardwise.model import loss as loss_module
from shardwise.model.layers import DTYPES
from shardwise.model.loss import cross_entropy, cross_entropy_naive
from shardwise.parallel import state_store, tensor
from shardwise.parallel.apply import apply
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned
from shardwise.parallel.tensor import TensorSeams
from shardwise.params import model_specs, num_params
from shardwise.shards import partial_axes
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.loop import evaluate, take_step
from shardwise.train.rank import make_program
from shardwise.train.settings import Run, Settings
from shardwise.train.validate import validated_run
from tiny_training import (
    FAMILIES,
    LLAMA,
    OPTIMIZER,
    RATE,
    SEQ_LEN,
    SEQUENCES,
    Expected,
    agreed,
    build_data,
    each_case,
    fill_store,
    filled_program,
    global_batch,
    part_of,
    plain_steps,
    relative,
    seeded,
    tiny_settings,
    worst,
    worst_part,
)

CPU = torch.device("cpu")
MAX_NORM = 0.2
NUM_STEPS = 2
HUGE = 1e6
"""What padding holds here: nobody may read it."""

# -- each seam


def seams_on(rank: int, world: int, sequence: bool) -> TensorSeams:
    return TensorSeams(make_mesh(Layout(tp=world), rank, CPU).tp, sequence)


def block_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """This rank's rows, in equal blocks; what is beyond the last is padding."""
    each = -(-len(whole) // world)
    padded = torch.cat(
        [whole, torch.full((each * world - len(whole), whole.shape[1]), HUGE, dtype=whole.dtype)]
    )
    return padded[rank * each : (rank + 1) * each].clone().requires_grad_()


def rows_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """Real rows of this rank's block."""
    each = -(-len(whole) // world)
    return whole[rank * each : (rank + 1) * each]


def own_part(x: Tensor, seams: TensorSeams) -> Tensor:
    """Return the part of [B, T, ...] that lies on this rank between the TP hooks."""
    return x.tensor_split(seams.axis.size, 1)[seams.axis.rank] if seams.sequence else x


def summed_over(seams: TensorSeams, grad: Tensor) -> Tensor:
    """Under sequence parallel each rank has a partial sum of the gradient of what is not
    sharded."""
    total = grad.clone()
    if seams.sequence:
        seams.axis.all_reduce(total).wait()
    return total


def embed_on(rank: int, world: int, vocabs: Sequence[int]) -> list[int]:
    """The vocabularies of the cases that held, each in four forms."""
    held = []
    for vocab in vocabs:
        for sequence in (False, True):
            for sparse in (False, True):
                random = seeded(vocab)
                seams = seams_on(rank, world, sequence)
                whole = torch.randn(vocab, 6, generator=random).requires_grad_()
                ids = torch.randint(vocab, (3, 4 * world), generator=random)
                ids[0, :vocab] = torch.arange(vocab)[: ids.shape[1]]
                dy = torch.randn(3, 4 * world, 6, generator=random)
                expected = F.embedding(ids, whole)
                expected.backward(dy)
                block = block_of(whole.detach(), rank, world)
                local = seams.look_up(ids, block, sparse)
                (grad,) = torch.autograd.grad(local, block, own_part(dy, seams))
                assert grad.is_sparse == sparse
                grad = grad.to_dense()
                real = rows_of(whole.grad, rank, world)
                assert torch.equal(local, own_part(expected, seams)), (
                    "one rank looks a row up, the others add zero"
                )
                torch.testing.assert_close(grad[: len(real)], real, rtol=1e-6, atol=1e-6)
                assert not grad[len(real) :].any(), "no gradient of padding"
                held.append(vocab)
    return held


@pytest.mark.parametrize(("world", "vocabs"), [(2, [8, 7, 1]), (3, [131]), (4, [5, 8, 13])])
def test_rows_are_looked_up_where_they_are(ranks: Ranks, world: int, vocabs: list[int]) -> None:
    """Bit for bit; gradients, which are sums, within 1e-6. Of 5 rows in 4 blocks of 2 the last is
    padding alone."""
    assert (
        ranks.run(world, embed_on, vocabs)
        == [[vocab for vocab in vocabs for _ in range(4)]] * world
    )


@dataclass(frozen=True)
class Scored:
    """A case of cross entropy, with what holds when it is right."""

    vocab: int
    sequence: bool
    dtype: torch.dtype = torch.float32
    small: bool = False
    """Whether chunks of a few rows are forced."""


def score_on(rank: int, world: int, cases: Sequence[Scored]) -> list[Scored]:
    """The cases that held."""
    held = []
    for case in cases:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if case.small:
                    patch.setattr(loss_module, "SOFTMAX_BYTES", 300)
                    patch.setattr(loss_module, "PRODUCT_BYTES", 700)
                score_once(seams_on(rank, world, case.sequence), case)
        except Exception as error:
            raise AssertionError(f"{case}") from error
        held.append(case)
    return held


def score_once(seams: TensorSeams, case: Scored) -> None:
    random = seeded(case.vocab)
    rank = seams.axis.rank
    world = seams.axis.size
    whole = torch.randn(case.vocab, 8, generator=random).to(case.dtype)
    x = torch.randn(3, 4 * world, 8, generator=random).to(case.dtype)
    targets = torch.randint(case.vocab, x.shape[:2], generator=random)
    targets[1] = torch.arange(4 * world) * (case.vocab - 1) // (4 * world - 1)  # of every block
    targets[0, ::3] = -100
    targets[2, -4:] = -100
    whole_x = x.float().requires_grad_()
    whole_w = whole.float().requires_grad_()
    expected = cross_entropy_naive(whole_x, whole_w, targets)
    (0.25 * expected).backward()
    assert whole_x.grad is not None and whole_w.grad is not None

    local = own_part(x, seams).clone().requires_grad_()
    block = block_of(whole, rank, world)
    found = cross_entropy(local, block, targets, cross_entropy_grad_, seams, case.vocab)
    dx, dw = torch.autograd.grad(0.25 * found, (local, block))
    assert len(set(seams.axis.gather(float(found)))) == 1, "every rank knows the loss, and the same"
    with torch.no_grad():
        assert torch.equal(
            cross_entropy(local, block, targets, cross_entropy_grad_, seams, case.vocab),
            found.detach(),
        )
    real = rows_of(whole_w.grad, rank, world)
    exact = case.dtype == torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-6 if exact else 3e-3)
    assert relative(dx, own_part(whole_x.grad, seams)) < (1e-6 if exact else 1e-2)
    if len(real):
        assert relative(dw[: len(real)], real) < (1e-6 if exact else 1e-2)
    assert not dw[len(real) :].any(), "no gradient of padding"


@pytest.mark.parametrize(("world", "vocabs"), [(2, [8, 131, 3]), (3, [131, 4]), (4, [5, 13, 16])])
def test_cross_entropy_of_a_cut_vocabulary(ranks: Ranks, world: int, vocabs: list[int]) -> None:
    """Within 1e-6 of the definition in fp32; in bf16 within 3e-3 (loss) and 1e-2 (gradients) of it
    in fp32: logits are rounded to 8 bits. Padding has weights of a million, which would be the
    whole softmax (T11)."""
    cases = [Scored(vocab, sequence) for vocab in vocabs for sequence in (False, True)]
    cases += [Scored(vocabs[1], sequence, small=True) for sequence in (False, True)]
    cases += [Scored(vocab, vocab % 2 == 1, torch.bfloat16) for vocab in vocabs]
    assert ranks.run(world, score_on, cases) == [cases] * world


def spoiled_loss_on(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        SPOILS["padding takes part"](patch)
        score_on(rank, world, [Scored(5, False)])


def test_padding_that_takes_part_is_found(ranks: Ranks) -> None:
    with pytest.raises(RankFailed):
        ranks.run(2, spoiled_loss_on)


def pair_on(rank: int, world: int, widths: Sequence[int]) -> list[int]:
    """Columns, an activation, rows, a bias: ffn widths that the ranks do not divide, or that some
    have none of. Returns those that held, each with and without sequence parallel."""
    held = []
    for width in widths:
        for sequence in (False, True):
            random = seeded(width)
            seams = seams_on(rank, world, sequence)
            shapes = {
                "x": (2, 3 * world, 6),
                "up": (width, 6),
                "up_bias": (width,),
                "down": (5, width),
                "bias": (5,),
            }
            whole = {
                name: torch.randn(shape, generator=random).requires_grad_()
                for name, shape in shapes.items()
            }
            dy = torch.randn(2, 3 * world, 5, generator=random)
            inner = F.gelu(F.linear(whole["x"], whole["up"], whole["up_bias"]))
            expected = F.linear(inner, whole["down"], whole["bias"])
            expected.backward(dy)

            def local(name: str, of: Tensor, seams: TensorSeams = seams) -> Tensor:
                if name == "x":
                    return own_part(of, seams)
                rank = seams.axis.rank
                world = seams.axis.size
                return (
                    of
                    if name == "bias"
                    else of.tensor_split(world, 1 if name == "down" else 0)[rank]
                )

            shards = {
                name: local(name, value.detach()).clone().requires_grad_()
                for name, value in whole.items()
            }
            inner = F.gelu(F.linear(seams.enter(shards["x"]), shards["up"], shards["up_bias"]))
            found = seams.leave(F.linear(inner, shards["down"]), shards["bias"])
            grads = dict(
                zip(
                    shards,
                    torch.autograd.grad(found, [*shards.values()], own_part(dy, seams)),
                    strict=True,
                )
            )
            grads["bias"] = summed_over(seams, grads["bias"])
            torch.testing.assert_close(found, own_part(expected, seams), rtol=1e-5, atol=1e-5)
            for name, grad in grads.items():
                wanted = whole[name].grad
                assert wanted is not None
                torch.testing.assert_close(
                    grad, local(name, wanted), rtol=1e-5, atol=1e-5, msg=f"{name} of {width}"
                )
            held.append(width)
    return held


@pytest.mark.parametrize(("world", "widths"), [(2, [8, 7]), (3, [7, 2]), (4, [12, 3])])
def test_columns_then_rows(ranks: Ranks, world: int, widths: list[int]) -> None:
    """Output and every gradient within 1e-5. A bias after rows is added once."""
    assert (
        ranks.run(world, pair_on, widths) == [[width for width in widths for _ in range(2)]] * world
    )


def move_on(rank: int, world: int) -> tuple[bool, ...]:
    """Return whether gather, its gradient, scatter, its gradient and `part` are exact, on whole
    numbers, so that every sum is; also for views that are not contiguous."""
    seams = seams_on(rank, world, True)
    batch = 3
    length = 2 * world
    size = 4
    whole = torch.arange(float(batch * length * size)).view(batch, size, length).transpose(1, 2)
    local = own_part(whole, seams).requires_grad_()
    assert not local.is_contiguous()
    gathered = seams.enter(local)
    (of_gathered,) = torch.autograd.grad(gathered, local, (rank + 1.0) * whole)
    terms = world * (world + 1) / 2
    term = ((rank + 1.0) * whole).requires_grad_()
    scattered = seams.leave(term)
    (of_scattered,) = torch.autograd.grad(scattered, term, local)
    positions = torch.arange(length)[None]
    pairs = [
        (gathered, whole),
        (of_gathered, terms * local),
        (scattered, terms * local),
        (of_scattered, whole),
        (
            seams.local_tokens(positions.expand(batch, -1)),
            own_part(positions, seams).expand(batch, -1),
        ),
    ]
    return tuple(torch.equal(found, wanted) for found, wanted in pairs)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sequence_is_gathered_and_scattered(ranks: Ranks, world: int) -> None:
    """The partial sums of every rank for this rank's part are summed."""
    assert ranks.run(world, move_on) == [(True,) * 5] * world


# -- a few steps of every family

ODD = ModelConfig(
    "llama", 2, 15, 50, 3, 3, 4, 131, 32, tied=True, qkv_bias=True
)  # tp3 divides neither 50 nor 131
MODELS = FAMILIES | {
    "odd": ODD,
    "odd-gpt2": replace(
        FAMILIES["gpt2"], num_heads=3, num_kv_heads=3, hidden_size=15, ffn_size=7, vocab_size=131
    ),
    "one-kv": replace(
        LLAMA, num_heads=4, num_kv_heads=1, qkv_bias=True, qk_norm=True, ffn_size=21, vocab_size=98
    ),
    "biased": replace(
        LLAMA, num_kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, ffn_size=21
    ),
    "few": replace(
        LLAMA, ffn_size=3, num_heads=4, num_kv_heads=4
    ),  # over 4 ranks one has nothing of the MLP
}


@dataclass(frozen=True)
class Case:
    """A few steps of one model on one layout."""

    layout: str
    model: str
    precision: str = "fp32"

    @property
    def sequences(self) -> int:
        """The number of sequences that divides evenly among data ranks and micro-batches."""
        layout = Layout.parse(self.layout)
        return -(-SEQUENCES // (layout.dp * layout.microbatches)) * layout.dp * layout.microbatches


@dataclass(frozen=True)
class RankReport:
    """The result of one rank; whole tensors on the first alone. `grads` are those of the first
    step."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    grads: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def whole(program: Program, mesh: Mesh, kind: Owned) -> dict[str, Tensor]:
    return agreed(program.store, mesh, program.specs, kind)


def make(case: Case, rank: int) -> tuple[Program, Mesh]:
    return filled_program(
        MODELS[case.model], Layout.parse(case.layout), rank, DTYPES[case.precision]
    )


def step_once(program: Program, mesh: Mesh, step: int, sequences: int) -> tuple[float, float]:
    batch = part_of(*global_batch(step, sequences), mesh.layout, mesh.data.rank)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), MAX_NORM)
    return mesh.data.sum(loss)[0], norm


def run_case(case: Case, rank: int, num_steps: int) -> RankReport:
    program, mesh = make(case, rank)
    losses = []
    norms = []
    grads = {}
    for step in range(num_steps):
        loss, norm = step_once(program, mesh, step, case.sequences)
        losses.append(loss)
        norms.append(norm)
        grads = grads or whole(program, mesh, "gradient")
    states = {kind: whole(program, mesh, kind) for kind in STATES}
    batch = part_of(*global_batch(0, case.sequences), mesh.layout, mesh.data.rank)
    summed = sum(program.pipeline.evaluate(program.evaluation, each) for each in batch.microbatches)
    total, targets = mesh.data.sum(summed, batch.num_targets)
    return RankReport(losses, norms, total / targets, {} if rank else grads, {} if rank else states)


def cases_on(
    rank: int, world: int, cases: Sequence[Case], num_steps: int, spoil: str = ""
) -> list[RankReport]:
    return each_case(
        cases, lambda case: run_case(case, rank, num_steps), SPOILS[spoil] if spoil else None
    )


@functools.lru_cache(maxsize=64)
def expected_of(model: str, num_steps: int, sequences: int) -> Expected:
    return plain_steps(MODELS[model], num_steps, MAX_NORM, sequences)


@functools.lru_cache(maxsize=64)
def evaluated(model: str, sequences: int) -> float:
    """The loss of the first batch with the weights after the last step, on one process."""
    program, mesh = make(Case("dp1", model), 0)
    fill_store(program.store, expected_of(model, NUM_STEPS, sequences).weights)  # type: ignore[arg-type]
    batch = part_of(*global_batch(0, sequences), mesh.layout, 0)
    return program.pipeline.evaluate(program.evaluation, batch.microbatches[0]) / batch.num_targets


def check_first_step(case: Case, first: RankReport) -> None:
    """Loss and norm within 1e-6 of plain torch on one process, the gradient of every part of every
    parameter 1e-5."""
    expected = expected_of(case.model, 1, case.sequences)
    assert first.losses[:1] == pytest.approx(expected.losses, rel=1e-6), case
    assert first.norms[:1] == pytest.approx(expected.norms, rel=1e-6), case
    assert worst_part(MODELS[case.model], first.grads, expected.grads) < 1e-5, case


def check_case(case: Case, reports: Sequence[RankReport]) -> None:
    """The first step; and after three clipped ones losses, norms and an evaluation within 1e-5,
    weights and moments 1e-4: steps divide by roots of tiny squares."""
    expected = expected_of(case.model, NUM_STEPS, case.sequences)
    first = reports[0]
    check_first_step(case, first)
    assert min(expected.norms) > MAX_NORM, "every step is to be clipped"
    assert first.losses == pytest.approx(expected.losses, rel=1e-5), case
    assert first.norms == pytest.approx(expected.norms, rel=1e-5), case
    assert first.evaluation == pytest.approx(evaluated(case.model, case.sequences), rel=1e-5), case
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
    *(Case("tp2", family) for family in ("llama-tied", "gpt2", "qwen2")), Case("tp2.sp", "gpt2"),
    Case("tp2.sp", "qwen3"), Case("tp2.m3", "one-kv"), Case("tp2.sp.z2.m2", "one-kv"),
    Case("tp2.z3", "biased"),
    Case("tp2.sp", "biased"),
]  # fmt: skip
ON_THREE = [Case("tp3", "odd"), Case("tp3.m2", "odd-gpt2"), Case("tp3.z1", "odd")]
ON_FOUR = [
    Case("tp4", "llama-tied"), Case("tp4.sp.m2", "qwen3"), Case("tp4.sp", "one-kv"),
    Case("tp4", "few"), Case("dp2.tp2", "gpt2"), Case("dp2.tp2.z2.m2", "llama-tied"),
    Case("dp2.tp2.sp.z1.m2", "biased"), Case("dp2.tp2.sp.z3.keep.m2", "qwen3"),
    Case("dp2.tp2.z3.s1", "mistral"),
]  # fmt: skip


@pytest.mark.parametrize("cases", [ON_TWO, ON_THREE, ON_FOUR], ids=["2", "3", "4"])
def test_every_family_computes_what_one_process_computes(ranks: Ranks, cases: list[Case]) -> None:
    """Loss, each gradient (of q and k norms, of k and v that several ranks hold, of biases after
    the reduction, of a tied embedding), norm, weights, moments; whatever several ranks own is equal
    bit for bit."""
    by_rank = ranks.run(
        Layout.parse(cases[0].layout).world_size, cases_on, cases, NUM_STEPS, timeout_s=120
    )
    for number, case in enumerate(cases):
        check_case(case, [local[number] for local in by_rank])


def test_replicas_are_equal_where_buffers_of_the_ranks_are_not_of_one_size(ranks: Ranks) -> None:
    """An uneven ffn moves what follows in the buffer of a unit, and a ring adds in an order that
    depends on the place: with three data ranks the terms of a key's weight must still come to the
    same sum on both that hold it. So does a vectorized step, whose last elements round
    otherwise."""
    cases = [Case("dp3.tp2", "one-kv"), Case("dp3.tp2.sp.z1.s1", "biased")]
    by_rank = ranks.run(6, cases_on, cases, NUM_STEPS, timeout_s=120)
    for number, case in enumerate(cases):
        check_case(case, [local[number] for local in by_rank])


def test_in_bf16_replicas_are_equal_too(ranks: Ranks) -> None:
    """And losses are within 1% of those in fp32, 8 bits being what they are."""
    cases = [Case("tp2", "one-kv", "bf16"), Case("tp2.sp.z2.m2", "biased", "bf16")]
    for reports, case in zip(ranks.run(2, cases_on, cases, NUM_STEPS)[0], cases, strict=True):
        assert reports.losses == pytest.approx(
            expected_of(case.model, NUM_STEPS, SEQUENCES).losses, rel=1e-2
        )


# -- what is broken on purpose


def without_partial(axis: str, ending: str) -> Callable[[pytest.MonkeyPatch], None]:
    """No sum over `axis` of the gradients of a unit, of those whose name ends so."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        def changed(spec: Any, part: Any, layout: Layout) -> tuple[str, ...]:
            found = partial_axes(spec, part, layout)
            return tuple(
                name for name in found if not (name == axis and spec.name.endswith(ending))
            )

        patch.setattr("shardwise.parallel.unit.partial_axes", changed)

    return spoil


def count_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_store, "is_first_holder", lambda *_: True)


def add_bias_first(patch: pytest.MonkeyPatch) -> None:
    leave = TensorSeams.leave

    def early(self: TensorSeams, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return leave(self, x if bias is None else x + bias)

    patch.setattr(TensorSeams, "leave", early)


def unmask_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loss_module.VocabShard, "num_real", property(lambda shard: shard.size))


def copy_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        copied = ctx.back is tensor.summed
        return grads[0] if copied else ctx.back(grads[0], ctx.axis), None, None, None

    patch.setattr(tensor.Conjugate, "backward", staticmethod(backward))


SPOILS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "k and v": without_partial("kv_replica", "qkv"),
    "bias of k and v": without_partial("kv_replica", "qkv_bias"),
    "q norm": without_partial("tp", "q_norm"),
    "k norm": without_partial("tp", "k_norm"),
    "norm under sp": without_partial("tp", "norm1"),
    "bias under sp": without_partial("tp", "down_bias"),
    "norm counts replicas": count_all,
    "bias before the sum": add_bias_first,
    "padding takes part": unmask_padding,
    "copy": copy_is_not_summed,
}


@pytest.mark.parametrize(
    ("spoil", "layout", "model"),
    [
        ("k and v", "tp2", "one-kv"),
        ("bias of k and v", "tp2.sp", "biased"),
        ("q norm", "tp2", "qwen3"),
        ("q norm", "tp2.sp", "qwen3"),
        ("k norm", "tp2", "qwen3"),
        ("norm under sp", "tp2.sp", "llama"),
        ("bias under sp", "tp2.sp", "biased"),
        ("norm counts replicas", "tp2", "llama"),
        ("bias before the sum", "tp2", "gpt2"),
        ("padding takes part", "tp2", "llama"),
        ("copy", "tp2", "llama"),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    ranks: Ranks, spoil: str, layout: str, model: str
) -> None:
    case = Case(layout, model)
    try:
        first = ranks.run(2, cases_on, [case], 1, spoil)[0][0]
    except RankFailed as error:
        assert "differ" in str(error), "nothing else may stop it than replicas that differ"
        return
    with pytest.raises(AssertionError):
        check_first_step(case, first)


# -- a sequence that does not divide


def compare_on(rank: int, world: int, trial: Trial) -> Parity | None:
    return compare(Place(rank, world, CPU), trial)


def test_a_sequence_in_three_parts_equals_one_rank(ranks: Ranks) -> None:
    trial = Trial(ODD, Layout.parse("tp3.sp.m2"), steps=2)
    found: Parity = ranks.run(3, compare_on, trial)[0]
    assert found.is_equal, found.first


# -- bytes


def bytes_on(
    rank: int, world: int, cases: Sequence[tuple[str, ModelConfig]]
) -> list[dict[str, int]]:
    """Return the bytes that one step, and then one evaluation, send on the axes of tensor
    parallel."""
    reports = []
    for short, config in cases:
        mesh = make_mesh(Layout.parse(short), rank, CPU, config.num_kv_heads)
        program = apply(config, mesh, torch.float32, torch.float32, OPTIMIZER.update)
        batch = part_of(*global_batch(0), mesh.layout, mesh.data.rank)
        mesh.bytes_sent()
        take_step(program, mesh, batch, 0.0, 0.0)
        sent = {name: mesh.axes[name].bytes_sent for name in ("tp", "kv_replica")}
        mesh.bytes_sent()
        program.pipeline.evaluate(program.evaluation, batch.microbatches[0])
        reports.append({**sent, "evaluation": mesh.axes["tp"].bytes_sent})
    return reports


@pytest.mark.parametrize(
    "short",
    ["tp2", "tp2.m2", "tp4", "dp2.tp2.z2", "tp2.sp", "tp2.sp.m2", "tp4.sp", "dp2.tp2.sp.z2.m3"],
)
def test_a_layer_sends_what_was_published(ranks: Ranks, short: str) -> None:
    """8 b s h (t - 1) / t elements a layer and micro-batch: four all-reduces of b s h (Shoeybi et
    al. 2019), or with sequence parallel four all-gathers and four reduce-scatters, which are as
    much (Korthikanti et al. 2022). Embedding and loss add a quarter of that each, and the softmax
    three numbers a token. Under sp the gradient of every norm is summed besides, once for each
    REDUCE."""
    layout = Layout.parse(short)
    config = replace(LLAMA, num_kv_heads=4, vocab_size=97)
    t = layout.tp
    m = layout.microbatches
    h = config.hidden_size
    tokens = SEQUENCES // layout.dp // m * SEQ_LEN
    found = ranks.run(
        layout.world_size, bytes_on, [(short, replace(config, num_layers=n)) for n in (1, 2, 3)]
    )
    reduces = m if layout.shards("gradients") else 1

    def ring(elements: int) -> int:
        assert 4 * elements * (t - 1) % t == 0
        return 4 * elements * (t - 1) // t

    norms = reduces * ring(2 * h) if layout.sequence_parallel else 0
    layer = m * ring(8 * tokens * h)
    embedding = m * ring(2 * tokens * h)
    loss = embedding + m * ring(6 * tokens)
    for local in found:
        for num_layers, sent in zip((1, 2, 3), local, strict=True):
            assert sent["tp"] == num_layers * (layer + 2 * norms) + norms + embedding + loss
            assert sent["kv_replica"] == 0, "every rank has kv heads of its own"
            gather = (
                ring(tokens * h) if layout.sequence_parallel else 0
            )  # before the head; a copy sends nothing
            looked_up = ring(tokens * h) if layout.sequence_parallel else ring(2 * tokens * h)
            assert sent["evaluation"] == num_layers * ring(
                4 * tokens * h
            ) + looked_up + gather + ring(6 * tokens)


def test_shared_heads_and_norms_send_their_gradients_once_a_step(ranks: Ranks) -> None:
    """k and v of one head and their bias over the ranks that share it; q and k norms over tp."""
    config = replace(LLAMA, num_kv_heads=1, qkv_bias=True)
    cases = [("tp4.m2", replace(config, qk_norm=qk_norm)) for qk_norm in (False, True)]
    plain, normed = ranks.run(4, bytes_on, cases)[0]
    h = config.hidden_size
    c = config.head_dim
    layers = config.num_layers
    assert (
        plain["kv_replica"] == normed["kv_replica"] == layers * 4 * 2 * (2 * c * h + 2 * c) * 3 // 4
    )
    assert normed["tp"] - plain["tp"] == layers * 4 * 2 * 2 * c * 3 // 4


# -- checkpoints

SAVED = "biased"  # tied, a kv head for two ranks, biases, 97 rows in blocks of 49 or 25, an odd ffn
State = dict[str, dict[str, Tensor]]


def save_on(rank: int, world: int, short: str, path: Path) -> State:
    """Two steps, and the state after them."""
    program, mesh = make(Case(short, SAVED), rank)
    for step in range(2):
        step_once(program, mesh, step, SEQUENCES)
    save_checkpoint(path, program.store, mesh, program.specs, 2)
    return {kind: whole(program, mesh, kind) for kind in STATES}


def load_on(rank: int, world: int, short: str, path: Path, again: Path) -> tuple[State, float]:
    """The state that was read, saved anew; and the loss of the next step, for which the weights are
    there."""
    program, mesh = make(Case(short, SAVED), rank)
    load_state(Checkpoint(path), program.store, program.specs)  # type: ignore[arg-type]
    save_checkpoint(again, program.store, mesh, program.specs, 2)
    state = {kind: whole(program, mesh, kind) for kind in STATES}
    return state, step_once(program, mesh, 2, SEQUENCES)[0]


def elements_in(path: Path) -> int:
    total = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            total += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    return total


def same(one: State, other: State) -> bool:
    return all(
        torch.equal(one[kind][name], value)
        for kind in STATES
        for name, value in other[kind].items()
    )


@pytest.mark.parametrize(
    ("short", "others"), [("tp2", ["dp1", "tp4.sp"]), ("dp2.tp2.sp.z2", ["dp2.z1"])]
)
def test_a_checkpoint_goes_to_any_layout_and_back_bit_for_bit(
    ranks: Ranks, tmp_path: Path, short: str, others: list[str]
) -> None:
    """And holds each element once: three states of P parameters, whoever shares them, and no
    padding."""
    first = tmp_path / "first"
    state = ranks.run(Layout.parse(short).world_size, save_on, short, first)[0]
    assert elements_in(first) == 3 * num_params(model_specs(MODELS[SAVED]))
    losses = []
    for number, other in enumerate(others):
        again = tmp_path / str(number)
        found, loss = ranks.run(Layout.parse(other).world_size, load_on, other, first, again)[0]
        losses.append(loss)
        assert same(found, state), other
        assert elements_in(again) == elements_in(first), other
        back, loss = ranks.run(
            Layout.parse(short).world_size, load_on, short, again, tmp_path / "back"
        )[0]
        losses.append(loss)
        assert same(back, state), f"by way of {other}"
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


# -- evaluation and bad input


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def held_out_on(rank: int, world: int, runs: Sequence[Settings]) -> list[float]:
    reports = []
    for run in runs:
        config = validated_run(run).config
        mesh = make_mesh(Layout.parse(run.run.layout), rank, CPU, config.num_kv_heads)
        reports.append(
            evaluate(run, make_program(Run(run, mesh.layout, config, None), mesh, 0), mesh)
        )
    return reports


def test_evaluation_tells_the_loss_of_one_rank(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Within 1e-6, also where data ranks run out of sequences."""

    def runs(*layouts: str) -> list[Settings]:
        return [
            tiny_settings(data, tmp_path / "run", layout=layout, eval_sequences=27)
            for layout in layouts
        ]

    (expected,) = ranks.run(1, held_out_on, runs("dp1"))
    for world, layouts in ((2, ["tp2", "tp2.sp"]), (4, ["dp2.tp2.z3", "dp2.tp2.sp.z1.m2"])):
        for reports in ranks.run(world, held_out_on, runs(*layouts)):
            assert reports == pytest.approx(expected * 2, rel=1e-6)


def test_what_cannot_be_cut_is_refused_with_what_can(data: Path, tmp_path: Path) -> None:
    works = r"tp3 does not divide 4 heads with 2 kv heads evenly; tp2 works \(1, 2, 4 do\)"
    with pytest.raises(ValueError, match=works):
        apply(LLAMA, make_mesh_of("tp3"), torch.float32, torch.float32, OPTIMIZER.update)


def make_mesh_of(short: str) -> Mesh:
    """Return a mesh without process groups, for what is refused before any rank communicates."""
    return Mesh(Layout.parse(short), 0, CPU, {})
