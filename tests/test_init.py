"""Initial weights: the same model under every sharding, drawn block by block."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.layout import Layout
from shardwise.model import init
from shardwise.model.init import init_weights
from shardwise.params import Init, ParamSpec, Part, model_specs
from shardwise.shards import boxes, local_shape

SMALL = ModelConfig(
    "qwen3",
    2,
    48,
    80,
    6,
    3,
    8,
    101,
    64,
    qkv_bias=True,
    out_bias=True,
    qk_norm=True,
    positions="rope",
)  # 6 heads and 3 kv heads: tp of 2, 3 and 6 cut them, replicate them or both
GPT2 = ModelConfig(
    "gpt2",
    2,
    48,
    192,
    6,
    6,
    8,
    101,
    37,
    tied=True,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)

PINNED = [0.6101998, 0.2357273, 1.4622494, -2.2281172, 0.6251228]


def whole(spec: ParamSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return init_weights(spec, Layout(), Layout().coord(0), seed, dtype)


def matrix(
    rows: int, columns: int, name: str = "down", dims: tuple[str, str] = ("embed", "ffn")
) -> ParamSpec:
    return ParamSpec(name, (rows, columns), dims, Init("normal", 0.02), unit="blocks.0")


def assert_every_rank_has_its_slices(spec: ParamSpec, layout: Layout, seed: int) -> None:
    """Shards are bit-identical slices, with zeros in the padding."""
    expected = whole(spec, seed)
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        local = init_weights(spec, layout, coord, seed, torch.float32)
        wanted = torch.zeros(local_shape(spec, layout, coord))
        for box in boxes(spec, layout, coord):
            wanted[box.local_slices] = expected[box.slices]
        assert torch.equal(local, wanted), (spec.name, coord)


@pytest.mark.parametrize("config", [SMALL, GPT2], ids=["qwen3", "gpt2"])
@given(tp=st.sampled_from([1, 2, 3, 6]), block=st.integers(1, 6000), seed=st.integers(0, 2**63))
@settings(max_examples=examples(12))
def test_every_layout_starts_from_one_model(
    config: ModelConfig, tp: int, block: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK_ELEMENTS", block)  # so that small tensors have many blocks
        for spec in model_specs(config):
            assert_every_rank_has_its_slices(spec, Layout(tp=tp), seed)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    tp=st.integers(1, 9),
    block=st.integers(1, 500),
    dims=st.sampled_from([("embed", "ffn"), ("vocab", "embed"), ("ffn", "embed")]),
)
def test_any_shape_and_any_number_of_ranks(
    rows: int, columns: int, tp: int, block: int, dims: tuple[str, str]
) -> None:
    """Cases include more ranks than rows, uneven shards and empty ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK_ELEMENTS", block)
        assert_every_rank_has_its_slices(matrix(rows, columns, dims=dims), Layout(tp=tp), 5)


def test_shards_agree_for_the_real_block_size() -> None:
    qkv = (Part("q", "q_heads", 576), Part("k", "kv_heads", 192), Part("v", "kv_heads", 192))
    fused = ParamSpec(
        "blocks.0.qkv",
        (960, 576),
        ("fused", "embed"),
        Init("normal", 0.02),
        unit="blocks.0",
        parts=qkv,
        head_dim=64,
    )
    assert fused.numel > 2 * init.BLOCK_ELEMENTS
    for tp in (3, 9):
        assert_every_rank_has_its_slices(fused, Layout(tp=tp), 1)
    assert_every_rank_has_its_slices(matrix(576, 1536), Layout(tp=5), 1)


def test_ranks_of_other_axes_draw_the_same() -> None:
    spec = matrix(30, 20)
    layout = Layout(dp=2, tp=2, pp=2, cp=2, schedule="1f1b", microbatches=2)
    by_tp = {}
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        local = init_weights(spec, layout, coord, 0, torch.float32)
        assert torch.equal(by_tp.setdefault(coord.tp, local), local)


def test_seeds_names_and_blocks_differ() -> None:
    rows = 2 * init.BLOCK_ELEMENTS // 64 + 7
    drawn = [
        whole(matrix(rows, 64, name), seed)
        for name in ("blocks.1.down", "blocks.11.down")
        for seed in (0, 1)
    ]
    half = init.BLOCK_ELEMENTS // 64
    blocks = [block for each in drawn for block in (each[:half], each[half : 2 * half])]
    for i, first in enumerate(blocks):
        for second in blocks[:i]:
            assert (
                abs(float(torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]))
                < 0.01
            )
    assert torch.equal(whole(matrix(rows, 64, "blocks.1.down"), 0), drawn[0])


def test_seed_and_name_are_separated() -> None:
    """Seed 1 of `1/x` must not be seed 11 of `x`, and the like."""
    assert not torch.equal(whole(matrix(8, 8, "1/x"), 1), whole(matrix(8, 8, "x"), 11))
    assert not torch.equal(whole(matrix(8, 8, "x1"), 0), whole(matrix(8, 8, "x"), 0))


def test_distribution_follows_the_spec() -> None:
    """2^20 elements: mean and std within 5 standard errors, and the 4th moment of a normal
    distribution."""
    for std in (0.02, 0.02 / math.sqrt(60)):
        spec = ParamSpec(
            "blocks.3.out", (1024, 1024), ("embed", "q_heads"), Init("normal", std), unit="blocks.3"
        )
        x = whole(spec).double() / std
        count = x.numel()
        assert abs(x.mean()) < 5 / math.sqrt(count)
        assert abs(x.std() - 1) < 5 / math.sqrt(2 * count)
        assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / count)
        assert x.abs().max() < 7


def test_kinds_of_a_whole_model() -> None:
    """Matrices are normal, those that write into the residual smaller by sqrt(2 layers); norms are
    1, biases 0."""
    for spec in model_specs(SMALL):
        weights = whole(spec)
        assert weights.shape == spec.shape
        if len(spec.shape) == 1:
            assert torch.all(weights == (0.0 if spec.name.endswith("_bias") else 1.0)), spec.name
        else:
            std = (
                0.02 / math.sqrt(2 * SMALL.num_layers)
                if re.search(r"\.(out|down)$", spec.name)
                else 0.02
            )
            assert abs(weights.std() / std - 1) < 5 / math.sqrt(2 * spec.numel), spec.name


def test_dtype_is_the_rounded_fp32() -> None:
    spec = matrix(33, 17)
    assert torch.equal(whole(spec, dtype=torch.bfloat16), whole(spec).bfloat16())


def test_pinned_values() -> None:
    """A change of these values would change the model of every seed. The tolerance is 1e-6 of a
    standard deviation, since processors differ in the last bit of a logarithm."""
    spec = ParamSpec(
        "blocks.0.down", (576, 1536), ("embed", "ffn"), Init("normal", 1.0), unit="blocks.0"
    )
    weights = whole(spec, seed=1234)
    places = [(0, 0), (0, 1535), (169, 7), (170, 0), (575, 1535)]  # 170 rows a block
    torch.testing.assert_close(
        torch.stack([weights[at] for at in places]), torch.tensor(PINNED), rtol=0, atol=1e-6
    )


def count_drawn(spec: ParamSpec, layout: Layout, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The number of elements that the last rank draws, in all and at most at once."""
    sizes: list[int] = []
    randn = torch.randn

    def counting(*size: int, **options: object) -> Tensor:
        sizes.append(math.prod(size))
        return randn(*size, **options)

    with patch.context() as during:
        during.setattr(torch, "randn", counting)
        init_weights(spec, layout, layout.coord(layout.world_size - 1), 0, torch.float32)
    return sum(sizes), max(sizes, default=0)


def test_no_rank_draws_a_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank draws its shard of a matrix that is sharded by rows, rounded up to blocks at both ends
    of each part, and every row, one block at a time, of a matrix that is sharded by columns."""
    layout = Layout(tp=3)
    for spec in model_specs(CATALOGUE["smollm2-135m"])[:12]:
        in_all, at_once = count_drawn(spec, layout, monkeypatch)
        assert at_once <= init.BLOCK_ELEMENTS
        if spec.init.kind != "normal":
            assert in_all == 0
        elif spec.dims[1] == "embed":
            held = math.prod(local_shape(spec, layout, layout.coord(2)))
            assert in_all <= held + 2 * len(spec.all_parts) * init.BLOCK_ELEMENTS
        else:
            assert in_all <= spec.numel


def test_an_empty_shard_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = matrix(3, 5, dims=("vocab", "embed"))
    assert local_shape(spec, Layout(tp=4), Layout(tp=4).coord(3)) == (1, 5)
    assert count_drawn(spec, Layout(tp=4), monkeypatch) == (0, 0)
