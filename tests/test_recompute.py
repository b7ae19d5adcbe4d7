"""Recompute in the backward: not a bit of the result changes; what is kept, run again and sent
again is counted."""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from examples import examples
from memory import peak_bytes
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import STATES
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.norm import rms_norm
from shardwise.kernels.reference.training import REFERENCE_TRAINING
from shardwise.layout import Layout, Recompute
from shardwise.model.layers import DTYPES, RecomputedInput, layer_norm, linear
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline.executor import Pipeline
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned, StateStore
from shardwise.parallel.zero import Store
from shardwise.train.data.batches import Batch
from shardwise.train.loop import take_step
from tiny_training import (
    FAMILIES,
    LLAMA,
    SEQ_LEN,
    SEQUENCES,
    filled_program,
    global_batch,
    part_of,
    seeded,
)

CPU = torch.device("cpu")
MODES: tuple[Recompute, ...] = get_args(Recompute)
BIASED = replace(LLAMA, num_kv_heads=4, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
MODELS = FAMILIES | {"biased": BIASED}


def make(
    layout: Layout, config: ModelConfig, rank: int = 0, precision: str = "fp32"
) -> tuple[Program, Mesh]:
    return filled_program(config, layout, rank, DTYPES[precision])


def batch_of(mesh: Mesh, step: int = 0) -> Batch:
    return part_of(*global_batch(step), mesh.layout, mesh.dp.rank)


# -- a linear of something light

MAKES: dict[str, Callable[..., Tensor]] = {
    "norm": lambda x, weight, bias: rms_norm(x, weight, 1e-5),
    "layer norm": lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
    "gated": lambda x, weight, bias: gated(torch.cat((x, x * weight), -1), "silu"),
}


@settings(max_examples=examples(60))
@given(
    make=st.sampled_from(sorted(MAKES)),
    leading=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    width=st.integers(1, 9),
    out=st.integers(0, 7),
    biased=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_a_light_linear_is_the_linear_of_what_is_made(
    make: str, leading: list[int], width: int, out: int, biased: bool, dtype: str
) -> None:
    """Result and every gradient bit for bit, of any shape, also of no rows and, as a rank may have
    of an MLP, of no columns. The matrix is kept and what it is made of, and not what is made.

    Not of a single element: autograd then computes the transposed product, which MKL sums in
    another order on processors with AVX-512.
    """
    assume(width * math.prod(leading) != 1)
    random = seeded(width)
    has_bias = make == "layer norm"
    shapes = [(*leading, width), *[(width,)] * (1 + has_bias), (out, width), *[(out,)] * biased]
    leaves = [
        torch.randn(shape, generator=random).to(DTYPES[dtype]).requires_grad_() for shape in shapes
    ]
    inputs = leaves[: 2 + has_bias]
    weight, *bias = leaves[2 + has_bias :]
    dy = torch.randn(*leading, out, generator=random).to(DTYPES[dtype])
    arguments = (*inputs, *([] if has_bias else [None]))
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y = linear(RecomputedInput(MAKES[make], arguments), weight, *bias)
    expected = F.linear(MAKES[make](*arguments), weight, *bias)
    assert torch.equal(y, expected)
    for mine, other in zip(
        torch.autograd.grad(y, leaves, dy, allow_unused=True),
        torch.autograd.grad(expected, leaves, dy, allow_unused=True),
        strict=True,
    ):
        assert torch.equal(mine, other)
    assert [id(x) for x in kept] == [id(x) for x in (weight, *inputs)]


# -- nothing changes


@dataclass(frozen=True)
class Told:
    """What two steps and an evaluation came to on one rank: numbers, and digests of all that it
    owns."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    states: dict[str, str]


def digests(store: StateStore) -> dict[str, str]:
    kinds: tuple[Owned, ...] = ("gradient", *STATES)
    return {
        f"{kind} {spec.name} {box.start}": hashlib.sha256(
            view.detach().float().numpy().tobytes()
        ).hexdigest()
        for kind in kinds
        for spec, box, view in store.owned(kind)
    }


def run_on(
    rank: int, world: int, layout: Layout, model: str, precision: str
) -> dict[Recompute, Told]:
    found = {}
    for mode in MODES:
        program, mesh = make(replace(layout, recompute=mode), MODELS[model], rank, precision)
        steps = [take_step(program, mesh, batch_of(mesh, step), 1e-2, 0.2) for step in range(2)]
        evaluation = program.pipeline.evaluate(program.evaluation, batch_of(mesh).microbatches[0])
        found[mode] = Told(
            [loss for loss, _ in steps],
            [norm for _, norm in steps],
            evaluation,
            digests(program.store),
        )
    return found


@pytest.mark.parametrize(
    ("short", "models"),
    [
        ("dp1.m2", [*MODELS]),
        ("tp2", ["qwen3"]),
        ("tp2.sp", ["gpt2", "biased"]),
        ("cp2", ["qwen3", "mistral"]),
        ("cp2.a2a", ["biased"]),
        ("dp2.z3.keep.m2", ["llama-tied"]),
        ("dp2.fsdp", ["qwen3"]),
        ("tp2.cp2.z2.sp", ["biased"]),
        ("dp2.tp2.fsdp.sp.m2", ["gpt2"]),
    ],
)
def test_recompute_is_bit_identical(ranks: Ranks, short: str, models: list[str]) -> None:
    """Losses, norms, every gradient, weights and moments after two steps, and the evaluation: the
    same operations run on the same values, in fp32 and bf16, and only when is another."""
    layout = Layout.parse(short)
    for model in models:
        for precision in ("fp32", "bf16") if model == "qwen3" else ("fp32",):
            for told in ranks.run(layout.world_size, run_on, layout, model, precision):
                assert told["none"].states and told["none"].norms[0] > 0
                assert told["selective"] == told["none"], (model, precision)
                assert told["full"] == told["none"], (model, precision)


# -- what is run again


def counted(program: Program) -> Counter[str]:
    """From now on, how often each piece runs."""
    pipeline = program.pipeline
    runs = Counter[str]()
    assert isinstance(pipeline, Pipeline)

    def counting(name: str, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
        runs[name] += 1
        return run(*arguments)

    work = pipeline.work
    wrapped = {name: functools.partial(counting, name, run) for name, run in work.runs.items()}
    pipeline.work = replace(work, runs=wrapped)
    return runs


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_full_runs_blocks_twice_and_the_ends_once(mode: Recompute, microbatches: int) -> None:
    program, mesh = make(
        Layout(microbatches=microbatches, recompute=mode), replace(LLAMA, num_layers=3)
    )
    runs = counted(program)
    take_step(program, mesh, batch_of(mesh), 1e-2, 0.2)
    times = microbatches * (2 if mode == "full" else 1)
    assert runs == {
        "embed": microbatches,
        "head": microbatches,
        **{f"blocks.{layer}": times for layer in range(3)},
    }
    runs.clear()
    program.pipeline.evaluate(program.evaluation, batch_of(mesh).microbatches[0])
    assert set(runs.values()) == {1}, "an evaluation has no backward"


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3"])
def test_selective_repeats_no_matmul(model: str) -> None:
    """Products are all but the whole work. Full recompute repeats those of the blocks' forward: in
    an evaluation they are all but the head's."""
    config = MODELS[model]
    programs = {mode: make(Layout(recompute=mode), config) for mode in MODES}
    found = {
        mode: flops(functools.partial(take_step, program, mesh, batch_of(mesh), 1e-2, 0.2))
        for mode, (program, mesh) in programs.items()
    }
    program, mesh = programs["none"]
    forward = flops(
        lambda: program.pipeline.evaluate(program.evaluation, batch_of(mesh).microbatches[0])
    )
    assert found["selective"] == found["none"] > 0
    assert (
        found["full"]
        == found["none"]
        + forward
        - 2 * SEQUENCES * SEQ_LEN * config.vocab_size * config.hidden_size
    )


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_norms_and_activations_are_recomputed(
    monkeypatch: pytest.MonkeyPatch, mode: Recompute, times: int
) -> None:
    made = Counter[str]()

    def count(name: str, where: dict[str, Any]) -> None:
        made_once = where[name]

        def make_it(*arguments: Any) -> Tensor:
            made[name] += 1
            return made_once(*arguments)

        monkeypatch.setitem(where, name, make_it)

    for name in ("rms_norm", "gated", "apply_rope"):
        count(name, vars(REFERENCE_TRAINING))
    program, mesh = make(Layout(recompute=mode), LLAMA)
    take_step(program, mesh, batch_of(mesh), 1e-2, 0.2)
    layers = LLAMA.num_layers
    rotations = 2 * layers * (2 if mode == "full" else 1)
    assert made == {
        "rms_norm": 2 * layers * times + 1,
        "gated": layers * times,
        "apply_rope": rotations,
    }


# -- what is kept


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """By address, the bytes of what lies behind `tensors`."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def run_forwards(program: Program, mesh: Mesh, kept: dict[str, list[Tensor]]) -> None:
    """The table up to the first backward; `kept` takes what each piece keeps for it, by name."""
    pipeline = program.pipeline
    batch = batch_of(mesh)
    assert isinstance(pipeline, Pipeline)
    with torch.no_grad():
        for action in program.table:
            if action.kind == "B":
                return
            saved: list[Tensor] = []
            with saved_tensors_hooks(lambda x, into=saved: into.append(x) or x, lambda x: x):  # type: ignore[misc]
                pipeline.execute(action, batch.microbatches, 1.0)
            if action.kind == "F":
                x = pipeline._saved[action.piece, 0].x
                kept[action.piece] = saved if x is None else [*saved, x]


def kept_on(rank: int, world: int, layout: Layout, config: ModelConfig) -> list[int]:
    """The bytes that each block keeps of its own: weights and angles are there anyway."""
    program, mesh = make(layout, config, rank)
    kept: dict[str, list[Tensor]] = {}
    run_forwards(program, mesh, kept)
    assert isinstance(program.store, Store) and isinstance(program.pipeline, Pipeline)
    context = program.pipeline._contexts[0]
    others = storages(
        [*(unit.weights for unit in program.store.units.values()), *(context.rope or ())]
    )
    found = []
    for name in (f"blocks.{layer}" for layer in range(config.num_layers)):
        own = {at: size for at, size in storages(kept[name]).items() if at not in others}
        found.append(sum(own.values()))
        others |= own
    return found


def block_bytes(config: ModelConfig, layout: Layout) -> int:
    """What one block keeps of a micro-batch, in fp32, from its shape. T tokens of this rank, S of
    them between seams:

    - its input, and the sum of that and attention, which the norms need: S D each; with full
      recompute only the input
    - q, k, v and the output of attention; for a ring the log-sum-exp of every row, for an
      all-to-all what it exchanged
    - where q and k are normed, what they were before, and a number a head
    - what goes into the activation
    - without recompute also the outputs of the norms and of the activation, and one or two numbers
      per row of each norm
    """
    t = layout.tp
    d = config.hidden_size
    q = config.q_size // t
    kv = config.kv_size // t
    f = config.ffn_size // t
    heads = config.num_heads // t
    tokens = SEQUENCES * SEQ_LEN // (layout.dp * layout.cp * layout.microbatches)
    between = tokens // t if layout.sequence_parallel else tokens
    if layout.recompute == "full":
        return 4 * between * d
    attention = 2 * q + 2 * kv
    if layout.cp > 1:
        attention += q if layout.all_to_all else heads
    if config.qk_norm:
        attention += q + 2 * kv + heads + config.num_kv_heads // t
    inner = 2 * f if config.gated else f
    elements = 2 * between * d + tokens * (attention + inner)
    if layout.recompute == "none":
        elements += tokens * (2 * d + f) + 2 * between * (1 if config.norm == "rms" else 2)
    return 4 * elements


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3", "biased"])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_saved_by_a_block(mode: Recompute, model: str) -> None:
    """Exactly, in real tensors."""
    layout = Layout(microbatches=2, recompute=mode)
    config = MODELS[model]
    assert kept_on(0, 1, layout, config) == [block_bytes(config, layout)] * config.num_layers


@pytest.mark.parametrize("short", ["cp2.a2a", "dp2.z3", "tp2.cp2.sp"])
def test_bytes_saved_by_a_sharded_block(ranks: Ranks, short: str) -> None:
    for mode in MODES:
        layout = replace(Layout.parse(short), recompute=mode)
        config = replace(LLAMA, num_kv_heads=4)
        for found in ranks.run(layout.world_size, kept_on, layout, config):
            assert found == [block_bytes(config, layout)] * config.num_layers, mode


def test_after_the_forward_full_holds_inputs_alone() -> None:
    """Of every block; embedding and head keep their graphs."""
    config = replace(LLAMA, num_layers=5)
    program, mesh = make(Layout(recompute="full"), config)
    kept: dict[str, list[Tensor]] = {}
    run_forwards(program, mesh, kept)
    pipeline = program.pipeline
    assert isinstance(pipeline, Pipeline)
    held = {name: saved for (name, _), saved in pipeline._saved.items()}
    blocks = [held.pop(f"blocks.{layer}") for layer in range(5)]
    for saved in blocks:
        assert (
            saved.y is None and saved.x is not None and saved.x.is_leaf and saved.x.grad_fn is None
        )
        assert saved.x.shape == (SEQUENCES, SEQ_LEN, config.hidden_size)
    assert (
        all(saved.y is not None and saved.y.requires_grad for saved in held.values())
        and len(held) == 2
    )
    inputs = storages([saved.x for saved in blocks if saved.x is not None])
    assert sum(inputs.values()) == 5 * 4 * SEQUENCES * SEQ_LEN * config.hidden_size


def test_the_peak_of_a_step_falls(tmp_path: Path) -> None:
    """By what every block keeps less than it would, but for the one whose backward runs, which
    makes it again: within 3%, since something small is always passing."""
    config = replace(LLAMA, num_layers=12, hidden_size=64, ffn_size=160, head_dim=16)
    peaks = {}
    kept = {}
    for mode in MODES:
        layout = Layout(recompute=mode)
        program, mesh = make(layout, config)
        take_step(program, mesh, batch_of(mesh), 0.0, 0.0)
        step = functools.partial(take_step, program, mesh, batch_of(mesh), 0.0, 0.0)
        peaks[mode], _ = peak_bytes(step, tmp_path / f"{mode}.json")
        kept[mode] = block_bytes(config, layout)
    fallen = {mode: peaks["none"] - peaks[mode] for mode in MODES}
    for mode in ("selective", "full"):
        assert fallen[mode] == pytest.approx(11 * (kept["none"] - kept[mode]), rel=0.03)


# -- what is sent again


def sent_on(
    rank: int, world: int, layout: Layout, config: ModelConfig
) -> dict[Recompute, tuple[dict[str, int], dict[str, int]]]:
    """Bytes of one step and of one evaluation, by axis."""
    found = {}
    for mode in MODES:
        program, mesh = make(replace(layout, recompute=mode), config, rank)
        mesh.bytes_sent()
        take_step(program, mesh, batch_of(mesh), 0.0, 0.0)
        step = mesh.bytes_sent()
        program.pipeline.evaluate(program.evaluation, batch_of(mesh).microbatches[0])
        found[mode] = step, mesh.bytes_sent()
    return found


def ring(elements: int, size: int) -> int:
    assert 4 * elements * (size - 1) % size == 0
    return 4 * elements * (size - 1) // size


def forward_bytes(layout: Layout, config: ModelConfig) -> dict[str, int]:
    """What the forward of all blocks sends in a step, by axis: two sums over tp of all tokens (as
    all-reduces, or in halves), and keys and values around the ring, or what attention reads and
    returns traded for heads."""
    tokens = SEQUENCES * SEQ_LEN // (layout.dp * layout.cp)
    passed = 4 * tokens * 2 * config.kv_size // layout.tp * (layout.cp - 1)
    traded = ring(tokens * (2 * config.q_size + 2 * config.kv_size) // layout.tp, layout.cp)
    tp = ring(2 * 2 * tokens * config.hidden_size, layout.tp)
    cp = traded if layout.all_to_all else passed
    return {"tp": config.num_layers * tp, "cp": config.num_layers * cp}


@pytest.mark.parametrize(
    "short", ["tp2", "cp2.a2a.m2", "dp2.z3.keep.m2", "tp2.cp2.sp.m3", "dp2.fsdp"]
)
def test_traffic_of_recompute(ranks: Ranks, short: str) -> None:
    """Exactly: full recompute sends the forward of the blocks once more; selective, under sequence
    parallel, gathers the two inputs of every block again, and else nothing. No weights are gathered
    again, since a backward reads them anyway. An evaluation sends what it did."""
    layout = Layout.parse(short)
    config = replace(LLAMA, num_kv_heads=4, num_layers=3)
    again = forward_bytes(layout, config)
    for found in ranks.run(layout.world_size, sent_on, layout, config):
        step, evaluation = found["none"]
        gathered = again["tp"] // 2 if layout.sequence_parallel else 0
        assert found["selective"] == ({**step, "tp": step["tp"] + gathered}, evaluation)
        assert found["full"] == (
            {**step, "tp": step["tp"] + again["tp"], "cp": step["cp"] + again["cp"]},
            evaluation,
        )
        assert any(step[axis] for axis in ("dp", "tp", "cp"))
