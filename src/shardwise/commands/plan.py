"""`shardwise plan`: does it fit, why not, and what would."""

import argparse
import json
from typing import Any

from shardwise.commands.terminal import answer_console
from shardwise.precision import PRECISIONS


def add_plan(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="why does a model not fit, which layouts do",
        description="Say what a model needs on each GPU in training and in serving, row by row, and what fits.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a catalogue name, a count (70B), a folder, a .gguf file, a run, or org/name",
    )
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="the kind of GPU, for example h100-80gb"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="how many (default: as --layout needs, else 1)"
    )
    parser.add_argument(
        "--mode", choices=("train", "serve"), help="only this answer (default: both)"
    )
    parser.add_argument(
        "--layout",
        metavar="L",
        help="judge this layout, for example dp2.tp4.z1, instead of searching",
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="TOKENS",
        help="length of a sequence, and of a request when serving (default: 8192)",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="B",
        help="sequences that a data rank trains on at a time (default: 1)",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        help="of activations in training, for all layouts, as rc-selective and rc-full in one (default: none)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="of weights and gradients (default: bf16)",
    )
    parser.add_argument(
        "--quant",
        metavar="Q",
        help="of weights when serving, as `shardwise serve` has it (default: not quantized)",
    )
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="D",
        help="of keys and values when serving: int8 or fp8, as `shardwise serve` has them (default: as --precision)",
    )
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Exit 0 where the first candidate fits, else 1."""
    from shardwise.plan import plan

    answer = plan(
        args.model,
        args.gpu,
        args.gpus,
        args.mode,
        args.layout,
        args.seq,
        args.precision,
        args.micro_batch,
        args.recompute,
        args.quant,
        args.kv_dtype,
    )
    if args.json:
        print(json.dumps(answer.to_json()))
    else:
        from shardwise.plan.report import print_plan

        print_plan(answer, answer_console())
    return 0 if answer.fits else 1
