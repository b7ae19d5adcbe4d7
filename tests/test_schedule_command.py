"""`shardwise schedule`: its numbers, its pictures, its files, and the sentence for every
mistake."""

import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.cli import main
from shardwise.parallel.pipeline.schedules import pipeline_table
from shardwise.parallel.pipeline.table import Costs, Memory, Table
from shardwise.plan.simulate import Timeline, simulate
from shardwise.plan.svg import COLOURS, LEFT, PLOT_WIDTH, draw_timelines, round_ticks, shade
from shardwise.plan.terminal import IDLE, MOST_ROWS, picture, print_timeline

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZES = ["--stages", "4", "--microbatches", "8"]
PICTURES = {
    "gpipe": [],
    "1f1b": [],
    "interleaved": ["--chunks", "2"],
    "zb-h1": [],
    "zb-h2": [],
    "zb-auto": ["--tw", "0.6", "--tc", "0.1", "--mem-limit", "1.5"],
}
SVG = "{http://www.w3.org/2000/svg}"


def answer_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["schedule", *argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    answer: dict[str, Any] = json.loads(captured.out)
    return answer


def text_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["schedule", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def timeline_of(name: Any, p: int, m: int, chunks: int = 1) -> Timeline:
    return simulate(pipeline_table(name, p, m, chunks), Costs().seconds(chunks))


# -- numbers


def test_json_of_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    """With unlike times: the bubble is (p - 1) / m of the work of 8 x 6.5."""
    assert answer_of(capsys, "1f1b", *SIZES, "--tf", "2", "--tb", "1.5", "--tw", "3") == {
        "bubble_fraction": pytest.approx(3 / 11),
        "idle_fraction": pytest.approx(3 / 11),
        "bubble_over_ideal": pytest.approx(3 / 8),
        "makespan": pytest.approx(11 * 6.5),
        "peak_in_flight": [4, 3, 2, 1],
        "actions": [
            [str(action) for action in actions] for actions in pipeline_table("1f1b", 4, 8).ranks
        ],
    }


def test_every_flag_has_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B takes (m + p - 1)(tf + tb + tw), and longer with transfers; a search finds less the more
    memory it has."""

    def bubble(*flags: str) -> float:
        unlike = ["--tf", "15", "--tb", "14", "--tw", "9", "--tc", "0.8"]
        argv = ["zb-auto", "--stages", "8", "--microbatches", "24", *unlike, *flags]
        return float(answer_of(capsys, *argv)["bubble_fraction"])

    for flag in ("--tf", "--tb", "--tw"):
        assert answer_of(capsys, "1f1b", *SIZES, flag, "3")["makespan"] == (8 + 3) * 5
    assert answer_of(capsys, "1f1b", *SIZES, "--tc", "0.5")["makespan"] > (8 + 3) * 3
    assert bubble("--mem-limit", "2") < bubble("--mem-limit", "1.5") < bubble()
    assert bubble("--mem-limit", "1.5", "--mem-w", "0.28") == bubble("--mem-limit", "1.5")
    assert bubble("--mem-limit", "1.5") < bubble("--mem-limit", "1.5", "--mem-w", "1")
    chunks = answer_of(capsys, "interleaved", *SIZES, "--chunks", "2")
    assert chunks["bubble_over_ideal"] == pytest.approx(3 / 8 / 2)
    assert chunks["peak_in_flight"][0] == 11


@pytest.mark.parametrize("name", PICTURES)
def test_written_tables_are_read_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With chunks and transfers; the stages and micro-batches are in the file, and may be said
    again."""
    file = str(tmp_path / "mine.csv")
    costs = ["--tf", "1.3", "--tc", "0.2"]
    chunks = ["--chunks", "2"] if name == "interleaved" else []
    written = answer_of(capsys, name, *SIZES, *chunks, *costs, "--csv", file)
    assert answer_of(capsys, file, *costs) == written
    assert answer_of(capsys, file, *SIZES, *chunks, *costs) == written


# -- pictures


def bars(svg: str) -> list[tuple[str, float, float, float]]:
    """(colour, x, y, width) of every action drawn."""
    found = []
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        for x, y, width in re.findall(
            r"M([\d.]+) ([\d.]+)h([\d.]+)v[\d.]+h-[\d.]+z", path.attrib["d"]
        ):
            found.append((path.attrib["class"], float(x), float(y), float(width)))
    return found


@pytest.mark.parametrize(
    ("name", "p", "m", "chunks"),
    [("1f1b", 4, 8, 1), ("interleaved", 4, 8, 3), ("zb-h1", 8, 24, 1), ("zb-h1", 32, 128, 1)],
)
def test_svg_has_every_action_to_scale(name: str, p: int, m: int, chunks: int) -> None:
    timeline = timeline_of(name, p, m, chunks)
    svg = draw_timelines("a < b", [("c & d", timeline)], "s")
    drawn = bars(svg)
    scale = PLOT_WIDTH / timeline.makespan
    by_row = {
        y: sorted(x for _, x, at, _ in drawn if at == y)
        for y in sorted({y for _, _, y, _ in drawn})
    }
    assert len(by_row) == p
    for starts, xs in zip(timeline.starts, by_row.values(), strict=True):
        assert xs == pytest.approx([LEFT + start * scale for start in starts], abs=0.06)
    kinds = {colour[0] for colour, *_ in drawn}
    most = {
        kind: max(width for colour, _, _, width in drawn if colour[0] == kind) for kind in kinds
    }
    for kind, width in most.items():
        whole = {"F": 1, "B": 2, "I": 1, "W": 1}[kind] / chunks * scale
        assert max(0.7 * whole, whole - 0.9) <= width <= whole
    assert {colour for colour, *_ in drawn} == {
        f"{kind}{chunk}" for kind in most for chunk in range(chunks)
    }
    texts = [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"a < b", "c & d", "rank 0", "idle", "F forward", "time, in s", "0"} <= set(texts)
    numbers = [
        element.text
        for element in ET.fromstring(svg).iter(f"{SVG}text")
        if element.get("class") == "number"
    ]
    assert (len(numbers) == len(drawn)) == (p == 4)
    assert (len(numbers) == 0) == (p == 32), "no number where none fits"


def test_svg_of_a_large_schedule_stays_a_small_file() -> None:
    assert len(draw_timelines("", [("", timeline_of("zb-h1", 32, 128))], "s")) < 500_000


@pytest.mark.parametrize("end", [1e-9, 0.7, 1, 11.999, 12, 33, 1306.4, 9.99e11])
def test_ticks_are_round_and_few(end: float) -> None:
    ticks = round_ticks(end)
    assert ticks[0] == 0 and 5 <= len(ticks) <= 12
    assert ticks[-1] <= end * (1 + 1e-6) < ticks[-1] + ticks[1] * (1 + 1e-6)
    assert float(f"{ticks[1]:.2g}") == pytest.approx(ticks[1])


def test_earlier_chunks_are_paler() -> None:
    for kind, colour in COLOURS.items():
        shades = [shade(kind, chunk, 3) for chunk in range(3)]
        assert shades == sorted(shades, reverse=True) and shades[-1] == colour
        assert shade(kind, 0, 1) == colour


@pytest.mark.parametrize("name", PICTURES)
def test_documented_pictures_match_the_command(name: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert main(["schedule", name, *SIZES, *PICTURES[name], "--svg", str(file), "--json"]) == 0
    assert file.read_text() == (DOCS / "schedules" / f"{name}.svg").read_text()
    assert f"(schedules/{name}.svg)" in (DOCS / "schedules.md").read_text()


def test_the_documented_csv_file_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["1f1b", "--stages", "2", "--microbatches", "3", "--csv", str(tmp_path / "mine.csv")]
    text_of(capsys, *argv)
    shown = (tmp_path / "mine.csv").read_text()
    assert f"$ cat mine.csv\n{shown}" in (DOCS / "schedules.md").read_text()


def test_the_terminal_shows_time_to_scale() -> None:
    """A cell a unit of time: F of 1, B of 2; small letters for odd micro-batches, numbers where
    there is room."""
    timeline = timeline_of("1f1b", 2, 3)
    assert timeline.makespan == 12
    assert [picture(timeline, rank, 12, colour=False).plain for rank in range(2)] == [
        "Ff··BBFbb·BB",
        "·FBBfbbFBB··",
    ]
    wide = [picture(timeline, rank, 36, colour=False).plain for rank in range(2)]
    assert wide[0] == "F0Ff1f······BBB0BBF2Fbbb1bb···BBB2BB"
    assert wide[1] == "···F0FBBB0BBf1fbbb1bbF2FBBB2BB······"


def test_the_terminal_mixes_the_colours_of_a_cell() -> None:
    """A cell that is half forward and half idle is half way between their colours, one that is all
    forward its own."""
    timeline = timeline_of("gpipe", 2, 1)  # F0 of 1 on rank 0, idle for 3, B0 of 2
    text = picture(timeline, 0, 3, colour=True)
    styles = [str(span.style) for span in text.spans]
    assert text.plain == "   "
    half = "".join(f"{round((a + b) / 2):02x}" for a, b in zip(COLOURS["F"], IDLE, strict=True))
    plain = "".join(f"{part:02x}" for part in COLOURS["B"])
    assert styles[0].endswith(f"on #{half}") and styles[-1].endswith(f"on #{plain}")


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said = text_of(capsys, "zb-auto", *SIZES, "--tw", "0.6", "--mem-limit", "1.5", "--mem-w", "0.5")
    assert "zb-auto: 4 stages, 8 micro-batches, memory limit 1.5" in said
    words = " ".join(said.split())
    assert "F forward I gradient of the input W gradient of the weights · idle" in words
    assert (
        "bubble / total bubble / ideal idle / makespan makespan most in flight most held / limit"
        in words
    )
    assert re.search(
        r"\d / 6 The slowest rank takes [\d.]+ from its first action to its last and works 20.8 of",
        words,
    )
    assert len([line for line in said.splitlines() if re.match(r"[0-3] \S{50}", line)]) == 4
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_picture_is_as_wide_as_its_terminal(width: int) -> None:
    console = Console(
        width=width, force_terminal=True, color_system="truecolor", record=True, file=io.StringIO()
    )
    print_timeline(timeline_of("1f1b", 12, 30), "title", Memory(), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r" ?\d+ ", line)][:12]
    assert [int(row.split()[-1]) for row in rows] == [12 - rank for rank in range(12)], (
        "the column in flight"
    )


def test_the_first_and_last_of_many_ranks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    said = text_of(capsys, "gpipe", "--stages", "200", "--microbatches", "2")
    shown = [int(line.split()[0]) for line in said.splitlines() if re.match(r" *\d+ \S", line)]
    assert shown == [*range(MOST_ROWS // 2), *range(200 - MOST_ROWS // 2, 200)]
    assert "⋮" in said


def test_chunks_are_distinguishable(capsys: pytest.CaptureFixture[str]) -> None:
    said = text_of(capsys, "interleaved", *SIZES, "--chunks", "2", "--mem-limit", "2")
    assert re.search(r" 11 +5\.5 / 8\b", said), "11 chunks in flight are 5.5 stages, of 2 times 4"
    assert "interleaved: 4 stages, 8 micro-batches, 2 chunks per rank, memory limit 2" in said
    assert "In flight are forwards of a chunk" in " ".join(said.split())
    timeline = timeline_of("interleaved", 4, 8, 2)
    colours = {str(span.style) for span in picture(timeline, 0, 57, colour=True).spans}
    assert {colour.split("#")[-1] for colour in colours} >= {
        "".join(f"{part:02x}" for part in shade(kind, chunk, 2))
        for kind in "FB"
        for chunk in range(2)
    }


def test_stages_of_a_v_are_distinguishable() -> None:
    """The second of a rank's stages is its second chunk, wherever it is in the model."""
    v = Table((tuple(pipeline_table("1f1b", 1, 1).ranks[0]),), (0,), 1)
    assert {
        bar[0] for bar in bars(draw_timelines("", [("", simulate(v, lambda action: 1.0))], "s"))
    } == {"F0", "B0"}


# -- mistakes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gpip", *SIZES], "unknown schedule 'gpip'; did you mean gpipe?"),
        (
            ["hanayo", *SIZES],
            "unknown schedule 'hanayo'; schedules are gpipe, 1f1b, interleaved, zb-h1, zb-h2, "
            "zb-auto, .csv files and training runs",
        ),
        ([], "required: NAME"),
        (
            ["1f1b"],
            "1f1b needs --stages and --microbatches, for example --stages 4 --microbatches 8",
        ),
        (["1f1b", "--stages", "4"], "1f1b needs --stages and --microbatches"),
        (["1f1b", "--stages", "four", "--microbatches", "8"], "invalid int value: 'four'"),
        (["1f1b", "--stages", "-4", "--microbatches", "8"], "stages must be at least 1, not -4"),
        (
            ["1f1b", *SIZES, "--chunks", "2"],
            "1f1b cannot have 2 chunks per rank; 1 works, and interleaved has several",
        ),
        (["1f1b", *SIZES, "--chunks", "0"], "chunks must be at least 1, not 0"),
        (["interleaved", *SIZES], "interleaved cannot have 1 chunk per rank; 2 or more work"),
        (
            ["interleaved", "--stages", "4", "--microbatches", "6", "--chunks", "2"],
            "a multiple of its 4 stages as micro-batches, not 6; 8 works",
        ),
        (
            ["zb-h2", "--stages", "4", "--microbatches", "6"],
            "2p - 1 micro-batches, not 6; 7 works, or use zb-h1",
        ),
        (["gpipe", *SIZES, "--tf", "-1"], "tf must be 0, or from 1e-12 to 1e+12, not -1"),
        (["gpipe", *SIZES, "--tc", "nan"], "tc must be 0, or from"),
        (["gpipe", *SIZES, "--tf", "0", "--tb", "0", "--tw", "0"], "tf, tb and tw are all 0"),
        (
            ["zb-auto", *SIZES, "--mem-limit", "0.2"],
            "is 0.8 forwards, but every order needs at least 1; 0.25 works",
        ),
        (
            ["zb-auto", *SIZES, "--mem-limit", "inf"],
            "a memory limit must be above 0, not inf; 1 is what 1f1b needs",
        ),
        (["zb-h1", *SIZES, "--mem-w", "-0.1"], "held from I to W, must be 0 to 1, not -0.1"),
        (
            ["gpipe", *SIZES, "--mem-limit", "1.5"],
            "rank 0, position 6: 0F6 makes it hold 7 forwards, above the limit of 6; zb-auto "
            "stays within a limit",
        ),
        (
            ["gpipe", "--stages", "9999", "--microbatches", "9999"],
            "actions are too many; up to 4,000,000 work",
        ),
        (["missing.csv"], "missing.csv: No such file or directory"),
        (["gpipe", *SIZES, "--svg", "missing/a.svg"], "missing/a.svg: No such file or directory"),
        (["gpipe", *SIZES, "--csv", "."], ".: Is a directory"),
        (
            ["mine.csv", "--stages", "3"],
            "mine.csv has --stages 2, not 3; leave it out, or name another file",
        ),
        (["mine.csv", "--microbatches", "2"], "mine.csv has --microbatches 1, not 2"),
        (["mine.csv", "--chunks", "2"], "mine.csv has --chunks 1, not 2"),
        (
            ["mine.csv", "--mem-limit", "0.4"],
            "rank 0, position 0: 0F0 makes it hold 1 forwards, above the limit of 0.8",
        ),
        (["broken.csv"], "rank 1 has neither 1B0 nor 1I0: 1F0 has no backward"),
        (
            ["lowered.csv"],
            "lowered.csv, line 1, cell 2: 0SEND_F0 belongs to a schedule that PyTorch has lowered",
        ),
        (["folder.csv"], "folder.csv: Is a directory"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_mistake_is_one_sentence(
    argv: list[str],
    said: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,,,0B0\n,1F0,1B0\n")
    Path("broken.csv").write_text("0F0,,,0B0\n,1F0\n")
    Path("lowered.csv").write_text("0F0,0SEND_F0\n1RECV_F0,1F0\n")
    Path("folder.csv").mkdir()
    assert main(["schedule", *argv, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"shardwise: [^\n]+\n", captured.err)
    assert said in captured.err


def test_nothing_is_written_for_a_table_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.csv").write_text("0F0\n1F0,1B0\n")
    assert main(["schedule", "broken.csv", "--svg", "a.svg", "--csv", "a.csv"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["broken.csv"]


WITHOUT_TORCH = """
import sys
from shardwise.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "huggingface_hub", "tokenizers"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    "argv", [["--help"], ["zb-auto", *SIZES, "--svg", os.devnull], ["1f1b", *SIZES, "--json"]]
)
def test_it_runs_without_torch(argv: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "schedule", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_terminal_without_unicode_works() -> None:
    command = [sys.executable, "-m", "shardwise", "schedule", "1f1b", *SIZES]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "27.27%" in done.stdout and "1f1b: 4 stages" in done.stdout
