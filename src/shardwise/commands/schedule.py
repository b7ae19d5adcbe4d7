"""`shardwise schedule`: a pipeline schedule, its bubble and its memory, in numbers and as a
picture."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardwise.commands.terminal import result_console
from shardwise.layout import Schedule
from shardwise.suggest import nearest
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.table import Costs, Memory, Table
    from shardwise.plan.simulate import Timeline

NAMES: tuple[Schedule, ...] = get_args(Schedule)


def add_schedule(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "schedule",
        help="show a pipeline schedule and its bubble",
        description="Draw a pipeline schedule to scale, with its bubble and the activations in "
        "flight. Times are per rank, for all its layers, in any unit. A named schedule needs "
        "--stages and --microbatches.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help=f"{', '.join(NAMES)}; a .csv file in the format of torch.distributed.pipelining; or "
        "the folder of a training run, whose traced step is shown as measured and as simulated",
    )
    parser.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="M", help="micro-batches per step")
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="interleaved: virtual stages per rank (default: 1)"
    )
    for name, default, text in (
        ("tf", 1.0, "time of a forward"),
        ("tb", 1.0, "time of an input gradient; an unsplit backward takes tb + tw"),
        ("tw", 1.0, "time of a weight gradient"),
        ("tc", 0.0, "time of a transfer between stages"),
    ):
        parser.add_argument(
            f"--{name}",
            type=float,
            default=default,
            metavar="TIME",
            help=f"{text} (default: {default:g})",
        )
    parser.add_argument(
        "--mem-limit",
        type=float,
        metavar="X",
        help="maximum forwards in flight on a rank, as a multiple of --stages (default: 1 for "
        "zb-auto, which searches for the best order within it; no limit otherwise)",
    )
    parser.add_argument(
        "--mem-w",
        type=float,
        default=0.28,
        metavar="SHARE",
        help="share of a forward's memory that is held between its input gradient (I) and its "
        "weight gradient (W) (default: %(default)s)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG")
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the schedule in the format of torch.distributed.pipelining",
    )
    parser.set_defaults(run=run_schedule)


def run_schedule(args: argparse.Namespace) -> int:
    from shardwise.parallel.pipeline.table import Costs, Memory
    from shardwise.parallel.pipeline.table_csv import csv_text
    from shardwise.parallel.pipeline.validate import validate
    from shardwise.plan.simulate import simulate
    from shardwise.plan.svg import caption, draw_timelines

    kind = Path(args.name).suffix.lower()
    if kind == ".json" or (kind != ".csv" and Path(args.name).is_dir()):
        return show_trace(args)
    costs = Costs(args.tf, args.tb, args.tw, args.tc)
    memory = Memory(args.mem_limit, args.mem_w)
    table = read_table(args, costs, memory)
    validate(table, memory)
    timeline = simulate(table, costs.seconds(table.chunks), costs.tc)
    title = schedule_title(args.name, table, memory)
    if args.svg:
        picture = draw_timelines(title, [(caption(timeline), timeline)], "the unit of the costs")
        args.svg.write_text(picture, encoding="utf-8")
    if args.csv:
        args.csv.write_text(csv_text(table), encoding="utf-8")
    if args.json:
        print(json_text(timeline_json(timeline)))
    else:
        from shardwise.plan.terminal import print_timeline

        print_timeline(timeline, title, memory, result_console())
    return 0


def show_trace(args: argparse.Namespace) -> int:
    """Show the traced step of a run as measured, and simulated with its mean times."""
    from shardwise.parallel.pipeline.table import NO_LIMIT
    from shardwise.plan.measured import newest_trace, read_trace
    from shardwise.plan.svg import draw_timelines
    from shardwise.plan.terminal import print_timeline

    for flag, value in (
        ("--stages", args.stages),
        ("--microbatches", args.microbatches),
        ("--chunks", args.chunks),
    ):
        if value is not None:
            raise ValueError(f"{flag} does not apply to a run, which has its own; leave it out")
    path = newest_trace(Path(args.name))
    traced = read_trace(path)
    title = f"step {traced.step} of {path}, {traced.layout}"
    if args.svg:
        args.svg.write_text(draw_timelines(title, traced.panels, "seconds"), encoding="utf-8")
    if args.json:
        both = {
            "measured": timeline_json(traced.measured),
            "predicted": timeline_json(traced.predicted),
        }
        print(json_text({"layout": str(traced.layout), "step": traced.step, **both}))
        return 0
    console = result_console()
    for what, timeline in (
        ("measured", traced.measured),
        ("simulated with the same times", traced.predicted),
    ):
        print_timeline(timeline, f"{title}, {what}", NO_LIMIT, console)
    console.print(f"{traced.summary}, without transfers")
    return 0


def read_table(args: argparse.Namespace, costs: "Costs", memory: "Memory") -> "Table":
    """Return the named schedule, or the one in a file, which has its own sizes."""
    from shardwise.parallel.pipeline.schedules import pipeline_table
    from shardwise.parallel.pipeline.table_csv import read_csv

    if (name := next((name for name in NAMES if name == args.name), None)) is not None:
        if args.stages is None or args.microbatches is None:
            raise ValueError(
                f"{args.name} needs --stages and --microbatches, for example --stages 4 "
                "--microbatches 8"
            )
        chunks = 1 if args.chunks is None else args.chunks
        return pipeline_table(name, args.stages, args.microbatches, chunks, costs, memory)
    if not args.name.lower().endswith(".csv"):
        near = nearest(args.name.lower(), NAMES, most=1)
        known = f"schedules are {', '.join(NAMES)}, .csv files and training runs"
        hint = f"did you mean {near[0]}?" if near else known
        raise ValueError(f"unknown schedule {args.name!r}; {hint}")
    table = read_csv(Path(args.name))
    for flag, value, in_file in (
        ("--stages", args.stages, len(table.ranks)),
        ("--microbatches", args.microbatches, table.num_microbatches),
        ("--chunks", args.chunks, table.chunks),
    ):
        if value is not None and value != in_file:
            raise ValueError(
                f"{args.name} has {flag} {in_file:g}, not {value}; leave it out, or name another "
                "file"
            )
    return table


def schedule_title(name: str, table: "Table", memory: "Memory") -> str:
    chunks = f", {table.chunks:g} chunks per rank" if table.chunks != 1 else ""
    limit = f", memory limit {memory.limit:g}" if memory.limit is not None else ""
    return (
        f"{name}: {len(table.ranks)} stages, {table.num_microbatches} micro-batches{chunks}{limit}"
    )


def timeline_json(timeline: "Timeline") -> dict[str, Any]:
    return {
        "bubble_fraction": timeline.bubble_fraction,
        "idle_fraction": timeline.idle_fraction,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "makespan": timeline.makespan,
        "peak_in_flight": timeline.peak_in_flight,
        "actions": [[str(action) for action in actions] for actions in timeline.table.ranks],
    }
