"""`shardwise parity`: check that a layout computes what one rank computes."""

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import result_console
from shardwise.layout import Layout
from shardwise.precision import PRECISIONS
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.measure.parity import Difference, Parity, Trial

COMPARED = {
    "loss": "loss",
    "grad": "gradients",
    "grad_norm": "gradient norm",
    "param": "parameters",
    "replica": "replicas",
}


def add_parity(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "parity",
        help="check that a layout computes what one rank computes",
        description="Train a few steps on the ranks of a layout and on one rank in fp32, from the "
        "same random weights and tokens. Compare the loss, every gradient, the gradient norm, "
        "every parameter, and the replicas with each other. Starts the ranks on this machine; "
        "under torchrun, joins the ranks that torchrun started. Exit 0: equal. Exit 1: not equal, "
        "and the first parameter that differs is printed.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a catalogue name, a parameter count, a folder, a .gguf file or a hub id; only its "
        "shape is used",
    )
    parser.add_argument(
        "--layout", required=True, metavar="L", help="layout to check, for example dp4.z3"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="K",
        help="optimizer steps to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="precision of the layout: fp32, or bf16 to compare mixed precision with fp32 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="random seed of weights and tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="gather and reduce synchronously instead of overlapped with computation",
    )
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        metavar="N",
        help="maximum bytes of gradients per reduction (default: as in training)",
    )
    parser.set_defaults(run=run_parity)


def run_parity(args: argparse.Namespace) -> int:
    """Exit 0 when equal, 1 when not equal or a rank failed, 128 + n after signal n."""
    from shardwise.formats.catalogue import find_model
    from shardwise.measure.parity import Trial, check_trial, compare
    from shardwise.parallel.launch import RankFailed, Stopped, run_ranks
    from shardwise.parallel.zero import BUCKET_BYTES

    layout = Layout.parse(args.layout)
    found = find_model(args.model)
    if layout.shard == "fsdp" and (args.no_overlap or args.bucket_bytes is not None):
        raise ValueError(
            "--no-overlap and --bucket-bytes do not apply to fsdp, which schedules its own "
            "communication"
        )
    bucket_bytes = BUCKET_BYTES if args.bucket_bytes is None else args.bucket_bytes
    trial = Trial(
        found.config,
        layout,
        args.steps,
        args.seed,
        not args.no_overlap,
        bucket_bytes,
        args.precision,
    )
    check_trial(trial)
    try:
        parity: Parity | None = run_ranks(compare, layout.world_size, trial)
    except RankFailed as failure:
        print(failure, file=sys.stderr)
        if args.json:
            print(json_text({"ok": False, "layout": str(layout), "failed": str(failure)}))
        return 1
    except Stopped as stop:
        return 128 + stop.signal
    if parity is None:
        return 0  # under torchrun, the first rank reports
    if parity.stopped:
        return 128 + parity.stopped
    if args.json:
        print(json_text(parity_json(trial, found.name, parity)))
    else:
        print_parity(trial, found.name, parity)
    return 0 if parity.is_equal else 1


def parity_json(trial: "Trial", model: str, parity: "Parity") -> dict[str, Any]:
    """Return the JSON object of the command; a difference that is not finite is null."""
    measured = [kind for kind in trial.tolerances if kind != "replica"]
    first = parity.first
    first_difference = first and {
        "step": first.step,
        "parameter": first.parameter,
        "kind": first.kind,
        "rel": finite_or_none(first),
    }
    return {
        "ok": parity.is_equal,
        "layout": str(trial.layout),
        "model": model,
        "steps": trial.steps,
        "precision": trial.precision,
        **{f"{kind}_rel": finite_or_none(parity.worst[kind]) for kind in measured},
        "replicas_equal": parity.worst["replica"].is_equal,
        "tolerances": {f"{kind}_rel": trial.tolerances[kind] for kind in measured},
        "first_difference": first_difference,
    }


def finite_or_none(difference: "Difference") -> float | None:
    return difference.rel if math.isfinite(difference.rel) else None


def print_parity(trial: "Trial", model: str, parity: "Parity") -> None:
    from rich.table import Table

    table = Table("compared", "largest difference", "at", "tolerance", "result")
    for kind, bound in trial.tolerances.items():
        worst = parity.worst[kind]
        table.add_row(
            COMPARED[kind],
            f"{worst.rel:.2g}",
            location(worst) if worst.rel else "",
            f"{bound:g}",
            "equal" if worst.is_equal else "differs",
        )
    result_console().print(table)
    print(summarize_parity(trial, model, parity))


def summarize_parity(trial: "Trial", model: str, parity: "Parity") -> str:
    steps = f"{trial.steps} step{'s' if trial.steps > 1 else ''}"
    if parity.first is None:
        if trial.precision == "fp32":
            return f"{model}: {trial.layout} equals one rank, {steps} in fp32"
        return f"{model}: {trial.layout} in {trial.precision} is near one rank in fp32, {steps}"
    first = parity.first
    return (
        f"{model}: {trial.layout} differs from one rank, first in {COMPARED[first.kind]} "
        f"({location(first)})"
    )


def location(difference: "Difference") -> str:
    return f"step {difference.step}" + (f", {difference.parameter}" if difference.parameter else "")
