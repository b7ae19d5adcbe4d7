"""`shardwise bench`: speed and memory on this machine, all layouts on the same work; serving is in
bench_serve.py."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardwise.commands.bench_serve import FLAGS_OF_SERVE, add_serve_flags, run_bench_serve
from shardwise.commands.terminal import answer_console
from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.measure.train_step import Measured, Workload

MIB = 1 << 20
COMPARED = ("tokens_per_s", "peak_resident_mb")
DEFAULT_STEPS = 5
FLAGS_OF_TRAIN = ("length", "sequences", "steps")


@dataclass(frozen=True)
class Row:
    """One figure of one layout."""

    name: str
    value: float
    unit: str
    layout: str


def add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory on this machine",
        description="`shardwise bench train --layout L` times training steps of a 70.8 M Llama shape, or of MODEL, on "
        "random tokens: bf16 with fp32 master weights, AdamW, clipping. It starts the ranks of each "
        "layout on this machine, which share its cores evenly. `shardwise bench serve MODEL` asks a model for answers "
        "to random prompts. Figures of different machines or hours do not compare: name all layouts or loads at once. "
        "`make bench-train` and `make bench-serve`, in the source, run other software on the same work in turns.",
    )
    parser.add_argument(
        "what",
        choices=("train", "serve"),
        help="train: whole training steps; serve: requests under load",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a name, count, folder, file or hub id; of train the shape counts (default: a Llama shape of 70.8 M)",
    )
    parser.add_argument(
        "--layout",
        action="append",
        metavar="L",
        help="what to measure, for example dp2.z1; may be given many times, ratios are to the first (default: dp1)",
    )
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a sequence (default: 512)")
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="of each data rank and micro-batch of a step (default: 2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"timed, after 2 of warm-up (default: {DEFAULT_STEPS})",
    )
    add_serve_flags(parser)
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Exit codes are those of what is measured."""
    others, theirs = (
        (FLAGS_OF_TRAIN, "train") if args.what == "serve" else (FLAGS_OF_SERVE, "serve")
    )
    for name in others:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is a flag of `bench {theirs}`, not of `bench {args.what}`"
            )
    return run_bench_serve(args) if args.what == "serve" else run_bench_train(args)


def run_bench_train(args: argparse.Namespace) -> int:
    """Exit 0 when every layout was measured, 1 when a rank failed, 128 + its number when a signal
    stopped it."""
    from shardwise.measure.train_step import bench_layout, check_bench
    from shardwise.parallel.launch import RankFailed, Stopped, is_first_rank

    layouts = read_layouts(args.layout or ["dp1"])
    workload = find_workload(args.model, args.length, args.sequences)
    steps = DEFAULT_STEPS if args.steps is None else args.steps
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, not {steps}")
    for layout in layouts:
        check_bench(layout, workload)
    rows: list[Row] = []
    for number, layout in enumerate(layouts, start=1):
        if is_first_rank():
            print(f"shardwise: {layout}, {number} of {len(layouts)}", file=sys.stderr)
        try:
            measured = bench_layout(layout, steps, workload)
        except RankFailed as failure:
            print(failure, file=sys.stderr)
            if args.json:
                print(
                    json.dumps(
                        {
                            "rows": [asdict(row) for row in rows],
                            "ratios": {},
                            "failed": str(failure),
                        }
                    )
                )
            return 1
        except Stopped as stop:
            return 128 + stop.signal
        if measured.stopped:
            return 128 + measured.stopped
        rows += rows_of(str(layout), measured)
    if is_first_rank():
        tell(rows, ratios_of(rows), args.json)
    return 0


def read_layouts(texts: list[str]) -> list[Layout]:
    layouts = [Layout.parse(text) for text in texts]
    for layout in layouts:
        if layouts.count(layout) > 1:
            raise ValueError(f"layout {layout} is named twice; name it once")
    return layouts


def find_workload(model: str | None, length: int | None, sequences: int | None) -> "Workload":
    """What is named, and for the rest what is trained by default."""
    from shardwise.formats.catalogue import find_model
    from shardwise.measure.train_step import WORKLOAD, Workload

    for name, number in (("--length", length), ("--sequences", sequences)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    config = find_model(model).config if model else WORKLOAD.config
    return Workload(config, sequences or WORKLOAD.sequences, length or WORKLOAD.length)


def rows_of(layout: str, measured: "Measured") -> list[Row]:
    """Memory in MiB (2^20 bytes), as `mb` of a process is mostly meant."""
    figures = [
        ("tokens_per_s", measured.tokens_per_s, "tokens/s"),
        ("peak_resident_mb", measured.peak_resident_bytes / MIB, "MiB"),
        ("step_s", measured.step_s, "s"),
        ("comm_bytes", measured.comm_bytes, "bytes"),
        ("loss", measured.loss, "nats"),
    ]
    if measured.peak_gpu_bytes is not None:
        figures.append(("peak_gpu_mb", measured.peak_gpu_bytes / MIB, "MiB"))
    return [Row(name, value, unit, layout) for name, value, unit in figures]


def ratios_of(rows: list[Row]) -> dict[str, float]:
    """Of each later layout to the first, by `NAME LAYOUT/FIRST`."""
    values = {(row.layout, row.name): row.value for row in rows}
    first, *others = dict.fromkeys(row.layout for row in rows)
    return {
        f"{name} {layout}/{first}": values[layout, name] / values[first, name]
        for name in COMPARED
        for layout in others
    }


def tell(rows: list[Row], ratios: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratios": ratios}))
        return
    from rich.table import Table

    table = Table(
        "layout", *(f"{row.name}\n{row.unit}" for row in rows if row.layout == rows[0].layout)
    )
    for layout in dict.fromkeys(row.layout for row in rows):
        table.add_row(layout, *(f"{row.value:,.5g}" for row in rows if row.layout == layout))
    answer_console().print(table)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
