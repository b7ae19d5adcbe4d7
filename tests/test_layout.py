"""A layout's short form, its ranks, and the sentences about what cannot work."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.layout import Coord, Layout, nearest_divisor
from shardwise.params import stage_layers

sizes = st.integers(1, 6)
small = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any value that can be written down, whether or not it can work."""
    pp = draw(sizes)
    schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto"]
    return Layout(
        dp=draw(sizes),
        tp=draw(sizes),
        pp=pp,
        cp=draw(sizes),
        shard=draw(st.sampled_from(["none", "zero1", "zero2", "zero3", "fsdp"])),
        shard_group=draw(st.none() | sizes),
        schedule=draw(st.sampled_from(schedules if pp > 1 else [None, *schedules])),
        memory_limit=None,
        chunks=draw(sizes),
        layers=draw(st.none() | st.lists(sizes, min_size=1, max_size=8).map(tuple)),
        microbatches=draw(st.integers(1, 40)),
        sequence_parallel=draw(st.booleans()),
        all_to_all=draw(st.booleans()),
        keep=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )


limits = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)


@given(layouts(), limits | st.none())
def test_short_form_round_trips(layout: Layout, limit: float | None) -> None:
    if limit is not None and layout.pp > 1:
        layout = replace(layout, schedule="zb-auto", memory_limit=limit)
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


@given(layouts(), st.randoms(use_true_random=False))
def test_parts_are_read_in_any_order(layout: Layout, chance: random.Random) -> None:
    words = str(layout).split(".")
    chance.shuffle(words)
    assert Layout.parse(".".join(words)) == layout


@pytest.mark.parametrize(
    ("layout", "short"),
    [
        (Layout(), "dp1"),
        (Layout(shard="zero1"), "dp1.z1"),
        (Layout(dp=2, tp=2, pp=2, shard="zero1", microbatches=8), "dp2.tp2.pp2.z1.1f1b.m8"),
        (Layout(pp=4, schedule="zb-auto", memory_limit=1.5, microbatches=8), "pp4.zb-auto@1.5.m8"),
        (Layout(pp=2, schedule="interleaved", chunks=3, microbatches=4), "pp2.interleaved.v3.m4"),
        (Layout(pp=3, layers=(3, 4, 2), microbatches=4), "pp3.1f1b.l3-4-2.m4"),
        (Layout(dp=8, shard="zero3", shard_group=4, keep=True), "dp8.z3.s4.keep"),
        (
            Layout(tp=2, cp=2, sequence_parallel=True, all_to_all=True, recompute="full"),
            "tp2.cp2.sp.a2a.rc-full",
        ),
    ],
)
def test_short_form_as_documented(layout: Layout, short: str) -> None:
    assert str(layout) == short
    assert Layout.parse(short) == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a part of a layout"),
        ("dp2.", "not a part of a layout"),
        ("dp2..tp2", "not a part of a layout"),
        ("dp2,tp2", "'dp2,tp2'"),
        ("dp2.tpx", "'tpx'"),
        ("dp2.zero1", "'zero1'"),
        ("DP2", "'DP2'"),
        ("dp2.dp4", "sets dp twice"),
        ("dp2.z1.z2", "sets shard twice"),
        ("dp0", "at least 1"),
        ("dp10000000000.z1.s3", "dp must be at most 10000000"),
        ("dp10000.tp10000", "100000000 ranks are too many; at most 10000000 work"),
        ("pp2.m100000000", "microbatches must be at most 10000000"),
        ("pp2.zb-auto@0", "above 0"),
        ("pp2.1f1b@", "'1f1b@'"),
        ("pp2.1f1b.l3-", "'l3-'"),
        ("pp2.1f1b.l3-0", "every stage needs at least 1 layer, not 3-0"),
    ],
)
def test_bad_text_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Layout.parse(text)


def test_bad_values_are_refused() -> None:
    for field, value in (
        ("dp", 0),
        ("tp", 1.5),
        ("shard", "zero4"),
        ("schedule", "2f2b"),
        ("recompute", "some"),
    ):
        with pytest.raises(ValueError, match=field):
            Layout(**{field: value})


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_nearest_divisor(of: int, number: int) -> None:
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    assert nearest_divisor(of, number) == min(divisors, key=lambda d: (abs(d - number), d))


@given(sizes, sizes, sizes, sizes)
def test_ranks_and_coords_are_a_bijection(dp: int, tp: int, pp: int, cp: int) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    coords = [layout.coord(rank) for rank in range(layout.world_size)]
    assert coords == [
        Coord(d, t, p, c) for p, d, c, t in product(range(pp), range(dp), range(cp), range(tp))
    ]
    assert [layout.rank(coord) for coord in coords] == list(range(layout.world_size))


@given(small, small, small, small, st.data())
def test_every_axis_partitions_the_world(
    dp: int, tp: int, pp: int, cp: int, data: st.DataObject
) -> None:
    groups = [size for size in range(1, dp * cp + 1) if dp * cp % size == 0]
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, shard="zero2", shard_group=data.draw(st.sampled_from(groups))
    )
    sizes_of = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "data": dp * cp,
        "shard": layout.shard_size,
        "replicate": dp * cp // layout.shard_size,
        "world": layout.world_size,
    }
    for axis, size in sizes_of.items():
        groups_of_axis = set()
        for rank in range(layout.world_size):
            ranks = layout.ranks(axis, layout.coord(rank))  # type: ignore[arg-type]
            assert rank in ranks
            assert len(ranks) == size
            groups_of_axis.add(ranks)
        assert sorted(rank for ranks in groups_of_axis for rank in ranks) == list(
            range(layout.world_size)
        )


def test_a_shard_group_and_its_replicas_meet_in_one_rank() -> None:
    layout = Layout(dp=4, cp=2, tp=2, shard="zero3", shard_group=4)
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        shard = layout.ranks("shard", coord)
        replicate = layout.ranks("replicate", coord)
        assert set(shard) & set(replicate) == {rank}
        assert {
            other for each in replicate for other in layout.ranks("shard", layout.coord(each))
        } == set(layout.ranks("data", coord))


@given(st.integers(1, 200), sizes, sizes)
def test_stages_share_the_layers(num_layers: int, pp: int, chunks: int) -> None:
    assume(num_layers >= pp * chunks)
    stages = Layout(pp=pp, chunks=chunks).stage_layers(num_layers)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert len(lengths) == pp * chunks
    assert max(lengths) - min(lengths) <= 1
    of_rank = [sum(lengths[rank::pp]) for rank in range(pp)]
    assert of_rank == sorted(of_rank), "the later take what is over"


@given(st.integers(1, 10), st.integers(1, 3), st.integers(1, 2), st.floats(0, 5), st.floats(0, 5))
def test_no_other_shares_leave_the_busiest_rank_less_work(
    num_layers: int, pp: int, chunks: int, first: float, last: float
) -> None:
    """Against all ways there are to share the layers out."""
    stages = pp * chunks
    assume(stages <= num_layers)

    def most(lengths: Sequence[int]) -> float:
        work = [*lengths]
        work[0] += first  # type: ignore[call-overload]
        work[-1] += last  # type: ignore[call-overload]
        return max(sum(work[rank::pp]) for rank in range(pp))

    found = [
        len(each) for each in Layout(pp=pp, chunks=chunks).stage_layers(num_layers, first, last)
    ]
    cuts = combinations(range(1, num_layers), stages - 1)
    ways = [[b - a for a, b in pairwise((0, *cut, num_layers))] for cut in cuts]
    assert found in ways
    assert most(found) == pytest.approx(min(map(most, ways)))


def test_embedding_and_head_count_as_work() -> None:
    """The head of SmolLM2 is as much work as 8 of its 30 blocks, that of Llama 3.1 405B as two
    thirds."""
    shared = {
        ("smollm2-135m", "pp2.1f1b"): [19, 11],
        ("smollm2-135m", "pp2.1f1b.l10-20"): [10, 20],
        ("llama-3.1-70b", "pp4.1f1b"): [20, 20, 21, 19],
        ("llama-3.1-405b", "pp16.1f1b"): [7, *[8] * 14, 7],
    }
    for (model, short), lengths in shared.items():
        assert [
            len(each) for each in stage_layers(CATALOGUE[model], Layout.parse(short))
        ] == lengths


def small_model(heads: int, kv_heads: int, layers: int) -> ModelConfig:
    return ModelConfig("llama", layers, 8 * heads, 16, heads, kv_heads, 8, 32, 64)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 6))
    return small_model(kv_heads * draw(st.integers(1, 6)), kv_heads, draw(st.integers(1, 12)))


WORKS = re.compile(r"\b(tp|pp|m|s|v)(\d+)(?: without chunks)? works")
FIELDS = {"tp": "tp", "pp": "pp", "m": "microbatches", "s": "shard_group", "v": "chunks"}


@given(layouts(), models())
def test_what_is_said_to_work_has_no_such_problem(layout: Layout, model: ModelConfig) -> None:
    for problem in layout.problems(model):
        suggestion = WORKS.search(problem)
        if suggestion is None:
            continue
        change: dict[str, object] = {FIELDS[suggestion[1]]: int(suggestion[2])}
        if "without chunks" in problem:
            change |= {"chunks": 1, "schedule": "1f1b"}
        better = replace(layout, **change)  # type: ignore[arg-type]
        kind = re.sub(r"\d+", "#", problem)
        assert kind not in {re.sub(r"\d+", "#", other) for other in better.problems(model)}, (
            layout,
            problem,
        )


@pytest.mark.parametrize(
    ("text", "model", "sentence"),
    [
        (
            "tp2",
            "smollm2-135m",
            "tp2 does not divide 9 heads with 3 kv heads evenly; tp1 works (1, 3, 9 do)",
        ),
        ("tp3", "smollm2-135m", None),
        ("tp9", "smollm2-135m", None),  # 3 kv heads on 9 ranks: each is held by three
        ("tp16", "llama-3.1-8b", None),
        ("tp7", "llama-3.1-8b", "tp8 works"),
        ("pp2.1f1b.l10-10", "smollm2-135m", "l10-10 makes 20 layers, not 30; l15-15 works"),
        (
            "pp2.1f1b.l10-10-10",
            "smollm2-135m",
            "l10-10-10 is for 3 stages, not 2; leave it out, or name 2",
        ),
        ("l30", "smollm2-135m", "l30 divides layers among stages; leave it out, or add pp2"),
        ("pp40", "llama-3.1-8b", "40 stages are more than 32 layers; pp32 works"),
        ("pp8.interleaved.v5.m8", "llama-3.1-8b", "v4 works"),
        ("pp8.interleaved.v2.m12", "llama-3.1-8b", "not m12; m16 works"),
        ("pp8.zb-h2.m8", "llama-3.1-8b", "m15 works"),
        ("pp2.fsdp", "llama-3.1-8b", "z3 in its place works"),
        ("dp6.z1.s4", "llama-3.1-8b", "s3 works"),
        ("dp2.s2", "llama-3.1-8b", "add z1, z2 or z3"),
        ("cp4.tp4.a2a", "llama-3.1-8b", "the ring (no a2a) works"),
        ("dp2.1f1b", "llama-3.1-8b", "needs pp of at least 2"),
        ("dp2.z2.keep", "llama-3.1-8b", "add z3"),
        ("dp2.sp", "llama-3.1-8b", "add tp2"),
        ("dp2.a2a", "llama-3.1-8b", "add cp2"),
        ("pp2.v2", "llama-3.1-8b", "interleaved.v2"),
        ("pp2.1f1b@2", "llama-3.1-8b", "belongs to zb-auto"),
    ],
)
def test_problems_say_what_works(text: str, model: str, sentence: str | None) -> None:
    problems = Layout.parse(text).problems(CATALOGUE[model])
    if sentence is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert sentence in problems[0]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("dp2,tp2", "dp2.tp2"), ("dp2 tp2", "dp2.tp2"), ("dp2xtp4", "dp2.tp4"),
        ("dp2-tp2", "dp2.tp2"), ("DP2.TP2", "dp2.tp2"), ("d2", "dp2"), ("d2.t2.p2", "dp2.tp2.pp2"),
        ("dp4.zero3", "dp4.z3"), ("dp4_stage2", "dp4.z2"), ("dp4.fsdp2", "dp4.fsdp"),
        ("pp2.zb-h1.m4,tp2", "pp2.zb-h1.m4.tp2"),
    ],
)  # fmt: skip
def test_a_likely_layout_is_proposed(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"; did you mean {re.escape(meant)}\?$"):
        Layout.parse(text)
    Layout.parse(meant)


@pytest.mark.parametrize("text", ["tp3x", "q", "dp2..tp2", "", "dp0", "ddp8"])
def test_parts_are_listed_where_no_layout_is_likely(text: str) -> None:
    with pytest.raises(ValueError, match="layout") as refused:
        Layout.parse(text)
    assert "did you mean" not in str(refused.value)
