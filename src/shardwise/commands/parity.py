"""`shardwise parity`: proves that a layout computes what one rank computes."""

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import answer_console
from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.measure.parity import Difference, Parity, Trial

WHAT = {
    "loss": "loss",
    "grad": "gradients",
    "grad_norm": "norm of the gradient",
    "param": "parameters",
    "replica": "replicas",
}


def add_parity(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "parity",
        help="prove that a layout computes what one rank computes",
        description="Train a few steps on the ranks of a layout and on one rank alone, from the same drawn weights and "
        "on the same random tokens in fp32, and compare loss, every gradient, its norm, every parameter, and that "
        "replicas are equal. Starts the ranks on this machine; under torchrun it joins the ranks that are there. "
        "Exit 0: equal. Exit 1: not, and the first parameter that differs is named.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name, count, folder, file or hub id, of which the shape counts",
    )
    parser.add_argument("--layout", required=True, metavar="L", help="for example dp4.z3")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="K", help="optimizer steps (default: 3)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of weights and tokens (default: 0)"
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="gather and sum where it is needed, not beside the rest",
    )
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        metavar="N",
        help="most bytes of gradient in one sum (default: as in training)",
    )
    parser.set_defaults(run=run_parity)


def run_parity(args: argparse.Namespace) -> int:
    """Exit 0 when equal, 1 when not or when a rank failed, 128 + its number when a signal stopped
    it."""
    from shardwise.formats.catalogue import find_model
    from shardwise.measure.parity import Trial, check_trial, compare
    from shardwise.parallel.launch import RankFailed, Stopped, run_ranks
    from shardwise.parallel.zero import BUCKET_BYTES

    layout = Layout.parse(args.layout)
    found = find_model(args.model)
    if layout.shard == "fsdp" and (args.no_overlap or args.bucket_bytes is not None):
        raise ValueError(
            "fsdp has buckets and an order of its own; leave out --no-overlap and --bucket-bytes"
        )
    bucket_bytes = BUCKET_BYTES if args.bucket_bytes is None else args.bucket_bytes
    trial = Trial(found.config, layout, args.steps, args.seed, not args.no_overlap, bucket_bytes)
    check_trial(trial)
    try:
        parity: Parity | None = run_ranks(compare, layout.world_size, trial)
    except RankFailed as failure:
        print(failure, file=sys.stderr)
        if args.json:
            print(json.dumps({"ok": False, "layout": str(layout), "failed": str(failure)}))
        return 1
    except Stopped as stop:
        return 128 + stop.signal
    if parity is None:
        return 0  # torchrun started it: the first rank tells
    if parity.stopped:
        return 128 + parity.stopped
    if args.json:
        print(json.dumps(answer(trial, found.name, parity)))
    else:
        tell(trial, found.name, parity)
    return 0 if parity.is_equal else 1


def answer(trial: "Trial", model: str, parity: "Parity") -> dict[str, Any]:
    """The answer as JSON has it, where what is not finite is null."""
    from shardwise.measure.parity import TOLERANCES

    measured = [kind for kind in TOLERANCES if kind != "replica"]
    first = parity.first
    return {
        "ok": parity.is_equal,
        "layout": str(trial.layout),
        "model": model,
        "steps": trial.steps,
        **{f"{kind}_rel": finite(parity.worst[kind]) for kind in measured},
        "replicas_equal": parity.worst["replica"].is_equal,
        "tolerances": {f"{kind}_rel": TOLERANCES[kind] for kind in measured},
        "first_difference": first
        and {
            "step": first.step,
            "parameter": first.parameter,
            "kind": first.kind,
            "rel": finite(first),
        },
    }


def finite(difference: "Difference") -> float | None:
    return difference.rel if math.isfinite(difference.rel) else None


def tell(trial: "Trial", model: str, parity: "Parity") -> None:
    from rich.table import Table

    from shardwise.measure.parity import TOLERANCES

    table = Table("what", "worst", "where", "bound", "verdict")
    for kind, bound in TOLERANCES.items():
        worst = parity.worst[kind]
        table.add_row(
            WHAT[kind],
            f"{worst.rel:.2g}",
            place_of(worst) if worst.rel else "",
            f"{bound:g}",
            "equal" if worst.is_equal else "differs",
        )
    answer_console().print(table)
    print(verdict(trial, model, parity))


def verdict(trial: "Trial", model: str, parity: "Parity") -> str:
    steps = f"{trial.steps} step{'s' if trial.steps > 1 else ''}"
    if parity.first is None:
        return f"{model}: {trial.layout} equals one rank, {steps} in fp32"
    first = parity.first
    return f"{model}: {trial.layout} differs from one rank, first in {WHAT[first.kind]} ({place_of(first)})"


def place_of(difference: "Difference") -> str:
    return f"step {difference.step}" + (f", {difference.parameter}" if difference.parameter else "")
