"""Parity must find layouts equal that are, and whatever is broken on purpose, by its name."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from ranks import Ranks
from shardwise.cli import main
from shardwise.commands.parity import parity_json
from shardwise.layout import Layout
from shardwise.measure import parity as parity_module
from shardwise.measure.parity import (
    MAX_NORM,
    PROCESS_BYTES,
    TOLERANCES,
    Parity,
    Trial,
    check_trial,
    compare,
    digest,
    draw_batch,
    logical_parts,
    needed_bytes,
    rank_batch,
    ratio,
    vanishes,
)
from shardwise.model.layers import DTYPES
from shardwise.model.loss import IGNORE_INDEX
from shardwise.parallel import mesh as mesh_module
from shardwise.parallel.fsdp import FsdpStore
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Axis, Pending
from shardwise.parallel.state_store import Owned
from shardwise.parallel.unit import Unit
from shardwise.parallel.zero import Store
from shardwise.params import ParamSpec, model_specs
from shardwise.shards import Box
from tiny_training import FAMILIES
from tiny_training import part_of as their_part_of

CPU = torch.device("cpu")
LAYOUTS = [
    *("dp2", "dp3.z1", "dp4.z2", "dp4.z3.s2", "dp2.z3.keep.m2", "dp2.fsdp"),
    *("pp2.zb-h1.m3", "dp2.pp2.z3.1f1b.m2", "pp2.interleaved.v2.m4"),
]
LLAMA = FAMILIES["llama"]
DEEP = replace(FAMILIES["llama-tied"], num_layers=4)
FP32 = TOLERANCES["fp32"]
KEYS = [
    "ok", "layout", "model", "steps", "precision", "loss_rel", "grad_rel", "grad_norm_rel",
    "param_rel",
    "replicas_equal",
    "tolerances", "first_difference",
]  # fmt: skip


def compare_on(rank: int, world: int, trial: Trial, spoil: str = "") -> Parity | None:
    with pytest.MonkeyPatch.context() as patch:
        SPOILS[spoil](patch)
        return compare(Place(rank, world, CPU), trial)


def found_by(ranks: Ranks, trial: Trial, spoil: str = "") -> dict[str, Any]:
    """The answer in JSON, which only the first rank has."""
    first, *others = ranks.run(trial.layout.world_size, compare_on, trial, spoil)
    assert others == [None] * len(others)
    told = json.loads(json.dumps(parity_json(trial, "tiny", first), allow_nan=False))
    assert list(told) == KEYS
    assert (
        told["ok"] == first.is_equal == (first.first is None) == (told["first_difference"] is None)
    )
    return told


# -- what is equal is found equal


@pytest.mark.parametrize(
    ("layout", "overlap", "bucket_bytes"),
    [(layout, True, 64 << 20) for layout in LAYOUTS]
    + [("dp4.z2", True, 4096), ("dp3.z3", False, 1000)],
)
def test_layouts_equal_one_rank(
    ranks: Ranks, layout: str, overlap: bool, bucket_bytes: int
) -> None:
    config = DEEP if "pp" in layout else FAMILIES["llama-tied"]
    trial = Trial(config, Layout.parse(layout), overlap=overlap, bucket_bytes=bucket_bytes)
    told = found_by(ranks, trial)
    assert told["ok"] and told["replicas_equal"] and told["first_difference"] is None
    assert told["loss_rel"] < 1e-6 and told["grad_rel"] < 1e-5, "ten times below the bounds"
    assert told["grad_norm_rel"] < 1e-6 and told["param_rel"] < 1e-5
    assert told["grad_rel"] > 0, (
        "sums in another order round otherwise: zero would mean that nothing was compared"
    )
    assert (Layout.parse(told["layout"]), told["model"], told["steps"]) == (trial.layout, "tiny", 3)
    assert told["tolerances"] == {
        "loss_rel": 1e-5,
        "grad_rel": 1e-4,
        "grad_norm_rel": 1e-5,
        "param_rel": 1e-4,
    }


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    dp = draw(st.integers(1, 4))
    group = (
        draw(st.sampled_from([None, *(s for s in range(1, dp + 1) if dp % s == 0)]))
        if shard != "none"
        else None
    )
    layout = Layout(
        dp=dp,
        shard=shard,
        shard_group=group,
        microbatches=draw(st.integers(1, 3)),
        keep=shard == "zero3" and draw(st.booleans()),
    )
    return Trial(
        FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))],
        layout,
        draw(st.integers(1, 2)),
        draw(st.integers(0, 9)),
        draw(st.booleans()),
        draw(st.sampled_from([999, 1 << 13, 64 << 20])),
    )


@settings(max_examples=examples(3))
@given(trial=trials())
def test_drawn_layouts_equal_one_rank(ranks: Ranks, trial: Trial) -> None:
    told = found_by(ranks, trial)
    assert told["ok"], told


def test_parity_is_deterministic(ranks: Ranks) -> None:
    trial = Trial(LLAMA, Layout.parse("dp3.z2.m2"), steps=1)
    assert found_by(ranks, trial) == found_by(ranks, trial)


@pytest.mark.parametrize(
    ("family", "layout"), [("llama-tied", "dp2.z2.m2"), ("gpt2", "tp2.m8"), ("qwen2", "dp2.fsdp")]
)
def test_bf16_is_near_fp32(ranks: Ranks, family: str, layout: str) -> None:
    """Rounding to 8 bits shows, within bounds of two to five times what docs/parity.md measured,
    and replicas are equal bit for bit."""
    trial = Trial(FAMILIES[family], Layout.parse(layout), precision="bf16")
    told = found_by(ranks, trial)
    assert told["ok"] and told["replicas_equal"] and told["precision"] == "bf16"
    assert told["grad_rel"] > 1e-3 and told["loss_rel"] > 1e-7


def test_bf16_parity_shows_sums_that_are_not_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 256 micro-batches in bf16 about double the error of the head's gradient."""

    def error_of_head() -> float:
        trial = Trial(LLAMA, Layout(microbatches=256), steps=1, precision="bf16")
        errors = {}
        monkeypatch.setattr(
            Parity,
            "record",
            lambda _, step, kind, rel, name=None: errors.update({(kind, name): rel}),
        )
        compare(Place(0, 1, CPU), trial)
        return errors["grad", "head"]

    in_fp32 = error_of_head()
    monkeypatch.setattr(parity_module, "accumulates_in_fp32", lambda *_: False)
    assert error_of_head() > 2 * in_fp32


def test_one_rank_with_itself() -> None:
    """Nothing differs, not even by rounding."""
    found = compare(Place(0, 1, CPU), Trial(LLAMA, Layout()))
    assert found is not None and found.is_equal
    assert {worst.rel for worst in found.worst.values()} == {0.0}


# -- what is broken is found, and named


def is_cut(store: Store) -> bool:
    """Whether it is a store of the layout, not that of the one rank alone."""
    return store.mesh.layout != Layout()


def after(patch: pytest.MonkeyPatch, name: str, then: Callable[[Any], object]) -> None:
    """Do something more at the end of a method of the layout's store."""
    for kind in (Store, FsdpStore):
        patch.setattr(kind, name, followed(getattr(kind, name), then))


def followed(genuine: Callable[..., Any], then: Callable[[Any], object]) -> Callable[..., Any]:
    def spoiled(store: Any, *args: Any) -> Any:
        result = genuine(store, *args)
        if is_cut(store):
            then(store)
        return result

    return spoiled


def views(store: Store, kind: Owned, name: str, part: str = "") -> Iterator[Tensor]:
    for spec, box, view in store.owned(kind):
        if spec.name == name and part in ("", box.part):
            yield view


def scale_keys(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the keys of one block is too large by a thousandth."""
    after(
        patch,
        "finish",
        lambda store: [view.mul_(1.001) for view in views(store, "gradient", "blocks.1.qkv", "k")],
    )


def swap_biases(patch: pytest.MonkeyPatch) -> None:
    """The bias of keys, whose gradient is nothing but rounding, gets that of the values."""

    def swap(store: Store) -> None:
        (keys,), (values,) = (
            list(views(store, "gradient", "blocks.1.qkv_bias", part)) for part in "kv"
        )
        keys.copy_(values)

    after(patch, "finish", swap)


def drop_a_row(patch: pytest.MonkeyPatch) -> None:
    """What the last rank sends is not added."""
    genuine = mesh_module.add_rows
    patch.setattr(
        mesh_module,
        "add_rows",
        lambda rows, *rest: genuine(rows[:-1] if len(rows) > 1 else rows, *rest),
    )


def skip_a_gather(at_step: int) -> Callable[[pytest.MonkeyPatch], None]:
    """One unit keeps the weights of before a step."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        genuine = Store.gather

        def gather(store: Store, name: str) -> None:
            if name == "blocks.1" and store.num_steps == at_step:
                store.units[name].is_whole = True
            genuine(store, name)

        patch.setattr(Store, "gather", gather)

    return spoil


def count_replicas(patch: pytest.MonkeyPatch) -> None:
    """Every replica's squares go into the norm."""
    genuine = Store.clip

    def clip(store: Store, max_norm: float) -> float:
        store.mesh.replicate.rank = 0
        return genuine(store, max_norm)

    patch.setattr(Store, "clip", clip)


def do_not_clip(patch: pytest.MonkeyPatch) -> None:
    """The norm is told but not heeded."""
    after(patch, "clip", lambda store: setattr(store, "_grad_scale", 1.0))


def part_ways(patch: pytest.MonkeyPatch) -> None:
    """After the third step the last replica's weights are off by one unit in the last place."""

    def nudge(store: Store) -> None:
        if store.num_steps == 3 and store.mesh.rank == store.mesh.world.size - 1:
            for view in views(store, "master", "blocks.0.down"):
                view.copy_(torch.nextafter(view, torch.tensor(math.inf)))

    after(patch, "step", nudge)


def decay_everything(patch: pytest.MonkeyPatch) -> None:
    """Norms shrink too."""
    genuine_slices = Unit.slices
    genuine_step = Store.step

    def slices(unit: Unit) -> Iterator[tuple[slice, bool]]:
        yield from ((part, True) for part, _ in genuine_slices(unit))

    def step(store: Store, lr: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if is_cut(store):
                inner.setattr(Unit, "slices", slices)
            genuine_step(store, lr)

    patch.setattr(Store, "step", step)


def forget_moments(patch: pytest.MonkeyPatch) -> None:
    """The last rank's shard of one unit starts every step with no momentum."""

    def forget(store: Store) -> None:
        if store.mesh.rank == store.mesh.world.size - 1:
            store.units["blocks.0"].exp_avg.zero_()

    after(patch, "step", forget)


def average_over_ranks(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own targets: the mean of means."""
    genuine = Axis.sum

    def summed(axis: Axis, *values: float) -> list[float]:
        return (
            [value * axis.size for value in values] if axis.name == "dp" else genuine(axis, *values)
        )

    patch.setattr(Axis, "sum", summed)


def lose_a_replica(patch: pytest.MonkeyPatch) -> None:
    """The sum over replicas never starts."""
    genuine = Axis.all_reduce

    def all_reduce(axis: Axis, *args: Any, **options: Any) -> Pending:
        return Pending(axis) if axis.name == "replicate" else genuine(axis, *args, **options)

    patch.setattr(Axis, "all_reduce", all_reduce)


def spoil_weight(everywhere: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """A weight is not a number, on the last rank of the layout or on both sides."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        genuine = parity_module.draw_weights

        def draw(program: Any, seed: int) -> None:
            genuine(program, seed)
            store = program.store
            if everywhere or (is_cut(store) and store.mesh.rank == store.mesh.world.size - 1):
                for view in views(store, "master", "norm"):
                    view[0] = math.nan
            store.refresh()

        patch.setattr(parity_module, "draw_weights", draw)

    return spoil


def spoil_gradient(patch: pytest.MonkeyPatch) -> None:
    """One element is not a number after the norm was taken."""

    def spoil(store: Store) -> None:
        for view in views(store, "gradient", "blocks.1.norm2"):
            view[0] = math.nan

    after(patch, "step", spoil)


def spoil_loss(patch: pytest.MonkeyPatch) -> None:
    genuine = parity_module.take_step

    def take_step(program: Any, *args: Any) -> tuple[float, float]:
        loss, norm = genuine(program, *args)
        return (math.nan if is_cut(program.store) else loss), norm

    patch.setattr(parity_module, "take_step", take_step)


SPOILS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda patch: None,
    "keys": scale_keys,
    "biases": swap_biases,
    "row": drop_a_row,
    "gather before step 2": skip_a_gather(1),
    "gather after the last": skip_a_gather(3),
    "norm": count_replicas,
    "clip": do_not_clip,
    "replica": part_ways,
    "decay": decay_everything,
    "moments": forget_moments,
    "mean of means": average_over_ranks,
    "sum": lose_a_replica,
    "nan on a rank": spoil_weight(everywhere=False),
    "nan on both sides": spoil_weight(everywhere=True),
    "nan in a gradient": spoil_gradient,
    "nan in the loss": spoil_loss,
}

FOUND = [  # what is broken, where, and what must be named: step, parameter, kind
    ("keys", "dp4.z3.s2", 1, "blocks.1.qkv.k", "grad"),
    ("row", "dp3.z3", 1, "embed", "grad"),
    ("gather before step 2", "dp3.z1", 2, "embed", "grad"),
    ("gather after the last", "dp2.z1", 3, "blocks.1.norm1", "replica"),
    ("keys", "dp2.fsdp", 1, "blocks.1.qkv.k", "grad"),
    ("replica", "dp4.fsdp.s2", 3, "blocks.0.down", "replica"),
    ("norm", "dp4.z3.s2", 1, None, "grad_norm"),
    ("clip", "dp2.z1", 2, "embed", "grad"),
    ("replica", "dp4.z3.s2", 3, "blocks.0.down", "replica"),
    ("decay", "dp2.z2", 2, "embed", "grad"),
    ("moments", "dp3.z1", 3, "embed", "grad"),
    ("mean of means", "dp3.z3", 1, "embed", "grad"),
    ("sum", "dp2", 1, "embed", "grad"),
    ("nan on a rank", "dp2", 1, "embed", "grad"),
    ("nan on both sides", "dp2.z3", 1, "embed", "grad"),
    ("nan in a gradient", "dp3.z2", 1, "blocks.1.norm2", "grad"),
    ("nan in the loss", "dp2", 1, None, "loss"),
]


UNLIKE_REPLICAS = ("gather after the last", "replica", "sum", "nan on a rank", "nan on both sides")


@pytest.mark.parametrize(("spoil", "layout", "step", "parameter", "kind"), FOUND)
def test_injected_faults_are_named(
    ranks: Ranks, spoil: str, layout: str, step: int, parameter: str | None, kind: str
) -> None:
    told = found_by(ranks, Trial(LLAMA, Layout.parse(layout), steps=step), spoil)
    first = told["first_difference"]
    assert not told["ok"]
    assert (first["step"], first["parameter"], first["kind"]) == (step, parameter, kind), told
    assert (first["rel"] is None) == spoil.startswith("nan"), "what is not a number has no size"
    assert told["replicas_equal"] == (spoil not in UNLIKE_REPLICAS), told


@pytest.mark.parametrize("spoil", ["clip", "decay", "norm"])
def test_one_step_shows_faults_in_the_parameters(ranks: Ranks, spoil: str) -> None:
    """Even the scale of the gradient, to which Adam is nearly blind when its eps is small."""
    told = found_by(ranks, Trial(LLAMA, Layout.parse("dp2"), steps=1), spoil)
    assert told["grad_rel"] < FP32["grad"] < 10 * FP32["param"] < told["param_rel"]


def test_a_replica_one_bit_off_is_all_that_differs(ranks: Ranks) -> None:
    told = found_by(ranks, Trial(LLAMA, Layout.parse("dp2")), "replica")
    assert not told["replicas_equal"] and told["first_difference"]["rel"] == 0.5, "of the ranks"
    for kind in ("loss", "grad", "grad_norm", "param"):
        assert told[f"{kind}_rel"] < FP32[kind]


def test_a_gradient_of_rounding_alone_is_equal_but_garbage_is_not(ranks: Ranks) -> None:
    """Of GPT-2 the bias of keys; where positions turn the keys it has a gradient like any other."""
    gpt2 = Trial(FAMILIES["gpt2"], Layout.parse("dp2"), steps=2)
    assert found_by(ranks, gpt2)["grad_rel"] < 1e-5
    first = found_by(ranks, gpt2, "biases")["first_difference"]
    assert (first["parameter"], first["kind"]) == ("blocks.1.qkv_bias.k", "grad") and first[
        "rel"
    ] > 0.1
    assert vanishes(gpt2.config, "blocks.0.qkv_bias.k") and not vanishes(
        gpt2.config, "blocks.0.qkv_bias.v"
    )
    assert not vanishes(FAMILIES["qwen2"], "blocks.0.qkv_bias.k")


# -- the parts


@given(trial=trials(), step=st.integers(1, 3))
def test_batches(trial: Trial, step: int) -> None:
    """Unequal counts of targets, none in a last micro-batch, some on every rank; every row on one
    rank, once."""
    layout = trial.layout
    tokens, targets = draw_batch(trial, step)
    assert tokens.shape == targets.shape == (layout.dp * layout.microbatches * 2, 32)
    parts = [rank_batch(tokens, targets, layout, rank) for rank in range(layout.dp)]
    counts = [
        int((each.targets != IGNORE_INDEX).sum()) for part in parts for each in part.microbatches
    ]
    assert (
        sum(counts)
        == sum(part.num_targets for part in parts)
        == int((targets != IGNORE_INDEX).sum())
    )
    assert all(part.num_targets for part in parts), "a rank that gives nothing would not be missed"
    assert len(set(counts)) > 1 or len(counts) == 1
    assert (min(counts) == 0) == (layout.microbatches > 1)
    for rank, part in enumerate(parts):
        others = their_part_of(tokens, targets, layout, rank).microbatches
        for mine, theirs in zip(part.microbatches, others, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(
                mine.targets, theirs.targets
            )
    again, _ = draw_batch(trial, step)
    other, _ = draw_batch(trial, step + 1)
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)


@pytest.mark.parametrize(
    ("layout", "length"), [("dp2", 32), ("tp4.cp2", 32), ("tp3", 30), ("cp5", 30), ("tp16", 32)]
)
def test_length_divides_and_fits(layout: str, length: int) -> None:
    assert Trial(LLAMA, Layout.parse(layout)).length_tokens == length


def test_clipping_is_active(ranks: Ranks) -> None:
    norms = ranks.run(1, norms_on)[0]
    assert all(norm > 2 * MAX_NORM for norm in norms), norms


def norms_on(rank: int, world: int) -> list[float]:
    norms = []
    for config in FAMILIES.values():
        trial = Trial(config, Layout(microbatches=64))  # the more tokens the smaller the norm
        side = parity_module.make_side(trial, Layout(), Place(0, 1, CPU))
        norms += [side.step(*draw_batch(trial, step))[1] for step in (1, 2)]
    return norms


OWNED: list[list[range]] = [[range(8, 24)], [range(0, 8), range(16, 32)], [range(32)]]
"""Rows of a parameter by rank: every row lies on two or three of them."""


def put_together_on(rank: int, world: int, owned: list[list[range]]) -> tuple[Tensor, Tensor]:
    """What is put together, and what this rank gave of it: all elements differ, on every rank
    too."""
    mesh = mesh_module.make_mesh(Layout(dp=world), rank, CPU)
    spec = next(spec for spec in model_specs(LLAMA) if spec.name == "blocks.0.out")
    mine = torch.arange(spec.numel).view(spec.shape) + 10_000.0 * (rank + 1)
    boxes = [
        Box("out", (rows.start, 0), (0, 0), (len(rows), spec.shape[1])) for rows in owned[rank]
    ]
    return parity_module.assemble(mesh, spec, [(box, mine[box.slices]) for box in boxes]), mine


def test_the_first_owner_of_an_element_counts(ranks: Ranks) -> None:
    told = ranks.run(3, put_together_on, OWNED)
    first_owner = [1] * 8 + [0] * 16 + [1] * 8
    expected = torch.stack([told[owner][1][row] for row, owner in enumerate(first_owner)])
    assert all(torch.equal(whole, expected) for whole, _ in told)


def test_an_element_on_no_rank_is_noticed(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"no rank owns all of blocks\.0\.out"):
        ranks.run(2, put_together_on, [[range(0, 16)], [range(8, 31)]])


@pytest.mark.parametrize(
    ("family", "name", "parts"),
    [
        ("llama", "blocks.0.qkv", ["q", "k", "v"]),
        ("llama", "blocks.1.gate_up", ["gate", "up"]),
        ("gpt2", "blocks.0.qkv_bias", ["q", "k", "v"]),
        ("gpt2", "positions", []),
    ],
)
def test_logical_parts_cover_the_rows(family: str, name: str, parts: list[str]) -> None:
    spec: ParamSpec = next(spec for spec in model_specs(FAMILIES[family]) if spec.name == name)
    found = list(logical_parts(spec))
    assert [part for part, _ in found] == ([f"{name}.{part}" for part in parts] or [name])
    assert [row for _, (rows,) in found for row in range(rows.start, rows.stop)] == list(
        range(spec.shape[0])
    )


@pytest.mark.parametrize(
    ("difference", "expected", "rel"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (1.0, 4.0, 0.25),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, math.inf, math.inf),
        (math.nan, 0.0, math.inf),
    ],
)
def test_ratio(difference: float, expected: float, rel: float) -> None:
    assert ratio(difference, expected) == rel


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1),
    at=st.integers(0, 99),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_digest_is_of_every_bit(values: list[float], at: int, dtype: str) -> None:
    x = torch.tensor(values).to(DTYPES[dtype])
    assert digest(x) == digest(x.clone())
    other = x.clone()
    bits = other.view(torch.int32 if x.element_size() == 4 else torch.int16)
    bits[at % len(values)] ^= 1
    assert digest(other) != digest(x)
    assert digest(torch.zeros(2)) == digest(-torch.zeros(2))


def test_a_parity_without_comparisons_is_not_equal() -> None:
    found = Parity(FP32)
    assert not found.is_equal
    for kind in ("loss", "grad", "grad_norm", "param"):
        found.record(1, kind, 0.0)
    assert not found.is_equal
    found.record(1, "replica", 0.0)
    assert found.is_equal
    found.record(2, "grad", math.nan, "embed")
    found.record(1, "grad", math.inf, "norm")
    assert not found.is_equal and found.first is not None and found.first.parameter == "embed"


# -- the command


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The shape of a tiny model in a folder, without weights or tokenizer."""
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 20,
        "tie_word_embeddings": True,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "tiny")


def test_command_starts_its_ranks(model: str) -> None:
    words = [
        sys.executable,
        "-m",
        "shardwise",
        "parity",
        model,
        "--layout",
        "pp2.z3.zb-h1.m2",
        "--steps",
        "2",
    ]
    words += ["--seed", "5", "--no-overlap", "--bucket-bytes", "5000", "--json"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == KEYS
    assert told["ok"] and (told["model"], told["layout"], told["steps"]) == (
        "tiny",
        "pp2.z3.zb-h1.m2",
        2,
    )
    assert "compared step 2 of 2" in done.stderr


def test_command_prints_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", model, "--layout", "m2.dp1"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal") == 6 and "differs" not in out
    assert out.splitlines()[-1] == "tiny: dp1.m2 equals one rank, 3 steps in fp32"


def test_command_names_the_first_difference(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_keys(monkeypatch)
    assert main(["parity", model, "--layout", "dp1.m2"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("tiny: dp1.m2 differs from one rank, first in ")
    assert "step 1, blocks.1.qkv.k" in out.splitlines()[-1]
    assert re.search(r"gradients.*0\.001 .*step \d, blocks\.1\.qkv\.k.*differs", out)
    assert main(["parity", model, "--layout", "dp1.m2", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first_difference"] == {
        "step": 1,
        "parameter": "blocks.1.qkv.k",
        "kind": "grad",
        "rel": pytest.approx(1e-3, rel=1e-2),
    }


def test_command_passes_its_flags(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Trial] = []
    monkeypatch.setattr(parity_module, "compare", lambda place, trial: seen.append(trial))
    assert (
        main(["parity", model, "--layout", "dp1", "--seed", "3", "--steps", "7", "--no-overlap"])
        == 0
    )
    assert main(["parity", model, "--layout", "dp1", "--bucket-bytes", "9"]) == 0
    assert [(t.seed, t.steps, t.overlap, t.bucket_bytes) for t in seen] == [
        (3, 7, False, 64 << 20),
        (0, 3, True, 9),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "dp2.q"], "'q' is not a part of a layout"),
        (["--layout", "dp2.keep"], "keep needs gathered parameters"),
        (["--layout", "dp4.z1.s3"], "do not divide 4 data ranks"),
        (["--layout", "tp3"], "tp3 does not divide 4 heads"),
        (["--layout", "dp1", "--steps", "0"], "--steps must be at least 1, not 0"),
        (["--layout", "dp1", "--bucket-bytes", "0"], "--bucket-bytes must be at least 1"),
        (["--layout", "dp1", "--step", "2"], "did you mean --steps?"),
        (
            ["--layout", "dp2.fsdp", "--no-overlap"],
            "--no-overlap and --bucket-bytes do not apply to fsdp",
        ),
        (["--layout", "dp1000000"], "fewer ranks"),
        (["--layout", "dp1.m1000000"], "fewer micro-batches"),
        ([], "required: --layout"),
    ],
)
def test_command_refuses(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", model, *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and told.err.count("\n") == 1


def test_command_refuses_what_is_unknown_or_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "nothing", "--layout", "dp2"]) == 2
    assert "unknown model 'nothing'" in capsys.readouterr().err
    assert main(["parity", "llama-3.1-405b", "--layout", "dp2"]) == 2
    assert "GB in fp32, but there are" in capsys.readouterr().err


def test_memory_counts_all_ranks_and_one_more() -> None:
    """16 bytes a parameter in fp32, as many times as it is held."""
    params = sum(spec.numel for spec in model_specs(LLAMA))
    plain = Trial(LLAMA, Layout.parse("dp4"))
    assert needed_bytes(plain, 0) > 16 * params
    compared = 16 * max(spec.numel for spec in model_specs(LLAMA))
    each = needed_bytes(plain, 4) - needed_bytes(plain, 3)
    assert each - compared - PROCESS_BYTES == pytest.approx(16 * params, rel=1e-3), (
        "but for padding"
    )
    assert needed_bytes(Trial(LLAMA, Layout.parse("dp4.z3")), 4) < needed_bytes(plain, 4)


def test_check_refuses_a_sequence_too_short_to_shard() -> None:
    with pytest.raises(
        ValueError,
        match="splits a sequence into 64 parts, but the context of the model is 32 tokens",
    ):
        _ = Trial(LLAMA, Layout.parse("tp4.cp8")).length_tokens
    check_trial(Trial(LLAMA, Layout.parse("dp2")))
