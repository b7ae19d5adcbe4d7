"""`shardwise schedule`: a pipeline's schedule, its bubble and its memory, as numbers and as a
picture."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardwise.commands.terminal import answer_console
from shardwise.layout import Schedule
from shardwise.suggest import nearest

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.table import Costs, Memory, Table
    from shardwise.plan.simulate import Timeline

NAMES: tuple[Schedule, ...] = get_args(Schedule)


def add_schedule(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "schedule",
        help="what a pipeline's ranks do when, and how long they wait",
        description="Draw a pipeline's schedule to scale, with its bubble and what it keeps in memory. Costs are of "
        "all that one rank has of the model, in any unit of time.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help=f"{', '.join(NAMES)}; a .csv file as PyTorch's pipelining has; or a run, whose traced step is shown as "
        "it was measured and as it is simulated",
    )
    parser.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="pieces that the batch is cut into"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="virtual stages a rank, for interleaved"
    )
    for name, what in (
        ("tf", "a forward (default: 1)"),
        (
            "tb",
            "the gradient of a stage's input; a backward that is not split takes tb + tw (default: 1)",
        ),
        ("tw", "the gradient of its weights (default: 1)"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=1.0, metavar="TIME", help=f"time of {what}"
        )
    parser.add_argument(
        "--tc", type=float, default=0.0, metavar="TIME", help="time of a transfer (default: 0)"
    )
    parser.add_argument(
        "--mem-limit",
        type=float,
        metavar="X",
        help="no rank may hold more forwards than X times the stages (default: 1 for zb-auto, which searches an order "
        "within it; any for others)",
    )
    parser.add_argument(
        "--mem-w",
        type=float,
        default=0.28,
        metavar="PART",
        help="of a forward, still held from I to W (default: 0.28)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the table as PyTorch's pipelining reads it"
    )
    parser.set_defaults(run=run_schedule)


def run_schedule(args: argparse.Namespace) -> int:
    from shardwise.parallel.pipeline.table import Costs, Memory
    from shardwise.parallel.pipeline.table_csv import csv_text
    from shardwise.parallel.pipeline.validate import validate
    from shardwise.plan.simulate import simulate
    from shardwise.plan.svg import draw_timelines, summarized

    kind = Path(args.name).suffix.lower()
    if kind == ".json" or (kind != ".csv" and Path(args.name).is_dir()):
        return show_trace(args)
    costs = Costs(args.tf, args.tb, args.tw, args.tc)
    memory = Memory(args.mem_limit, args.mem_w)
    table = asked_table(args, costs, memory)
    validate(table, memory)
    timeline = simulate(table, costs.seconds(table.chunks), costs.tc)
    title = titled(args.name, table, memory)
    if args.svg:
        picture = draw_timelines(title, [(summarized(timeline), timeline)], "the unit of the costs")
        args.svg.write_text(picture, encoding="utf-8")
    if args.csv:
        args.csv.write_text(csv_text(table), encoding="utf-8")
    if args.json:
        print(json.dumps(told(timeline)))
    else:
        from shardwise.plan.terminal import print_timeline

        print_timeline(timeline, title, memory, answer_console())
    return 0


def show_trace(args: argparse.Namespace) -> int:
    """What the ranks of a run did, and the same orders replayed with their mean times."""
    from shardwise.parallel.pipeline.table import NO_LIMIT
    from shardwise.plan.measured import newest_trace, read_trace
    from shardwise.plan.svg import draw_timelines
    from shardwise.plan.terminal import print_timeline

    for flag, given in (
        ("--stages", args.stages),
        ("--microbatches", args.microbatches),
        ("--chunks", args.chunks),
    ):
        if given is not None:
            raise ValueError(f"{flag} is for a schedule; a run has its own, so leave it out")
    path = newest_trace(Path(args.name))
    traced = read_trace(path)
    title = f"step {traced.step} of {path}, {traced.layout}"
    if args.svg:
        args.svg.write_text(draw_timelines(title, traced.panels, "seconds"), encoding="utf-8")
    if args.json:
        both = {"measured": told(traced.measured), "predicted": told(traced.predicted)}
        print(json.dumps({"layout": str(traced.layout), "step": traced.step, **both}))
        return 0
    console = answer_console()
    for what, timeline in (
        ("measured", traced.measured),
        ("simulated with the same times", traced.predicted),
    ):
        print_timeline(timeline, f"{title}, {what}", NO_LIMIT, console)
    console.print(f"{traced.told}, without transfers")
    return 0


def asked_table(args: argparse.Namespace, costs: "Costs", memory: "Memory") -> "Table":
    """The named schedule, or the one in a file, whose sizes are in it."""
    from shardwise.parallel.pipeline.schedules import pipeline_table
    from shardwise.parallel.pipeline.table_csv import read_csv

    if (name := next((name for name in NAMES if name == args.name), None)) is not None:
        if args.stages is None or args.microbatches is None:
            raise ValueError(
                f"{args.name} needs --stages and --microbatches, such as --stages 4 --microbatches 8"
            )
        chunks = 1 if args.chunks is None else args.chunks
        return pipeline_table(name, args.stages, args.microbatches, chunks, costs, memory)
    if not args.name.lower().endswith(".csv"):
        near = nearest(args.name.lower(), NAMES, most=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"there are {', '.join(NAMES)}, files ending with .csv, and runs"
        )
        raise ValueError(f"there is no schedule {args.name!r}; {hint}")
    table = read_csv(Path(args.name))
    for flag, given, found in (
        ("--stages", args.stages, len(table.ranks)),
        ("--microbatches", args.microbatches, table.num_microbatches),
        ("--chunks", args.chunks, table.chunks),
    ):
        if given is not None and given != found:
            raise ValueError(
                f"{args.name} has {flag} {found:g}, not {given}; leave it out, or give another file"
            )
    return table


def titled(name: str, table: "Table", memory: "Memory") -> str:
    chunks = f", {table.chunks:g} chunks a rank" if table.chunks != 1 else ""
    limit = f", memory limit {memory.limit:g}" if memory.limit is not None else ""
    return (
        f"{name}: {len(table.ranks)} stages, {table.num_microbatches} micro-batches{chunks}{limit}"
    )


def told(timeline: "Timeline") -> dict[str, Any]:
    return {
        "bubble_fraction": timeline.bubble_fraction,
        "idle_fraction": timeline.idle_fraction,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "makespan": timeline.makespan,
        "peak_in_flight": timeline.peak_in_flight,
        "actions": [[str(action) for action in actions] for actions in timeline.table.ranks],
    }
