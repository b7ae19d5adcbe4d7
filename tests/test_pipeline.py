"""Pipeline parallel against plain torch on one process: every schedule, with every stage of ZeRO,
tensor and context parallel; what is sent; what breaks."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ranks import RankFailed, Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import STATES, Checkpoint
from shardwise.layout import Layout
from shardwise.model.layers import DTYPES, RecomputedInput, linear
from shardwise.parallel.apply import apply
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.deferred import Deferred, DeferredGradient
from shardwise.parallel.pipeline.executor import Pipeline
from shardwise.parallel.program import Program
from shardwise.parallel.zero import Store
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.loop import global_loss, take_step
from tiny_training import (
    FAMILIES,
    LLAMA,
    OPTIMIZER,
    RATE,
    SEQ_LEN,
    SEQUENCES,
    Expected,
    agreed,
    filled_program,
    global_batch,
    in_one_piece,
    plain_steps,
    share_of,
    worst,
    worst_part,
)

CPU = torch.device("cpu")
NUM_STEPS = 3
MAX_NORM = 0.05
DEEP = {name: replace(config, num_layers=5) for name, config in FAMILIES.items()}
MODELS = DEEP | {"odd": ModelConfig("llama", 5, 15, 50, 3, 3, 4, 97, 32, qkv_bias=True)}
State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Told:
    losses: list[float]
    norms: list[float]
    evaluation: float
    grads: dict[str, Tensor]
    states: State


def make(short: str, model: str, rank: int, precision: str = "fp32") -> tuple[Program, Mesh]:
    return filled_program(MODELS[model], Layout.parse(short), rank, DTYPES[precision])


def step_once(program: Program, mesh: Mesh, step: int) -> tuple[float, float]:
    batch = share_of(in_one_piece(*global_batch(step)), mesh.layout, mesh.coord.dp)
    loss, norm = take_step(program, mesh, batch, RATE.at(step), MAX_NORM)
    return global_loss(mesh, loss), norm


def states_of(program: Program, mesh: Mesh) -> State:
    return {kind: agreed(program.store, mesh, program.specs, kind) for kind in STATES}


def steps_on(rank: int, world: int, short: str, model: str, spoil: str = "") -> Told:
    with pytest.MonkeyPatch.context() as patch:
        if spoil:
            SPOILS[spoil](patch)
        program, mesh = make(short, model, rank)
        told = []
        grads: dict[str, Tensor] = {}
        for step in range(NUM_STEPS):
            told.append(step_once(program, mesh, step))
            grads = grads or agreed(program.store, mesh, program.specs, "gradient")
        batch = share_of(in_one_piece(*global_batch(0)), mesh.layout, mesh.coord.dp)
        summed = sum(
            program.pipeline.evaluate(program.evaluation, each) for each in batch.microbatches
        )
        evaluation = global_loss(mesh, summed) / mesh.dp.sum(batch.num_targets)[0]
        states = states_of(program, mesh)
    losses, norms = map(list, zip(*told, strict=True))
    return Told(losses, norms, evaluation, {} if rank else grads, {} if rank else states)


@functools.lru_cache(maxsize=16)
def expected_of(model: str, num_steps: int) -> Expected:
    return plain_steps(MODELS[model], num_steps, MAX_NORM)


def check(told: Sequence[Told], model: str) -> None:
    """The first step's loss within 1e-6 and gradients 1e-5; three clipped steps within 1e-5, states
    1e-4."""
    one = expected_of(model, 1)
    expected = expected_of(model, NUM_STEPS)
    first = told[0]
    assert first.losses[:1] == pytest.approx(one.losses, rel=1e-6)
    assert worst_part(MODELS[model], first.grads, one.grads) < 1e-5
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.norms == pytest.approx(expected.norms, rel=1e-5)
    for kind, wanted in zip(
        STATES, (expected.weights, expected.exp_avg, expected.exp_avg_sq), strict=True
    ):
        assert worst(first.states[kind], wanted) < 1e-4, kind
    for other in told:
        assert (other.losses, other.norms, other.evaluation) == (
            first.losses,
            first.norms,
            first.evaluation,
        )


# -- against one process

SMALL = [  # two ranks; micro-batches without targets, ever fewer of them, fewer than stages
    ("pp2.gpipe.m3", "llama"), ("pp2.1f1b", "llama-tied"), ("pp2.zb-h1.m4", "qwen3"),
    ("pp2.zb-h2.m3", "llama-tied"),
    ("pp2.zb-auto@2.m4", "gpt2"), ("pp2.interleaved.v2.m2", "llama-tied"),
    ("pp2.1f1b.m4.rc-full", "mistral"),
    ("pp2.zb-h1.m4.rc-full", "qwen2"),
]  # fmt: skip
LARGE = [  # more of them are drawn in `test_layouts.py`
    ("pp3.zb-h1.m6", "odd"), ("dp2.pp2.z3.interleaved.v2.m2", "qwen3"),
    ("tp2.pp2.zb-h1.m4.sp.rc-selective", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("short", "model"), SMALL + LARGE)
def test_a_pipeline_equals_one_process(ranks: Ranks, short: str, model: str) -> None:
    check(ranks.run(Layout.parse(short).world_size, steps_on, short, model), model)


def test_three_dimensions(ranks: Ranks) -> None:
    check(
        ranks.run(8, steps_on, "dp2.tp2.pp2.z1.1f1b.m3", "llama-tied", timeout_s=180.0),
        "llama-tied",
    )


def test_a_deferred_gradient_is_the_same_gradient() -> None:
    """Of a linear, and of a linear of something light; nothing reaches the weight itself before
    W."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64)
    w.requires_grad_()
    dy = torch.randn(2, 3, 5, dtype=torch.float64)
    for given in (x, RecomputedInput(torch.tanh, (x,))):
        plain = torch.tanh(x) if isinstance(given, RecomputedInput) else x
        dx, dw = torch.autograd.grad(plain @ w.t(), (x, w), dy)
        tape: list[DeferredGradient] = []
        y = linear(given, Deferred("w", w, tape))
        (found,) = torch.autograd.grad(y, x, dy)
        assert [owed.name for owed in tape] == ["w"]
        torch.testing.assert_close(found, dx, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tape[0].gradient(), dw, rtol=1e-12, atol=1e-12)


# -- what is sent, what is kept


def sent_on(rank: int, world: int, short: str, model: str) -> dict[str, int]:
    program, mesh = make(short, model, rank)
    mesh.bytes_sent()
    step_once(program, mesh, 0)
    return mesh.bytes_sent()


@pytest.mark.parametrize(
    "short", ["pp2.1f1b.m3", "pp2.zb-h1.m3", "pp3.gpipe.m2", "pp2.interleaved.v2.m2"]
)
def test_stages_send_the_residual_and_its_gradient(ranks: Ranks, short: str) -> None:
    """Once for each micro-batch and boundary between stages, up and down; the ends send a tied
    embedding's gradient."""
    layout = Layout.parse(short)
    config = MODELS["llama-tied"]
    size = SEQUENCES // layout.microbatches * SEQ_LEN * config.hidden_size * 4 * layout.microbatches
    told = ranks.run(layout.world_size, sent_on, short, "llama-tied")
    tied = config.vocab_size * config.hidden_size * 4
    stages = layout.pp * layout.chunks
    for rank, sent in enumerate(told):
        mine = range(rank, stages, layout.pp)
        hops = sum((stage < stages - 1) + (stage > 0) for stage in mine)
        assert sent["pp"] == hops * size + tied * (rank in (0, layout.pp - 1))
        assert sent["dp"] == sent["tp"] == sent["cp"] == 0


def in_flight_on(rank: int, world: int, short: str) -> int:
    """The most micro-batches whose graph is there at a time, of the first piece of this rank."""
    program, mesh = make(short, "llama", rank)
    pipeline = program.pipeline
    most = Counter[str]()
    assert isinstance(pipeline, Pipeline)
    genuine = pipeline.forward

    def watched(*given: object) -> None:
        genuine(*given)  # type: ignore[arg-type]
        there = [
            at
            for at, saved in pipeline._saved.items()
            if at[0] == pipeline.work.first_piece and saved.y is not None
        ]
        most["most"] = max(most["most"], len(there))

    pipeline.forward = watched  # type: ignore[method-assign]
    step_once(program, mesh, 0)
    return most["most"]


def test_1f1b_holds_as_many_microbatches_as_stages_remain(ranks: Ranks) -> None:
    assert ranks.run(3, in_flight_on, "pp3.1f1b.m6") == [3, 2, 1]
    assert ranks.run(3, in_flight_on, "pp3.gpipe.m6") == [6, 6, 6]


# -- checkpoints


def save_on(rank: int, world: int, short: str, path: Path) -> State:
    program, mesh = make(short, "llama-tied", rank)
    for step in range(2):
        step_once(program, mesh, step)
    save_checkpoint(path, program.store, mesh, program.specs, 2)
    return states_of(program, mesh)


def load_on(rank: int, world: int, short: str, path: Path, again: Path) -> tuple[State, float]:
    program, mesh = make(short, "llama-tied", rank)
    load_state(Checkpoint(path), program.store, program.specs)
    save_checkpoint(again, program.store, mesh, program.specs, 2)
    return states_of(program, mesh), step_once(program, mesh, 2)[0]


def test_a_checkpoint_is_resharded_and_back_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    state = ranks.run(2, save_on, "pp2.1f1b.m2", tmp_path / "0")[0]
    at = tmp_path / "0"
    losses = []
    for number, short in enumerate(
        ("dp2.z3", "pp3.zb-h1.m3", "dp2.tp2", "tp2.pp2.1f1b.m2.sp", "dp1"), 1
    ):
        found, loss = ranks.run(
            Layout.parse(short).world_size, load_on, short, at, at := tmp_path / str(number)
        )[0]
        losses.append(loss)
        assert all(
            torch.equal(found[kind][name], value)
            for kind in STATES
            for name, value in state[kind].items()
        )
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


# -- what breaks is noticed


def forget_the_tied_sum(patch: pytest.MonkeyPatch) -> None:
    genuine = Store.__init__
    patch.setattr(
        Store, "__init__", lambda store, *given, tied, **named: genuine(store, *given, **named)
    )


def count_the_tied_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shardwise.parallel.state_store.is_first_holder", lambda *given: True)


def lose_a_cotangent(patch: pytest.MonkeyPatch) -> None:
    genuine = Axis.send

    def send(axis: Axis, x: Tensor, to: int) -> object:
        return genuine(axis, torch.zeros_like(x) if axis.name == "pp_down" else x, to)

    patch.setattr(Axis, "send", send)


def swap_micro_batches(patch: pytest.MonkeyPatch) -> None:
    genuine = Pipeline.forward

    def forward(pipeline: Pipeline, action: Action, microbatch: object) -> None:
        if pipeline.mesh.pp.rank == 1 and action.piece == "head" and action.microbatch < 2:
            pipeline._contexts[action.microbatch] = pipeline.work.context(
                BATCHES[1 - action.microbatch]
            )
        genuine(pipeline, action, microbatch)  # type: ignore[arg-type]

    patch.setattr(Pipeline, "forward", forward)


def forget_a_weight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DeferredGradient,
        "gradient",
        lambda owed: owed.dy.flatten(0, -2).t() @ owed.x.flatten(0, -2) * 0.99,
    )


def loss_of_one_stage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("test_pipeline.global_loss", lambda mesh, mine: mesh.data.sum(mine)[0])


BATCHES = share_of(in_one_piece(*global_batch(0)), Layout.parse("pp2.1f1b.m4"), 0).microbatches
SPOILS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "tied": forget_the_tied_sum,
    "norm": count_the_tied_twice,
    "cotangent": lose_a_cotangent,
    "micro-batch": swap_micro_batches,
    "weight": forget_a_weight,
    "loss": loss_of_one_stage,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_injected_faults_are_noticed(ranks: Ranks, spoil: str) -> None:
    short = "pp2.zb-h1.m4" if spoil == "weight" else "pp2.1f1b.m4"
    with pytest.raises((AssertionError, RankFailed)):
        check(ranks.run(2, steps_on, short, "llama-tied", spoil), "llama-tied")


def test_bf16_stages_agree(ranks: Ranks) -> None:
    """The tied embedding's masters bit for bit, after steps in bf16; the loss within 1e-2 of
    fp32."""
    found = ranks.run(2, bf16_on, "pp2.zb-h1.m4")
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected_of("llama-tied", NUM_STEPS).losses, rel=1e-2)


def bf16_on(rank: int, world: int, short: str) -> list[float]:
    program, mesh = make(short, "llama-tied", rank, "bf16")
    losses = [step_once(program, mesh, step)[0] for step in range(NUM_STEPS)]
    states_of(program, mesh)
    return losses


def test_a_model_of_fewer_layers_than_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 stages are more than 2 layers; pp2 works"):
        apply(
            LLAMA,
            Mesh(Layout.parse("pp4.1f1b"), 0, CPU, {}),
            torch.float32,
            torch.float32,
            OPTIMIZER.update,
        )
