"""`shardwise bench`: speed and memory on this machine, of training (here) and of serving
(bench_serve.py)."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.commands.bench_serve import add_bench_serve
from shardwise.commands.flags import add_flags, given_values
from shardwise.commands.terminal import log, print_rows, rows_json
from shardwise.layout import Layout
from shardwise.measure.rows import Row, ratios_to_first
from shardwise.measure.workload import StepSizes
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.measure.train_step import Measured, Workload

MIB = 1 << 20
COMPARED_LAYOUT_FIGURES = ("tokens_per_s", "peak_resident_mb")


def add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory on this machine",
        description="Measure training steps (`bench train`) or a server under load (`bench "
        "serve`). Results from different machines or times are not comparable; compare layouts or "
        "loads within one run. `make bench-train` and `make bench-serve`, in the source, measure "
        "other software on the same work.",
    )
    kinds = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    add_bench_train(kinds)
    add_bench_serve(kinds)


def add_bench_train(kinds: Any) -> None:
    parser = kinds.add_parser(
        "train",
        help="time whole training steps of one or more layouts",
        description="Time training steps of MODEL's shape on random tokens: bf16 with fp32 master "
        "weights, AdamW and gradient clipping. The ranks of each layout start on this machine and "
        "share its cores evenly.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a catalogue name, a parameter count, a folder, a .gguf file or a hub id; only its "
        "shape is used (default: a Llama of 70.8 million parameters)",
    )
    parser.add_argument(
        "--layout",
        action="append",
        metavar="L",
        help="layout to measure, for example dp2.z1; repeatable, ratios are to the first "
        "(default: dp1)",
    )
    add_flags(parser, StepSizes)
    parser.set_defaults(run=run_bench_train)


def run_bench_train(args: argparse.Namespace) -> int:
    """Exit 0 when every layout was measured, 1 when a rank failed, 128 + n after signal n."""
    from shardwise.measure.train_step import bench_layout, check_bench
    from shardwise.parallel.launch import RankFailed, Stopped, is_first_rank

    layouts = read_layouts(args.layout or ["dp1"])
    sizes = given_values(args, StepSizes)
    steps = StepSizes(**sizes).steps
    workload = find_workload(args.model, sizes.get("length"), sizes.get("sequences"))
    for layout in layouts:
        check_bench(layout, workload)
    rows: list[Row] = []
    for number, layout in enumerate(layouts, start=1):
        if is_first_rank():
            log(f"{layout}, {number} of {len(layouts)}")
        try:
            measured = bench_layout(layout, steps, workload)
        except RankFailed as failure:
            log(str(failure))
            if args.json:
                failed = rows_json(rows, {}, "layout") | {"failed": str(failure)}
                print(json_text(failed))
            return 1
        except Stopped as stop:
            return 128 + stop.signal
        if measured.stopped:
            return 128 + measured.stopped
        rows += layout_rows(str(layout), measured)
    if is_first_rank():
        print_rows(rows, ratios_to_first(rows, COMPARED_LAYOUT_FIGURES), "layout", args.json)
    return 0


def read_layouts(texts: list[str]) -> list[Layout]:
    layouts = [Layout.parse(text) for text in texts]
    for layout in layouts:
        if layouts.count(layout) > 1:
            raise ValueError(f"layout {layout} is named twice; name it once")
    return layouts


def find_workload(model: str | None, length: int | None, sequences: int | None) -> "Workload":
    """Return the default workload with the values that were given; None for the default's own."""
    from shardwise.formats.catalogue import find_model
    from shardwise.measure.train_step import WORKLOAD

    return replace(
        WORKLOAD,
        config=find_model(model).config if model else WORKLOAD.config,
        length=WORKLOAD.length if length is None else length,
        sequences=WORKLOAD.sequences if sequences is None else sequences,
    )


def layout_rows(layout: str, measured: "Measured") -> list[Row]:
    """Return the figures of one layout; memory is in MiB (2^20 bytes)."""
    rows = [
        Row("tokens_per_s", measured.tokens_per_s, "tokens/s", layout),
        Row("peak_resident_mb", measured.peak_resident_bytes / MIB, "MiB", layout),
        Row("step_s", measured.step_s, "s", layout),
        Row("comm_bytes", measured.comm_bytes, "bytes", layout),
        Row("loss", measured.loss, "nats", layout),
    ]
    if measured.peak_gpu_bytes is not None:
        rows.append(Row("peak_gpu_mb", measured.peak_gpu_bytes / MIB, "MiB", layout))
    return rows
