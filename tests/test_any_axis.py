"""Sharding over any axis: experts, a 3-D parameter fused along dim 1, are sharded over a toy axis
inside the data ranks, next to an ordinary unit of state.

Nothing in the package refers to the axis: a layout names it, a rule shards a dim over it, and the
unit of the experts carries the axes that are left. Store, checkpoint, planner and parity follow.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranks import Ranks
from shardwise.formats.run_checkpoint import STATES, Checkpoint
from shardwise.layout import AxisName, Coord, Layout, StateAxes
from shardwise.measure.parity import assemble, logical_parts
from shardwise.model.init import init_box
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.state_store import Owned
from shardwise.parallel.zero import Store
from shardwise.params import FUSED, RULES, Init, ParamSpec, Part, Rule, units
from shardwise.plan.ledger import BYTES_PER_PARAMETER, unit_shapes
from shardwise.plan.traffic import unit_data_bytes
from shardwise.shards import (
    boxes,
    boxes_within,
    flat_index,
    is_first_holder,
    local_shape,
    rectangles,
)
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.optim import AdamW

CPU = torch.device("cpu")
EXPERT_AXES = StateAxes("expert_shard", "expert_replicate")
EXPERTS = "blocks.0.experts"
NORMAL = Init("normal", 0.02)


@dataclass(frozen=True)
class ExpertLayout(Layout):
    """A layout in which `ep` neighboring data ranks share the experts of a block."""

    ep: int = 1

    AXES: ClassVar[tuple[AxisName, ...]] = (*Layout.AXES, "ep", *EXPERT_AXES)

    def size(self, axis: AxisName) -> int:
        groups = self.data_size // self.ep
        shards = 1 if self.shard == "none" else min(self.shard_group or groups, groups)
        sizes = {"ep": self.ep, "expert_shard": shards, "expert_replicate": groups // shards}
        return sizes[axis] if axis in sizes else super().size(axis)

    def index(self, axis: AxisName, coord: Coord) -> int:
        group, within = divmod(super().index("data", coord), self.ep)
        replica, shard = divmod(group, self.size("expert_shard"))
        indices = {"ep": within, "expert_shard": shard, "expert_replicate": replica}
        return indices[axis] if axis in indices else super().index(axis, coord)

    def ranks(
        self, axis: AxisName, coord: Coord, num_kv_heads: int | None = None
    ) -> tuple[int, ...]:
        toy = ("ep", *EXPERT_AXES)
        if axis not in toy:
            return super().ranks(axis, coord, num_kv_heads)

        def others(coord: Coord) -> list[int]:
            return [self.index(each, coord) for each in toy if each != axis]

        data = super().ranks("data", coord)
        return tuple(rank for rank in data if others(self.coord(rank)) == others(coord))


def expert_layout(short: str, ep: int) -> ExpertLayout:
    return ExpertLayout(**vars(Layout.parse(short)), ep=ep)


@pytest.fixture(scope="module", autouse=True)
def expert_rule() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "experts", Rule(cut="ep"))
        yield


def toy_specs(num_experts: int) -> tuple[ParamSpec, ...]:
    """A router and a norm, which every data rank holds, and the experts in a unit of their own."""
    hidden = 6
    ffn = 5
    gate_up = (Part("gate", "ffn", ffn), Part("up", "ffn", ffn))
    experts = {"unit": EXPERTS, "layer": 0, "state_axes": EXPERT_AXES}
    return (
        ParamSpec(
            "blocks.0.router",
            (num_experts, hidden),
            ("positions", "embed"),
            NORMAL,
            unit="blocks.0",
            layer=0,
        ),
        ParamSpec(
            "blocks.0.norm", (hidden,), ("embed",), Init("ones"), unit="blocks.0", kind="norm"
        ),
        ParamSpec(
            f"{EXPERTS}.gate_up",
            (num_experts, 2 * ffn, hidden),
            ("experts", FUSED, "embed"),
            NORMAL,
            parts=gate_up,
            **experts,  # type: ignore[arg-type]
        ),
        ParamSpec(
            f"{EXPERTS}.down",
            (num_experts, hidden, ffn),
            ("experts", "embed", "ffn"),
            NORMAL,
            **experts,  # type: ignore[arg-type]
        ),
    )


# -- boxes

DIMS = (
    ("experts", FUSED, "embed"),
    (FUSED, "experts", "embed"),
    ("embed", "experts", FUSED),
    ("experts", "embed", "ffn"),
    ("experts", FUSED),
    ("experts", "embed", FUSED, "head_dim"),
)


@st.composite
def sharded_specs(draw: st.DrawFn) -> tuple[ParamSpec, ExpertLayout]:
    """Up to four dims, up to three parts along any of them, over up to 5 x 3 ranks: more ranks than
    experts, shards that differ, are padded or empty."""
    dims = draw(st.sampled_from(DIMS))
    shape = [draw(st.integers(1, 4)) for _ in dims]
    parts: tuple[Part, ...] = ()
    if FUSED in dims:
        names = draw(st.lists(st.sampled_from(["ffn", "vocab"]), min_size=1, max_size=3))
        parts = tuple(Part(f"{i}", dim, draw(st.integers(1, 4))) for i, dim in enumerate(names))
        shape[dims.index(FUSED)] = sum(part.size for part in parts)
    spec = ParamSpec("w", tuple(shape), dims, NORMAL, unit="w", parts=parts, state_axes=EXPERT_AXES)
    ep = draw(st.integers(1, 5))
    return spec, ExpertLayout(dp=ep, tp=draw(st.integers(1, 3)), ep=ep)


def coords_of(layout: Layout) -> list[Coord]:
    return [layout.coord(rank) for rank in range(layout.world_size)]


@settings(max_examples=80)
@given(sharded_specs())
def test_boxes_of_all_ranks_tile_the_tensor_once(case: tuple[ParamSpec, ExpertLayout]) -> None:
    """An element of a dim that no rule shards over `tp` is on every tensor rank, and counted on the
    first."""
    spec, layout = case
    held = np.zeros(spec.shape, int)
    counted = np.zeros(spec.shape, int)
    for coord in coords_of(layout):
        local = np.zeros(local_shape(spec, layout, coord), int)
        for part, box in zip(spec.all_parts, boxes(spec, layout, coord), strict=True):
            held[box.slices] += 1
            counted[box.slices] += is_first_holder(spec, part, layout, coord)
            local[box.local_slices] += 1
        assert local.max(initial=0) <= 1
        assert (local == 0).sum() == local.size - sum(
            math.prod(box.shape) for box in boxes(spec, layout, coord)
        )
    assert (counted == 1).all()
    is_cut = any(RULES[dim].cut == "tp" for part in spec.all_parts for dim in spec.part_dims(part))
    assert (held == (1 if is_cut else layout.tp)).all()


@settings(max_examples=80)
@given(sharded_specs(), st.integers(0, 12), st.data())
def test_boxes_within_partition_the_local_tensor(
    case: tuple[ParamSpec, ExpertLayout], num_cuts: int, data: st.DataObject
) -> None:
    """Consecutive flat ranges hold every element of every box once, at its own place, and no
    padding."""
    spec, layout = case
    coord = data.draw(st.sampled_from(coords_of(layout)))
    shape = local_shape(spec, layout, coord)
    size = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=num_cuts, max_size=num_cuts)))
    whole = np.arange(spec.numel).reshape(spec.shape)
    expected = np.full(shape, -1)
    for box in boxes(spec, layout, coord):
        expected[box.local_slices] = whole[box.slices]
    found = np.full(shape, -1)
    for start, stop in pairwise([0, *cuts, size]):
        for box, first in boxes_within(spec, layout, coord, start, stop):
            assert len(box.shape) == len(shape) and math.prod(box.shape) >= 1
            assert first == flat_index(box.local, shape)
            last = flat_index(
                tuple(a + n - 1 for a, n in zip(box.local, box.shape, strict=True)), shape
            )
            assert start <= first <= last < stop
            assert (found[box.local_slices] == -1).all(), "no element twice"
            found[box.local_slices] = whole[box.slices]
            assert box.part in {part.name for part in spec.all_parts}
    assert (found == expected).all()


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 200), st.integers(0, 200)
)
def test_rectangles_are_the_range_and_few(sizes: list[int], start: int, length: int) -> None:
    shape = tuple(sizes)
    total = math.prod(shape)
    found = list(rectangles(start, start + length, shape))
    places = [
        flat_index(tuple(a + i for a, i in zip(first, offset, strict=True)), shape)
        for first, size in found
        for offset in product(*map(range, size))
    ]
    assert places == list(range(min(start, total), min(start + length, total)))
    assert len(found) <= 2 * len(shape) - 1


def test_shards_of_experts_may_be_uneven_and_empty() -> None:
    gate_up = toy_specs(5)[2]
    layout = ExpertLayout(dp=3, ep=3)
    coords = coords_of(layout)
    assert [local_shape(gate_up, layout, coord) for coord in coords] == [
        (2, 10, 6),
        (2, 10, 6),
        (1, 10, 6),
    ]
    gate, up = boxes(gate_up, layout, coords[1])
    assert (gate.start, gate.local, gate.shape) == ((2, 0, 0), (0, 0, 0), (2, 5, 6))
    assert (up.start, up.local, up.shape) == ((2, 5, 0), (0, 5, 0), (2, 5, 6))
    few = toy_specs(2)[2]
    last = coords[-1]
    assert local_shape(few, layout, last) == (0, 10, 6)
    assert not list(boxes_within(few, layout, last, 0, 1000))


# -- store, checkpoint, planner, parity

NUM_SHARES = 4
"""Parts of a global batch that contribute to gradients, however many ranks compute them."""
NUM_STEPS = 3
MICROBATCHES = 2
MAX_NORM = 1.0
KINDS: tuple[Owned, ...] = ("gradient", *STATES)


@dataclass(frozen=True)
class Outcome:
    """Whole tensors by kind and parameter, on every rank, the gradient norm of each step, and bytes
    found and predicted."""

    tensors: dict[str, dict[str, np.ndarray]]
    norms: list[float]
    held: dict[str, int]
    predicted: dict[str, int]
    sent: int
    predicted_sent: int
    num_counted: int


def contribution(spec: ParamSpec, step: int, microbatch: int, share: int) -> Tensor:
    """The gradient of one share of the batch: small integers, whose sums are exact."""
    random = torch.Generator().manual_seed(hash((len(spec.name), step, microbatch, share)))
    return torch.randint(-9, 10, spec.shape, generator=random).float()


def shares_of(layout: ExpertLayout, data_rank: int) -> range:
    each = NUM_SHARES // layout.data_size
    return range(data_rank * each, (data_rank + 1) * each)


def add_gradients(store: Store, mesh: Mesh, specs: Sequence[ParamSpec], step: int, mb: int) -> None:
    """Add what this rank computes. The rank that holds an expert computes with the tokens of all
    ranks that share the experts."""
    layout = mesh.layout
    assert isinstance(layout, ExpertLayout)
    mine = layout.index("data", mesh.coord)
    first = mine - layout.index("ep", mesh.coord)
    for spec in specs:
        is_expert = spec.state_axes == EXPERT_AXES
        tokens_of = range(first, first + layout.ep) if is_expert else (mine,)
        shares = [share for rank in tokens_of for share in shares_of(layout, rank)]
        whole = torch.stack([contribution(spec, step, mb, share) for share in shares]).sum(0)
        local = torch.zeros(local_shape(spec, layout, mesh.coord))
        for box in boxes(spec, layout, mesh.coord):
            local[box.local_slices] = whole[box.slices]
        store.add(spec.name, local)


def make_store(layout: ExpertLayout, rank: int, specs: Sequence[ParamSpec]) -> tuple[Store, Mesh]:
    mesh = make_mesh(layout, rank, CPU)
    update = AdamW(eps=1e-2).update
    store = Store(mesh, units(specs), torch.float32, torch.float32, update, bucket_bytes=256)
    for spec, box, view in store.owned("master"):
        init_box(view, spec, box, 7)
    store.refresh()
    return store, mesh


def train_toy(
    rank: int, world: int, layout: ExpertLayout, num_experts: int, folder: Path | None
) -> Outcome:
    """Train a few steps and save a checkpoint to `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "experts", Rule(cut="ep"))
        specs = toy_specs(num_experts)
        store, mesh = make_store(layout, rank, specs)
        norms = []
        mesh.bytes_sent()
        for step in range(NUM_STEPS):
            for unit in store.units:
                store.gather(unit)
                store.need([unit])
            for microbatch in range(MICROBATCHES):
                add_gradients(store, mesh, specs, step, microbatch)
                if layout.shards("gradients") or microbatch == MICROBATCHES - 1:
                    for unit in store.units:
                        store.reduce(unit)
            for unit in store.units:
                store.free(unit)
            store.finish()
            norms.append(store.clip(MAX_NORM))
            store.step(1e-2)
        sent = mesh.bytes_sent()["dp"]
        if folder is not None:
            save_checkpoint(folder, store, mesh, specs, NUM_STEPS)
        return outcome(store, mesh, specs, norms, sent)


def outcome(
    store: Store, mesh: Mesh, specs: Sequence[ParamSpec], norms: list[float], sent: int
) -> Outcome:
    layout = mesh.layout
    predicted = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    reduces = MICROBATCHES if layout.shards("gradients") else 1
    ring_bytes = 4 * NUM_STEPS * (reduces + layout.shards("optimizer"))
    predicted_sent = 0
    for of_unit in units(specs).values():
        shapes = unit_shapes(of_unit, layout)
        for row, num_bytes in shapes.state_bytes(layout, BYTES_PER_PARAMETER["fp32"]).items():
            predicted[row] += num_bytes
        predicted_sent += unit_data_bytes(shapes, layout, ring_bytes, 4 * NUM_STEPS)
    num_counted = sum(
        view.numel()
        for spec, box, view in store.owned("master")
        if is_first_holder(spec, spec.part(box.part), layout, mesh.coord)
    )
    tensors = {kind: wholes(store, mesh, specs, kind) for kind in KINDS}
    held = store.held_bytes()
    return Outcome(tensors, norms, held, predicted, sent, predicted_sent, num_counted)


def wholes(
    store: Store, mesh: Mesh, specs: Sequence[ParamSpec], kind: Owned
) -> dict[str, np.ndarray]:
    shares = defaultdict(list)
    for spec, box, view in store.owned(kind):
        shares[spec.name].append((box, view))
    return {spec.name: assemble(mesh, spec, shares[spec.name]).numpy() for spec in specs}


def resume_toy(
    rank: int, world: int, layout: ExpertLayout, num_experts: int, folder: Path
) -> dict[str, dict[str, np.ndarray]]:
    """Load the checkpoint under another layout and return its whole states."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "experts", Rule(cut="ep"))
        specs = toy_specs(num_experts)
        store, mesh = make_store(layout, rank, specs)
        load_state(Checkpoint(folder), store, specs)
        return {kind: wholes(store, mesh, specs, kind) for kind in STATES}


@pytest.mark.parametrize(
    ("short", "ep", "num_experts", "other", "other_ep"),
    [
        ("dp4", 2, 5, "dp2.tp2.z3", 2),
        ("dp4.z1", 2, 5, "dp4", 4),
        ("dp4.z2", 4, 3, "dp2", 1),
        ("dp4.z3", 2, 5, "tp3", 1),
        ("dp2.tp2.z1", 2, 3, "dp4.z1", 4),
        ("dp2.cp2.z3", 4, 5, "dp2.z1", 2),
        ("dp4.z2.s2", 1, 4, "dp4.z3", 2),
        ("dp2.tp2", 1, 4, "dp1", 1),
    ],
)
def test_experts_over_any_axis_train_as_on_one_rank(
    ranks: Ranks, tmp_path: Path, short: str, ep: int, num_experts: int, other: str, other_ep: int
) -> None:
    """Gradients are the same to the bit, norms, weights and moments within rounding; bytes held and
    sent are the planner's; a checkpoint resumes under another layout."""
    layout = expert_layout(short, ep)
    folder = tmp_path / "step-00000003"
    found = ranks.run(layout.world_size, train_toy, layout, num_experts, folder)
    alone = train_toy(0, 1, ExpertLayout(), num_experts, None)
    specs = toy_specs(num_experts)
    for outcome in found:
        assert outcome.held == outcome.predicted
        assert outcome.sent == outcome.predicted_sent
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-6)
        for kind, spec in product(KINDS, specs):
            for _, index in logical_parts(spec):
                mine = outcome.tensors[kind][spec.name][index]
                expected = alone.tensors[kind][spec.name][index]
                exact = kind == "gradient"
                assert np.allclose(
                    mine, expected, rtol=0.0 if exact else 1e-5, atol=0.0 if exact else 1e-8
                )
    assert sum(outcome.num_counted for outcome in found) == sum(spec.numel for spec in specs)

    target = expert_layout(other, other_ep)
    for states in ranks.run(target.world_size, resume_toy, target, num_experts, folder):
        for kind, spec in product(STATES, specs):
            assert (states[kind][spec.name] == found[0].tensors[kind][spec.name]).all(), spec.name
