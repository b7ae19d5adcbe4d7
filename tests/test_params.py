"""The parameter table against published counts, and its cuts against the definition of a
partition."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec, model_specs, num_params, stage_units, units
from shardwise.shards import block_of, boxes, boxes_within, local_shape, partial_axes, rectangles

# Parameters, and KV bytes per token in bf16: 2 x layers x kv heads x head size x 2 bytes. The
# counts are those that the hub shows for each model, as the papers round them (LLaMA: 65.2B, Llama
# 3: 405B); a tied embedding counts once.
PUBLISHED = {
    "gpt2": (124_439_808, 36_864),
    "llama-2-7b": (6_738_415_616, 524_288),
    "llama-2-13b": (13_015_864_320, 819_200),
    "llama-65b": (65_285_660_672, 2_621_440),
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.1-405b": (405_853_388_800, 516_096),
    "mistral-7b": (7_241_732_096, 131_072),
    "qwen2.5-0.5b": (494_032_768, 12_288),
    "qwen2.5-72b": (72_706_203_648, 327_680),
    "smollm2-135m": (134_515_008, 23_040),
    "gpt2-xl": (1_557_611_200, 307_200),
    "llama-2-70b": (68_976_648_192, 327_680),
    "llama-3-70b": (70_553_706_496, 327_680),
    "llama-3.2-1b": (1_235_814_400, 32_768),
    "llama-3.2-3b": (3_212_749_824, 114_688),
    "qwen3-0.6b": (596_049_920, 114_688),
    "qwen3-8b": (8_190_735_360, 147_456),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    config = CATALOGUE[name]
    assert (num_params(model_specs(config)), config.kv_bytes_per_token()) == PUBLISHED[name]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small decoders of odd sizes with every optional parameter on or off."""
    kv_heads = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 4))
    heads = kv_heads * groups
    head_dim = draw(st.sampled_from([2, 4]))
    flags = {
        name: draw(st.booleans())
        for name in ("tied", "gated", "qkv_bias", "out_bias", "mlp_bias", "qk_norm")
    }
    return ModelConfig(
        "llama",
        num_layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 9)),
        ffn_size=draw(st.integers(1, 13)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 40)),
        max_positions=draw(st.integers(1, 9)),
        norm=draw(st.sampled_from(["rms", "layer"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        **flags,
    )


@st.composite
def models_with_tp(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    config = draw(models())
    works = [tp for tp in range(1, config.num_heads + 1) if not Layout(tp=tp).problems(config)]
    return config, draw(st.sampled_from(works))


def tensor_coords(layout: Layout) -> list[Coord]:
    return [Coord(dp=0, tp=tp, pp=0, cp=0) for tp in range(layout.tp)]


def is_cut(spec: ParamSpec) -> bool:
    names = {dim for part in spec.all_parts for dim in spec.part_dims(part)}
    return bool(names & {"vocab", "q_heads", "kv_heads", "ffn"})


@settings(max_examples=examples(60))
@given(models_with_tp())
def test_boxes_of_all_ranks_tile_each_parameter(case: tuple[ModelConfig, int]) -> None:
    """Once each; as often as there are ranks where nothing is cut; kv heads as often as ranks share
    one."""
    config, tp = case
    layout = Layout(tp=tp)
    for spec in model_specs(config):
        held = np.zeros(spec.shape, int)
        for coord in tensor_coords(layout):
            for box in boxes(spec, layout, coord):
                held[box.slices] += 1
        row = 0
        for part in spec.all_parts:
            copies = max(1, tp // config.num_kv_heads) if part.dim == "kv_heads" else 1
            assert (held[row : row + part.size] == (copies if is_cut(spec) else tp)).all(), (
                spec.name,
                part,
            )
            row += part.size


@settings(max_examples=examples(60))
@given(models_with_tp())
def test_local_shape_is_what_the_boxes_fill(case: tuple[ModelConfig, int]) -> None:
    """Boxes lie in the local tensor without overlap; what they leave is padding, which only a
    vocabulary has."""
    config, tp = case
    layout = Layout(tp=tp)
    for spec in model_specs(config):
        shapes = {local_shape(spec, layout, coord) for coord in tensor_coords(layout)}
        for coord in tensor_coords(layout):
            local = np.zeros(local_shape(spec, layout, coord), int)
            for box in boxes(spec, layout, coord):
                assert local[box.local_slices].shape == box.shape
                local[box.local_slices] += 1
            assert local.max(initial=0) <= 1
            if "vocab" not in spec.dims:
                assert local.min(initial=1) == 1, spec.name
        if "vocab" in spec.dims:
            assert shapes == {(math.ceil(config.vocab_size / tp), config.hidden_size)}


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 30))
def test_rectangles_are_the_range_and_few(start: int, length: int, width: int) -> None:
    """Check that rectangles come in order, without gap or overlap: the rest of a row, whole rows,
    the beginning of a row, and no more."""
    found = list(rectangles(start, start + length, (400, width)))
    places = [
        (row + r) * width + column + c
        for (row, column), (rows, columns) in found
        for r in range(rows)
        for c in range(columns)
    ]
    assert places == list(range(start, start + length))
    assert len(found) <= 3
    for (row, column), (rows, columns) in found:
        assert row >= 0 and rows >= 1 and columns >= 1 and column + columns <= width
        assert rows == 1 or columns == width
    assert len([shape for _, shape in found if shape[1] == width]) <= 1, (
        "whole rows are one rectangle"
    )


@settings(max_examples=examples(60))
@given(models_with_tp(), st.integers(0, 40), st.data())
def test_consecutive_ranges_tile_every_box(
    case: tuple[ModelConfig, int], num_cuts: int, data: st.DataObject
) -> None:
    """However the flat local tensor is cut, every element of every box is in one rectangle, at its
    own place; padding is in none. Empty ranges and ranges beyond the end hold nothing more."""
    config, tp = case
    layout = Layout(tp=tp)
    spec = data.draw(st.sampled_from(model_specs(config)))
    coord = data.draw(st.sampled_from(tensor_coords(layout)))
    shape = local_shape(spec, layout, coord)
    size = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=num_cuts, max_size=num_cuts)))
    whole = np.arange(spec.numel).reshape(spec.shape)
    local = np.full(shape, -1)
    for box in boxes(spec, layout, coord):
        local[box.local_slices] = whole[box.slices]
    flat = local.reshape(-1)
    rebuilt = np.full(size, -1)
    for start, stop in pairwise([0, *cuts, size]):
        for box, first in boxes_within(spec, layout, coord, start, stop):
            assert len(box.shape) == len(spec.shape) and math.prod(box.shape) >= 1
            places = slice(first, first + math.prod(box.shape))
            assert start <= places.start and places.stop <= stop
            assert (rebuilt[places] == -1).all(), "no element twice"
            rebuilt[places] = whole[box.slices].reshape(-1)
            assert (local[box.local_slices] == whole[box.slices]).all()
            assert box.part in {part.name for part in spec.all_parts}
    assert (rebuilt == flat).all()
    assert not list(boxes_within(spec, layout, coord, size, size))
    assert not list(boxes_within(spec, layout, coord, size // 2, size // 2))


@settings(max_examples=examples(60))
@given(models_with_tp())
def test_a_cut_never_splits_a_head(case: tuple[ModelConfig, int]) -> None:
    config, tp = case
    layout = Layout(tp=tp)
    for spec in model_specs(config):
        if not any(part.dim in ("q_heads", "kv_heads") for part in spec.all_parts):
            continue
        for coord in tensor_coords(layout):
            q, k, v = boxes(spec, layout, coord)
            assert {block_of(spec, part.dim) for part in spec.all_parts} == {config.head_dim}
            assert q.shape[0] == config.q_size // tp
            assert k.shape == v.shape
            assert k.shape[0] == max(1, config.num_kv_heads // tp) * config.head_dim
            group = (
                config.num_heads // config.num_kv_heads
            )  # this rank's q heads use just the kv heads it holds
            first = q.start[0] // config.head_dim
            last = (q.start[0] + q.shape[0]) // config.head_dim - 1
            kv_first = (k.start[0] - config.q_size) // config.head_dim
            assert (first // group, last // group) == (
                kv_first,
                kv_first + k.shape[0] // config.head_dim - 1,
            )


@settings(max_examples=examples(60))
@given(models_with_tp())
def test_the_first_tensor_rank_is_the_fullest(case: tuple[ModelConfig, int]) -> None:
    """The planner relies on it."""
    config, tp = case
    layout = Layout(tp=tp)
    for spec in model_specs(config):
        held = [math.prod(local_shape(spec, layout, coord)) for coord in tensor_coords(layout)]
        assert held[0] == max(held), spec.name


def test_shards_may_be_empty() -> None:
    """5 vocabulary rows on 4 ranks: 2, 2, 1 and none."""
    layout = Layout(tp=4)
    init = model_specs(CATALOGUE["gpt2"])[0].init
    spec = ParamSpec("embed", (5, 3), ("vocab", "embed"), init, unit="embed", kind="embedding")
    rows = [boxes(spec, layout, coord)[0] for coord in tensor_coords(layout)]
    assert [(box.start[0], box.shape[0]) for box in rows] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert {local_shape(spec, layout, coord) for coord in tensor_coords(layout)} == {(2, 3)}


def axes_of(config: ModelConfig, layout: Layout) -> dict[str, tuple[str, ...]]:
    """The partial axes of block 0 and of what is outside the blocks, by `parameter` or
    `parameter.part`."""
    found = {}
    for spec in model_specs(config):
        if spec.name.startswith("blocks.") and not spec.name.startswith("blocks.0."):
            continue
        name = spec.name.removeprefix("blocks.0.")
        for part in spec.all_parts:
            found[f"{name}.{part.name}" if spec.parts else name] = partial_axes(spec, part, layout)
    return found


def test_partial_axes_without_sequence_parallelism() -> None:
    axes = axes_of(CATALOGUE["qwen3-8b"], Layout(tp=2))
    summed = {name: axes_ for name, axes_ in axes.items() if axes_}
    assert summed == {
        "qkv.k": ("kv_replica",),
        "qkv.v": ("kv_replica",),  # shared where kv heads are fewer than ranks
        "q_norm": ("tp",),
        "k_norm": ("tp",),  # each rank saw its own heads only
    }


def test_partial_axes_with_sequence_parallelism() -> None:
    """Each rank sees its own tokens, so what is whole on every rank is partial over tp; what tp
    cuts is not."""
    axes = axes_of(CATALOGUE["gpt2"], Layout(tp=2, sequence_parallel=True))
    over_tp = {name for name, axes_ in axes.items() if "tp" in axes_}
    assert over_tp == {
        "positions",
        "norm1",
        "norm1_bias",
        "norm2",
        "norm2_bias",
        "out_bias",
        "down_bias",
        "norm",
        "norm_bias",
    }
    assert axes["qkv.k"] == axes["qkv_bias.v"] == ("kv_replica",)
    assert axes["embed"] == axes["out"] == axes["gate_up.up"] == axes["gate_up_bias.up"] == ()


@given(models(), st.integers(1, 2))
def test_units_hold_every_stored_parameter_once(config: ModelConfig, pp: int) -> None:
    specs = model_specs(config)
    grouped = units(specs)
    stored = [spec for spec in specs if spec.tied_to is None]
    assert [spec for group in grouped.values() for spec in group] == stored
    assert sum(spec.numel for spec in stored) == num_params(specs)
    blocks = [f"blocks.{i}" for i in range(config.num_layers)]
    positions = ["positions"] if config.positions == "learned" else []
    assert list(grouped) == ["embed", *positions, *blocks, "final"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("short", ["dp1", "pp2", "pp3.1f1b.m3", "pp2.interleaved.v2.m2"])
def test_stages_hold_every_unit_and_share_only_a_tied_embedding(short: str, tied: bool) -> None:
    config = ModelConfig("llama", 7, 8, 8, 2, 2, 4, 16, 16, tied=tied)
    layout = Layout.parse(short)
    held = [
        unit
        for stage in range(layout.pp)
        for unit in stage_units(config, layout, stage)
        if unit != "positions"
    ]
    expected = list(units(model_specs(config)))
    assert sorted(held) == sorted(expected + (["embed"] if tied and layout.pp > 1 else []))


def test_interleaved_stages_take_turns() -> None:
    config = ModelConfig("llama", 8, 8, 8, 2, 2, 4, 16, 16)
    layout = Layout.parse("pp2.interleaved.v2.m2")
    first = stage_units(config, layout, 0)
    assert {unit for unit in first if unit.startswith("blocks.")} == {
        f"blocks.{i}" for i in (0, 1, 4, 5)
    }
