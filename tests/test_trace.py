"""What a run writes down of a step: all of it, in order, and as a timeline what a clock would have
said. And runs by a schedule of their own."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from ranks import Ranks
from shardwise.cli import main
from shardwise.layout import Layout, Schedule
from shardwise.parallel.launch import Place
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.schedules import pipeline_table, step_table
from shardwise.parallel.pipeline.table import Table, needed
from shardwise.parallel.pipeline.table_csv import csv_text
from shardwise.plan.measured import Event, StepTrace, mean_seconds, measured_timeline, read_trace
from shardwise.plan.simulate import Timeline, simulate
from shardwise.train.rank import train
from shardwise.train.settings import Settings
from shardwise.train.validate import validated_run
from tiny_training import build_data, tiny_settings

CPU = torch.device("cpu")
COMPUTE = ("F", "B", "I", "W")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def train_on(rank: int, world: int, settings: Settings) -> None:
    train(Place(rank, world, CPU), validated_run(settings), 0)


def trained(ranks: Ranks, data: Path, run: Path, layout: str, **changes: Any) -> Path:
    """The folder of a run of three steps."""
    run.mkdir(exist_ok=True)
    changes = {"steps": 3, "eval_every": 0, "save_every": 0, "num_layers": 5} | changes
    ranks.run(
        Layout.parse(layout).world_size,
        train_on,
        tiny_settings(data, run, layout=layout, **changes),
    )
    return run


# -- events to a timeline


def as_events(timeline: Timeline, layout: Layout) -> Iterator[Event]:
    """Each action in two pieces, the first of which begins when the rank is free and waits for the
    input."""
    for rank, actions in zip(
        layout.ranks("pp", layout.coord(0)), timeline.table.ranks, strict=True
    ):
        at = layout.coord(rank).pp
        free = 0.0
        for action, start, end in zip(actions, timeline.starts[at], timeline.ends[at], strict=True):
            args = {"stage": action.stage, "microbatch": action.microbatch}
            half = (start + end) / 2
            for name, cat, begin, stop in (
                ("first", action.kind, free, half),
                ("wait pp", "wait", free, start),
                ("last", action.kind, half, end),
                ("wait tp", "wait", half, end),
            ):
                yield {
                    "name": name,
                    "cat": cat,
                    "ph": "X",
                    "ts": 1e6 * begin,
                    "dur": 1e6 * (stop - begin),
                    "pid": rank,
                    "tid": 0,
                    "args": args,
                }
            free = end


@settings(max_examples=examples(60))
@given(
    st.sampled_from([name for name in get_args(Schedule) if name != "zb-h2"]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.floats(0.1, 4),
    st.floats(0.1, 4),
    st.randoms(use_true_random=False),
)
def test_a_trace_round_trip(
    name: Any, p: int, k: int, dp: int, tp: int, tf: float, tb: float, random: Any
) -> None:
    """Whatever else there is between, in whatever order the file has it, and on ranks of other
    pipelines."""
    chunks = 2 if name == "interleaved" else 1
    table = pipeline_table(name, p, p * k, chunks)
    seconds = {"F": tf, "B": 2 * tb, "I": tb, "W": tb}
    timeline = simulate(table, lambda action: seconds[action.kind] * (1 + action.stage % 2))
    layout = Layout(dp=dp, tp=tp, pp=p, schedule=name, chunks=chunks, microbatches=p * k)
    events = list(as_events(timeline, layout))
    first = set(layout.ranks("pp", layout.coord(0)))
    events += [
        {**event, "pid": other}
        for event in events[:9]
        for other in range(layout.world_size)
        if other not in first
    ]
    random.shuffle(events)
    found = measured_timeline(events, layout)
    assert found.table == table
    for here, there in zip(found.starts + found.ends, timeline.starts + timeline.ends, strict=True):
        assert here == pytest.approx(there, abs=1e-6)
    assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-6)
    predicted = StepTrace(layout, 1, found).predicted
    assert predicted.makespan == pytest.approx(timeline.makespan, rel=1e-6)


def test_varying_times_are_simulated_by_their_mean() -> None:
    """Of the same kind and stage: forwards of 1 and 3 count 2 each; the stage beside it has times
    of its own."""
    forwards = (Action("F", 0, 0), Action("F", 0, 1)), (Action("F", 1, 0), Action("F", 1, 1))
    timeline = Timeline(
        Table(forwards, (0, 1), 2), ((0.0, 1.0), (1.0, 5.0)), ((1.0, 4.0), (5.0, 5.5)), 4.5
    )
    seconds = mean_seconds(timeline)
    assert [seconds(Action("F", stage, 0)) for stage in (0, 1)] == pytest.approx([2.0, 2.25])


# -- real steps


@pytest.mark.parametrize(
    "short", ["pp2.zb-h1.m4", "pp2.interleaved.v2.m2", "dp2.pp2.z3.1f1b.m2.rc-full", "dp2.z1"]
)
def test_a_run_writes_the_trace_of_every_rank(
    ranks: Ranks, data: Path, tmp_path: Path, short: str
) -> None:
    """Each action of its table once and in order, one after another; what is waited for inside of
    what waits for it; and nobody begins before what it needs has ended."""
    layout = Layout.parse(short)
    run = trained(ranks, data, tmp_path / "run", short)
    path = run / "trace" / "step-3.json"
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    config = validated_run(tiny_settings(data, run, layout=short, num_layers=5)).config
    for rank in range(layout.world_size):
        mine = [
            event
            for event in events
            if event["pid"] == rank and event["cat"] not in ("wait", "step")
        ]
        table = step_table(config, layout, layout.coord(rank).pp, layout.microbatches)
        assert [event["name"] for event in mine] == [
            f"{a.kind}{a.microbatch} {a.piece or a.unit}" for a in table
        ]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(mine)), (
            "rounded to 0.1 microseconds"
        )
        steps = [
            event["name"] for event in events if event["pid"] == rank and event["cat"] == "step"
        ]
        assert steps == ["finish", "clip", "optimizer"]
    assert {event["name"] for event in events if event["cat"] == "wait"} >= {"wait world"}
    if layout.pp > 1:
        check_timeline(read_trace(path))
        assert len(ElementTree.parse(path.with_suffix(".svg")).getroot()) > 5
    assert (
        sorted(each.name for each in path.parent.iterdir())
        == ["step-3.json", "step-3.svg"][: 1 + (layout.pp > 1)]
    )


def check_timeline(traced: StepTrace) -> None:
    timeline = traced.measured
    ended = dict[Any, float]()
    table = pipeline_table(
        traced.layout.schedule, traced.layout.pp, traced.layout.microbatches, traced.layout.chunks
    )  # type: ignore[arg-type]
    assert timeline.table == table
    for actions, ends in zip(table.ranks, timeline.ends, strict=True):
        for action, end in zip(actions, ends, strict=True):
            if action.kind != "W":
                ended["F" if action.kind == "F" else "B", action.stage, action.microbatch] = end
    for actions, ends in zip(table.ranks, timeline.ends, strict=True):
        for action, end in zip(actions, ends, strict=True):
            source = needed(action, len(table.placement) - 1)
            assert source is None or ended[source] <= end, f"{action} ended before what it needs"
    for each in (timeline, traced.predicted):
        assert 0 <= each.bubble_fraction < 1 and each.work <= each.span + 1e-9


def test_the_command_shows_a_run(
    ranks: Ranks, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(ranks, data, tmp_path / "run", "pp2.1f1b.m4", steps=4)
    traced = read_trace(run / "trace" / "step-3.json")
    assert main(["schedule", str(run), "--json", "--svg", str(tmp_path / "a.svg")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == "pp2.1f1b.m4" and told["step"] == 3
    for name, timeline in (("measured", traced.measured), ("predicted", traced.predicted)):
        assert told[name]["bubble_fraction"] == timeline.bubble_fraction
        assert told[name]["makespan"] == timeline.makespan
        assert told[name]["actions"][1][:3] == ["1F0", "1B0", "1F1"]
    texts = [
        each.text or ""
        for each in ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    assert sum(text.startswith(("measured", "simulated")) for text in texts) == 2
    assert main(["schedule", str(run / "trace" / "step-3.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "measured" in out and "simulated with the same times" in out and traced.summary in out


def test_training_continues_without_a_trace(
    ranks: Ranks, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(ranks, data, tmp_path / "none", "pp2.1f1b.m4", trace_step=0)
    assert not (run / "trace").exists()
    run = tmp_path / "full"
    run.mkdir()
    (run / "trace").write_text("in the way")
    trained(ranks, data, run, "pp2.1f1b.m4")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "trace").read_text() == "in the way"


def train_on_disks_of_their_own(rank: int, world: int, settings: Settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(
                "shardwise.train.trace_writer.rank_path",
                lambda path, rank: path.with_name(f"elsewhere-{rank}"),
            )
        train_on(rank, world, settings)


def test_ranks_without_a_shared_disk_train(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The first rank has the actions of its own stage, of which no picture can be made."""
    ranks.run(
        2,
        train_on_disks_of_their_own,
        tiny_settings(
            data, tmp_path, layout="pp2.1f1b.m4", steps=4, eval_every=0, save_every=0, num_layers=5
        ),
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="lacks the actions of some stages"):
        read_trace(tmp_path / "trace" / "step-3.json")
    assert not (tmp_path / "trace" / "step-3.svg").exists()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": [], "otherData": {"layout": "pp2", "step": 1}}']
)
def test_a_file_that_is_not_a_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "empty").mkdir()
    for path in (write(tmp_path / "a.json", text), tmp_path / "empty"):
        assert main(["schedule", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and re.search("trace|JSON", err.partition(": ")[2])


# -- a schedule of one's own


def losses(run: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


OWN = {  # by the layout whose sizes it has
    "pp2.1f1b.m4": csv_text(pipeline_table("gpipe", 2, 4)),
    "pp2.1f1b.m2": "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1I1,1W1,1W0\n",
    "pp2.interleaved.v2.m2": "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
}


@pytest.mark.parametrize("short", OWN)
def test_a_run_takes_a_custom_schedule(
    ranks: Ranks, data: Path, tmp_path: Path, short: str
) -> None:
    """Which is executed, and computes what the layout's does: to the last bit but where Ws come in
    another order."""
    path = write(tmp_path / "own.csv", OWN[short])
    run = trained(ranks, data, tmp_path / "run", short, pipeline_table=str(path))
    usual = trained(ranks, data, tmp_path / "usual", short)
    for found, wanted in zip(losses(run), losses(usual), strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    told = [cell for line in OWN[short].splitlines() for cell in line.split(",") if cell]
    done = [
        str(action)
        for actions in read_trace(run / "trace" / "step-3.json").measured.table.ranks
        for action in actions
    ]
    assert done == told


@pytest.mark.parametrize(
    ("short", "text", "said"),
    [
        ("pp2.1f1b.m2", "0F0,0B0\n1F0,1B0\n", "has 1 micro-batches, but layout pp2.1f1b.m2 has 2"),
        ("pp2.1f1b.m1", "0F0,0B0\n1F0,1B0\n2F0,2B0\n", "has 3 ranks, but layout pp2.1f1b has 2"),
        (
            "pp2.1f1b.m1",
            "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n",
            "has 4 stages, but layout pp2.1f1b has 2",
        ),
        (
            "pp2.interleaved.v2.m2",
            "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,3F0,2F1,3F1,3B0,2B0,3B1,2B1\n",
            "stages on ranks (0, 0, 1, 1), but training has them on (0, 1, 0, 1)",
        ),
        ("pp2.1f1b.m1", "0F0,0B0\n1B0,1F0\n", "1B0 is before 1F0"),
        ("dp1", "0F0,0B0\n1F0,1B0\n", "has 2 ranks, but layout dp1 has 1"),
    ],
)
def test_a_custom_schedule_of_other_sizes_is_refused(
    data: Path, tmp_path: Path, short: str, text: str, said: str
) -> None:
    path = write(tmp_path / "own.csv", text)
    with pytest.raises(ValueError) as refused:
        validated_run(
            tiny_settings(
                data, tmp_path / "run", layout=short, pipeline_table=str(path), num_layers=5
            )
        )
    assert said in str(refused.value)
