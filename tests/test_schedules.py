"""Tables of pipelines: the orders written out and against PyTorch's own, what they keep, the proof
that each can run and that a broken one cannot, and tables as files."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples import examples
from shardwise.layout import Schedule
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.schedules import MOST_ACTIONS, pipeline_table
from shardwise.parallel.pipeline.table import Costs, Memory, Table, held_forwards, table_span
from shardwise.parallel.pipeline.table_csv import csv_text, read_cell, read_csv
from shardwise.parallel.pipeline.validate import validate
from shardwise.parallel.pipeline.zero_bubble import (
    POLICIES,
    Problem,
    Progress,
    numbered_actions,
    try_policy,
)

FIXED: list[Schedule] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
times = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0.01, 3)
costs = st.builds(Costs, st.floats(0.01, 3), times, times, times)


@st.composite
def tables(
    draw: st.DrawFn, names: Sequence[Schedule] = (*FIXED, "zb-auto"), most: int = 6
) -> Table:
    name = draw(st.sampled_from(list(names)))
    p = draw(st.integers(1, most))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    least = 2 * p - 1 if name == "zb-h2" else 1
    m = (
        p * draw(st.integers(1, 3))
        if name == "interleaved"
        else draw(st.integers(least, least + 2 * most))
    )
    memory = Memory(draw(st.floats(1, 3)) if name == "zb-auto" else None)
    return pipeline_table(name, p, m, chunks, draw(costs), memory)


def line(table: Table, rank: int) -> str:
    return " ".join(map(str, table.ranks[rank]))


def edited(table: Table, rank: int, actions: Sequence[Action]) -> Table:
    return replace(table, ranks=(*table.ranks[:rank], tuple(actions), *table.ranks[rank + 1 :]))


def of(text: str, placement: Sequence[int] | None = None) -> Table:
    """A table from lines of actions, a stage a rank unless said."""
    ranks = [[read_cell(cell, "here") for cell in row.split()] for row in text.split("\n")]
    num_microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Table(tuple(map(tuple, ranks)), tuple(placement or range(len(ranks))), num_microbatches)


# -- the orders

WRITTEN_OUT: list[tuple[Schedule, int, int, int, list[str]]] = [
    ("gpipe", 2, 3, 1, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
    ("1f1b", 3, 4, 1, ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                       "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"]),
    ("1f1b", 3, 1, 1, ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
    ("interleaved", 2, 2, 2, ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 "
        "1B1"]),
    ("zb-h1", 2, 3, 1, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 "
        "1W2"]),
    ("zb-h2", 2, 3, 1, ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 "
        "1W2"]),
    ("zb-auto", 1, 2, 1, ["0F0 0I0 0W0 0F1 0I1 0W1"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m", "v", "lines"), WRITTEN_OUT)
def test_whole_tables(name: Schedule, p: int, m: int, v: int, lines: list[str]) -> None:
    table = pipeline_table(name, p, m, v)
    assert [line(table, rank) for rank in range(p)] == lines
    assert table.placement == tuple(stage % p for stage in range(p * v))


def torch_schedules() -> Any:
    """PyTorch's own, which are private and may move."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not all(
        hasattr(schedules, name) for name in ("_Action", "_get_1f1b_rank_ops", "_validate_schedule")
    ):
        pytest.skip("this PyTorch has its schedules elsewhere")
    return schedules


@pytest.mark.parametrize(
    ("p", "v", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 3), (8, 3, 3), (3, 4, 1)]
)
def test_interleaved_has_the_order_of_megatron_and_pytorch(p: int, v: int, rounds: int) -> None:
    """PyTorch builds it step by step, with idle steps that are left out here."""
    schedules = torch_schedules()
    table = pipeline_table("interleaved", p, rounds * p, v)
    total = rounds * p * v
    for rank in range(p):
        warmup = min(total, (v - 1) * p + 2 * (p - 1 - rank))
        ops = schedules._get_1f1b_rank_ops(
            v,
            p,
            warmup,
            total - warmup,
            warmup,
            rank,
            lambda step, rank=rank: (step // p) % v * p + rank,
            lambda step, rank=rank, warmup=warmup: (v - 1 - (step - warmup) // p % v) * p + rank,
        )
        assert [str(op) for op in ops if op is not None] == line(table, rank).split()


@settings(max_examples=examples(50))
@given(st.integers(1, 8), st.integers(1, 36))
def test_memory_of_the_fixed_schedules(p: int, m: int) -> None:
    """Formulas of SC21 (Narayanan et al. 2021) for GPipe and 1F1B, of Korthikanti et al. 2022 for
    the first rank of an interleaved one, and table 2 of Qi et al. 2023 with its worker i - 1 here,
    where there are micro-batches enough."""
    mem_w = 0.3
    most = {name: pipeline_table(name, p, m).ranks for name in ("gpipe", "1f1b", "zb-h1")}
    assert [max(held_forwards(actions)) for actions in most["gpipe"]] == [m] * p
    assert [max(held_forwards(actions)) for actions in most["1f1b"]] == [
        min(p - i, m) for i in range(p)
    ]
    if m >= 2 * p:
        assert [max(held_forwards(each, mem_w)) for each in most["zb-h1"]] == pytest.approx(
            [p - i + i * mem_w for i in range(p)]
        )
    if m >= 4 * p:
        h2 = pipeline_table("zb-h2", p, m).ranks
        expected = [2 * (p - i) - 1 + 2 * i * mem_w for i in range(p)]
        assert [max(held_forwards(each, mem_w)) for each in h2] == pytest.approx(expected)
        assert max(max(held_forwards(each)) for each in h2) == 2 * p - 1
    for v in (2, 3):
        table = pipeline_table("interleaved", p, p * m, v)
        assert max(held_forwards(table.ranks[0])) == min(2 * (p - 1) + (v - 1) * p + 1, p * m * v)


# -- every schedule can run


@settings(max_examples=examples(150))
@given(tables())
def test_every_schedule_can_run(table: Table) -> None:
    validate(table)
    num_kinds = 3 if any(action.kind == "W" for action in table.ranks[0]) else 2
    assert sum(map(len, table.ranks)) == num_kinds * len(table.placement) * table.num_microbatches


@settings(max_examples=examples(80))
@given(st.integers(1, 7), st.integers(1, 20), costs, st.floats(0.15, 3), st.floats(0, 1))
def test_a_search_respects_its_memory_limit_and_beats_schedules_that_fit(
    p: int, m: int, costs: Costs, limit: float, mem_w: float
) -> None:
    """That of zb-h1 and zb-h2 is counted here by table 2 of their paper, at the peak of the fullest
    worker."""
    assume(limit * p >= 1)
    memory = Memory(limit, mem_w)
    table = pipeline_table("zb-auto", p, m, 1, costs, memory)
    validate(table, memory)
    rivals: list[tuple[Schedule, float]] = (
        [("zb-h1", p), ("zb-h2", 2 * p - 1)] if m >= 2 * p - 1 else [("zb-h1", p)]
    )
    for name, forwards in rivals:
        if forwards <= limit * p:
            assert table_span(table, costs) <= table_span(pipeline_table(name, p, m), costs) * (
                1 + 1e-9
            )


@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.integers(1, 12), costs, st.floats(1, 3), st.sampled_from(POLICIES))
def test_the_clock_of_a_search_never_underestimates(
    p: int, m: int, costs: Costs, limit: float, policy: Any
) -> None:
    """What it says of a table's longest span, a replay of that table does not exceed."""
    ranks: list[Progress] = try_policy(
        Problem(p, m, costs, limit * p, 0.28), policy, idle_limit=float("inf")
    )
    table = Table(
        tuple(tuple(numbered_actions(i, rank.done)) for i, rank in enumerate(ranks)),
        tuple(range(p)),
        m,
    )
    validate(table, Memory(limit))
    said = m * costs.microbatch + max(rank.idle for rank in ranks)
    assert table_span(table, costs) <= said * (1 + 1e-9)


def test_more_memory_reduces_the_bubble() -> None:
    case = Costs(15, 14, 9, 0.8)
    spans = [
        table_span(pipeline_table("zb-auto", 8, 40, 1, case, Memory(x)), case)
        for x in (0.5, 1, 1.5, 2)
    ]
    assert spans == sorted(spans, reverse=True) and len({round(span, 6) for span in spans}) == 4


def test_the_default_limit_of_a_search_is_that_of_1f1b() -> None:
    assert pipeline_table("zb-auto", 4, 8) == pipeline_table("zb-auto", 4, 8, memory=Memory(1))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "said"),
    [
        ("interleaved", 4, 6, 2, "a multiple of its 4 stages as micro-batches, not 6; 8 works"),
        ("interleaved", 4, 2, 2, "a multiple of its 4 stages as micro-batches, not 2; 4 works"),
        ("interleaved", 4, 8, 1, "interleaved cannot have 1 chunk per rank; 2 or more work"),
        ("1f1b", 4, 8, 2, "1f1b cannot have 2 chunks per rank; 1 works"),
        ("zb-h2", 4, 6, 1, "at least 2p - 1 micro-batches, not 6; 7 works"),
        ("gpipe", 0, 6, 1, "stages must be at least 1, not 0"),
        ("gpipe", 4, -1, 1, "micro-batches must be at least 1, not -1"),
        ("1f1b", 4, 8, 0, "chunks must be at least 1, not 0"),
        ("1f1b", 1000, MOST_ACTIONS, 1, "8,000,000,000 actions are too many; up to 4,000,000 work"),
        ("interleaved", 7, 10**400, 2, "actions are too many"),
        ("dualpipe", 4, 8, 1, "unknown schedule 'dualpipe'; known are gpipe, 1f1b, interleaved"),
    ],
)
def test_invalid_sizes_are_refused(name: Any, p: int, m: int, v: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        pipeline_table(name, p, m, v)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Costs(tf=-1), "tf must be 0, or from 1e-12 to 1e+12, not -1"),
        (lambda: Costs(tb=float("nan")), "tb must be 0, or from 1e-12 to 1e+12, not nan"),
        (lambda: Costs(tc=float("inf")), "tc must be 0, or from"),
        (lambda: Costs(tw=1e-320), "tw must be 0, or from"),
        (lambda: Costs(0, 0, 0, 1), "tf, tb and tw are all 0"),
        (lambda: Memory(0), "a memory limit must be above 0, not 0"),
        (lambda: Memory(float("nan")), "a memory limit must be above 0, not nan"),
        (lambda: Memory(1, 1.5), "held from I to W, must be 0 to 1, not 1.5"),
        (
            lambda: pipeline_table("zb-auto", 4, 8, memory=Memory(0.2)),
            "is 0.8 forwards, but every order needs at least 1; 0.25 works",
        ),
        (
            lambda: pipeline_table("zb-auto", 3, 8, memory=Memory(0.333)),
            "needs at least 1; 0.334 works",
        ),
    ],
)
def test_invalid_times_and_limits_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


# -- a broken table cannot


def runs(table: Table) -> bool:
    """The reference: whether every action of compute is there once, and all can be done in order,
    one at a time, each when the sets of what is done hold all that it needs, found by trying every
    rank over and over."""
    last = len(table.placement) - 1
    done: set[tuple[str, int, int]] = set()
    left = [list(actions) for actions in table.ranks]

    def ready(action: Action) -> bool:
        s = action.stage
        i = action.microbatch
        backward = (s == last or {("B", s + 1, i), ("I", s + 1, i)} & done) and ("F", s, i) in done
        return bool(
            {"F": s == 0 or ("F", s - 1, i) in done, "W": ("I", s, i) in done}.get(
                action.kind, backward
            )
        )

    while any(left):
        moved = False
        for actions in left:
            if actions and ready(actions[0]):
                action = actions.pop(0)
                done.add((action.kind, action.stage, action.microbatch))
                moved = True
        if not moved:
            return False
    return True


@settings(max_examples=examples(150))
@given(tables(most=4), st.data())
def test_a_swap_is_valid_exactly_when_it_runs(table: Table, data: st.DataObject) -> None:
    """Two actions of a rank change places, which may or may not leave an order that runs."""
    rank = data.draw(st.integers(0, len(table.ranks) - 1))
    actions = list(table.ranks[rank])
    first, second = sorted(
        data.draw(st.lists(st.integers(0, len(actions) - 1), min_size=2, max_size=2, unique=True))
    )
    actions[first], actions[second] = actions[second], actions[first]
    swapped = edited(table, rank, actions)
    if runs(swapped):
        validate(swapped)
    else:
        with pytest.raises(ValueError, match=r"is before|deadlock"):
            validate(swapped)


@settings(max_examples=examples(60))
@given(tables(most=4), st.randoms(use_true_random=False))
def test_a_missing_action_is_refused(table: Table, chance: random.Random) -> None:
    rank = chance.randrange(len(table.ranks))
    at = chance.randrange(len(table.ranks[rank]))
    dropped = table.ranks[rank][at]
    with pytest.raises(ValueError, match=rf"^rank {rank}\b.* (has no|has neither) .*\b{dropped}\b"):
        validate(edited(table, rank, [*table.ranks[rank][:at], *table.ranks[rank][at + 1 :]]))


@settings(max_examples=examples(60))
@given(tables(most=4), st.randoms(use_true_random=False))
def test_a_repeated_action_is_refused(table: Table, chance: random.Random) -> None:
    rank = chance.randrange(len(table.ranks))
    at = chance.randrange(len(table.ranks[rank]))
    to = chance.randrange(len(table.ranks[rank]) + 1)
    again = table.ranks[rank][at]
    later = max(to, at + (to <= at))
    earlier = min(to, at)
    said = (
        f"rank {rank}, position {later}: {again} appears again, after position {earlier}; it "
        f"must appear once"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        validate(edited(table, rank, [*table.ranks[rank][:to], again, *table.ranks[rank][to:]]))


@given(tables(["1f1b", "zb-h1", "interleaved"], most=4), st.randoms(use_true_random=False))
def test_an_action_on_another_rank_is_refused(table: Table, chance: random.Random) -> None:
    assume(len(table.ranks) > 1)
    rank, other = chance.sample(range(len(table.ranks)), 2)
    moved = chance.choice(table.ranks[rank])
    without = edited(table, rank, [action for action in table.ranks[rank] if action != moved])
    said = (
        f"rank {other}, position {len(table.ranks[other])}: {moved} is on the wrong rank; "
        f"stage {moved.stage} is on "
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(edited(without, other, [*table.ranks[other], moved]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "0F0 0B0 0W0\n1F0 1B0",
            "rank 0, position 1: 0B0 comes in addition to 0W0; a backward is either B, or I and W",
        ),
        (
            "0F0 0I0 0B0 0W0\n1F0 1B0",
            "rank 0, position 2: 0B0 comes in addition to 0I0; a backward is either B, or I and W",
        ),
        ("0F0 0I0\n1F0 1B0", "rank 0, position 1: 0I0 has no 0W0 on its rank; it needs one"),
        ("0F0 0W0\n1F0 1B0", "rank 0 has neither 0B0 nor 0I0: 0F0 has no backward"),
        ("0F0 0W0 0I0\n1F0 1B0", "rank 0, position 1: 0W0 is before 0I0, which is at position 2"),
        ("0B0 0F0\n1F0 1B0", "rank 0, position 0: 0B0 is before 0F0, which is at position 1"),
        ("0F0 0B0\n1B0", "rank 1 has no 1F0; every micro-batch must pass through every stage"),
        ("0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", None),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
            "deadlock: rank 0 waits at position 1, in 0B0, for 1B0, "
            "rank 1 waits at position 1, in 1F1, for 0F1; the awaited actions must come earlier",
        ),
        ("0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1", None),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0",
            "deadlock: rank 0 waits at position 1, in 0B0, for 1B0",
        ),
    ],
)
def test_errors_are_one_sentence(text: str, said: str | None) -> None:
    table = of(text)
    if said is None:
        validate(table)
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            validate(table)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            Action("GATHER", 0, unit="embed"),
            "rank 0, position 1: 0GATHERembed is not one of F, B, I, W",
        ),
        (
            Action("F", 0, 0, piece="embed"),
            "rank 0, position 1: 0F0:embed is not one of F, B, I, W",
        ),
        (
            Action("F", 2, 0),
            "rank 0, position 1: 2F0 has a stage that does not exist; stages are 0 to 1",
        ),
        (
            Action("F", 0, 5),
            "rank 0, position 1: 0F5 has a micro-batch that does not exist; micro-batches are 0 "
            "to 0",
        ),
    ],
)
def test_invalid_actions_are_refused(action: Action, said: str) -> None:
    table = of("0F0 0B0\n1F0 1B0")
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        validate(edited(table, 0, [table.ranks[0][0], action, table.ranks[0][1]]))


def test_a_table_over_its_memory_limit_is_refused() -> None:
    """1F1B on 4 stages holds 4 forwards on its first rank, interleaved with 2 chunks 11 chunks,
    which are 5.5."""
    for name, v, most, limit, said in (
        (
            "1f1b",
            1,
            4,
            3.96,
            "rank 0, position 3: 0F3 makes it hold 4 forwards, above the limit of 3.96; zb-auto "
            "stays within a limit",
        ),
        (
            "interleaved",
            2,
            5.5,
            5.4,
            "rank 0, position 10: 0F6 makes it hold 11 forwards, above the limit of 10.8",
        ),
    ):
        schedule: Any = name
        table = pipeline_table(schedule, 4, 8, v)
        validate(table, Memory(most / 4))
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            validate(table, Memory(limit / 4))


def test_a_share_is_held_from_i_to_w() -> None:
    """Rank 1 puts one W off: with an I that keeps a quarter it holds 3.25 at most of the 4 that
    rank 0 does, with one that keeps all the same 4."""
    table = Table(((), pipeline_table("zb-h1", 4, 8).ranks[1]), (0, 1), 8)
    assert [*held_forwards(table.ranks[1], 0.25)][:9] == [1, 2, 3, 2.25, 3.25, 2.5, 2.25, 3.25, 2.5]
    assert max(held_forwards(table.ranks[1])) == 4


# -- tables as files


@settings(max_examples=examples(60))
@given(table=tables())
def test_csv_round_trip(table: Table, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "table.csv"
    path.write_text(csv_text(table))
    assert read_csv(path) == table


@given(tables(most=4))
def test_csv_columns_are_steps(table: Table) -> None:
    """What a rank does in a step it can do with what others had done by the step before: what
    PyTorch's lockstep executor relies on. Checked with the reference above, on the table cut off at
    each column."""
    rows = [row.split(",") for row in csv_text(table).splitlines()]
    steps = max(map(len, rows))
    order = [row[step] for step in range(steps) for row in rows if step < len(row) and row[step]]
    assert sorted(order) == sorted(str(action) for actions in table.ranks for action in actions)
    one_rank = Table(
        (tuple(read_cell(cell, "") for cell in order),),
        (0,) * len(table.placement),
        table.num_microbatches,
    )
    assert runs(one_rank)
    for step in range(steps):
        column = [read_cell(row[step], "") for row in rows if step < len(row) and row[step]]
        pairs = {(action.kind, action.microbatch): action.stage for action in column}
        for action in column:
            neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
            assert action.kind == "W" or pairs.get((action.kind, action.microbatch)) != neighbour
    assert all(row[-1] for row in rows), "no step is written after the last action"


def test_csv_is_compatible_with_pytorch(tmp_path: Path) -> None:
    """With the parser of PyTorch's own `_load_csv`, its check of a whole schedule, and what its
    `_dump_csv` writes."""
    import csv

    schedules = torch_schedules()
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-auto", 1)):
        schedule: Any = name
        table = pipeline_table(schedule, 4, 8, v)
        (tmp_path / "ours.csv").write_text(csv_text(table))
        with open(tmp_path / "ours.csv", newline="") as file:
            loaded = {
                rank: [schedules._Action.from_str(cell) for cell in row]
                for rank, row in enumerate(csv.reader(file))
            }
        placement = schedules._validate_schedule(loaded, 4, len(table.placement), 8)
        assert placement == dict(enumerate(table.placement))
        with open(tmp_path / "theirs.csv", "w", newline="") as file:
            csv.writer(file).writerows(loaded[rank] for rank in range(4))
        assert read_csv(tmp_path / "theirs.csv") == table


def test_a_b_with_a_w_is_read_as_an_i(tmp_path: Path) -> None:
    """As PyTorch wrote zero-bubble schedules before it had I, and as papers do; other Bs stay."""
    path = tmp_path / "zb1p.csv"
    path.write_text("0F0,0F1,,2F0,2B0,2W0,2F1,2B1,2W1,0B0,0W0,0B1,0W1\n,1F0,1F1,,,,1B0,,,1B1\n")
    table = read_csv(path)
    assert line(table, 0) == "0F0 0F1 2F0 2I0 2W0 2F1 2I1 2W1 0I0 0W0 0I1 0W1"
    assert (line(table, 1), table.placement) == ("1F0 1F1 1B0 1B1", (0, 1, 0))
    validate(table)
    path.write_text("0F0,0I0,0B0,0W0\n")
    assert line(read_csv(path), 0) == "0F0 0I0 0B0 0W0", (
        "where an I is there too, the B is one too many"
    )


def test_stages_may_be_on_any_rank(tmp_path: Path) -> None:
    """A V: the first and the last stage share a rank."""
    path = tmp_path / "v.csv"
    path.write_text('\ufeff"0F0", ,3F0 ,3B0,,0B0\r\n,1F0,2F0,,2B0,1B0\r\n\n', encoding="utf-8")
    table = read_csv(path)
    assert (table.placement, table.chunks) == ((0, 1, 1, 0), 2)
    validate(table)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 is empty; a schedule has one line per rank"),
        ("0F0,0B0\n,,\n2F0,2B0", "line 2 is empty"),
        (
            "0F0,0SEND_F0,0B0",
            "cell 2: 0SEND_F0 belongs to a schedule that PyTorch has lowered; write it with F, B, "
            "I "
            'and W only (`_dump_csv(file, format="compute_only")`)',
        ),
        ("0UNSHARD,0F0", "cell 1: 0UNSHARD belongs to a schedule that PyTorch has lowered"),
        (
            "0F0,(0F1;1B0)OVERLAP_F_B",
            "cell 2: (0F1;1B0)OVERLAP_F_B is two actions at a time; write one after the",
        ),
        (
            "0F0,hello",
            "line 1, cell 2: 'hello' is not an action; write stage, kind (F, B, I or W) and "
            "micro-batch, such as 1W2",
        ),
        ("0F", "'0F' is not an action"),
        ("F0", "'F0' is not an action"),
        ("0F0;0B0", "'0F0;0B0' is not an action"),
        ("0F\u0663", "is not an action"),
        ("0F99999999999999999999", "is not an action"),
        ("0F0,0B0\n2F0,2B0", "has stage 2 but no stage 1; number stages from 0"),
        ("9999999F0,9999999B0", "has stage 9999999 but no stage 0; number stages from 0"),
    ],
)
def test_invalid_csv_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(said)}"):
        read_csv(path)


def test_binary_csv_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="is not an action"):
        read_csv(tmp_path / "bytes.csv")


def test_an_incomplete_csv_file_is_refused(tmp_path: Path) -> None:
    """A micro-batch of a high number leaves those below it out; a stage on two ranks is on the
    wrong one."""
    (tmp_path / "gap.csv").write_text("0F9999999,0B9999999")
    with pytest.raises(ValueError, match="rank 0 has no 0F0"):
        validate(read_csv(tmp_path / "gap.csv"))
    (tmp_path / "two.csv").write_text("0F0,0B0\n0F1,0B1")
    with pytest.raises(
        ValueError, match="rank 1, position 0: 0F1 is on the wrong rank; stage 0 is on rank 0"
    ):
        validate(read_csv(tmp_path / "two.csv"))


def test_a_search_numbers_actions_in_order() -> None:
    """Each kind takes the micro-batches in turn, so that every stage agrees on which is the next to
    come."""
    table = pipeline_table("zb-auto", 6, 12, 1, Costs(1, 1.2, 0.7, 0.1), Memory(1.4))
    for actions in table.ranks:
        for kind in "FIW":
            assert [action.microbatch for action in actions if action.kind == kind] == [*range(12)]
