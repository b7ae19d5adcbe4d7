"""`shardwise plan`: does a model fit, why not, and what would."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import result_console
from shardwise.hardware import GPUS_PER_NODE, MARGIN
from shardwise.layout import Layout
from shardwise.precision import PRECISIONS
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.formats.catalogue import FoundModel
    from shardwise.plan.ledger import Mode


def add_plan(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="explain why a model doesn't fit and find layouts that do",
        description="Print the memory that a model needs on each GPU in training and in serving, "
        "row by row, which layouts fit, and why one GPU is not enough. Layouts are documented in "
        "docs/layout.md.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a catalogue name, a parameter count (70B), a model folder, a .gguf file or a hub id; "
        "or settings of `shardwise train` (run.toml) or a run, planned as they would run",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU model, e.g. h100-80gb or 4090, or its memory, e.g. 48GB"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs (default: as many as --layout needs, or 1)",
    )
    parser.add_argument(
        "--mode", choices=("train", "serve"), help="plan only training or serving (default: both)"
    )
    parser.add_argument(
        "--layout",
        metavar="L",
        help="evaluate this layout, for example dp2.tp4.z1, instead of searching for one",
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="TOKENS",
        help="sequence length in training, request length in serving (default: 8192)",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="B",
        help="training: sequences per data rank and micro-batch (default: 1)",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        help="training: activation recomputation for all layouts, same as adding rc-selective or "
        "rc-full to each (default: none)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of weights and gradients (default: bf16, or that of the run)",
    )
    parser.add_argument(
        "--quant",
        metavar="Q",
        help="serving: quantization of the weights, as in `shardwise serve` (default: auto)",
    )
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="D",
        help="serving: dtype of the KV cache, int8 or fp8, as in `shardwise serve` (default: "
        "--precision)",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="training: keep optimizer states in host memory, as run.offload does",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=MARGIN,
        metavar="SHARE",
        help="share of a GPU's memory that proposals leave to the CUDA context, NCCL and "
        "fragmentation (default: %(default)g)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=GPUS_PER_NODE,
        metavar="N",
        help="GPUs joined by fast links; proposals use whole nodes (default: %(default)s)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the known models and GPUs, and exit"
    )
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Exit 0 if the first candidate fits, else 1."""
    if args.list:
        print_known(args.json)
        return 0
    for name, given in (("a MODEL", args.model), ("--gpu", args.gpu)):
        if given is None:
            raise ValueError(f"name {name}; `shardwise plan --list` prints the known ones")
    from shardwise.plan import plan

    choices = {
        "mode": args.mode,
        "layout": args.layout,
        "seq": args.seq,
        "precision": args.precision,
        "micro_batch": args.micro_batch,
        "recompute": args.recompute,
        "quant": args.quant,
        "kv_dtype": args.kv_dtype,
        "offload": args.offload,
        "margin": args.margin,
        "gpus_per_node": args.gpus_per_node,
    }
    model: Any = args.model
    if args.mode != "serve" and (settings := settings_file(args.model)):
        model, of_run = choices_of_run(settings, args.layout)
        choices |= of_run | {name: value for name, value in choices.items() if value}
        choices["mode"] = "train"
    choices["precision"] = choices["precision"] or "bf16"
    from shardwise.formats.families import UnknownArchitecture

    try:
        result = plan(model, args.gpu, args.gpus, **choices)
    except UnknownArchitecture as unknown:
        return plan_weights(args, unknown)
    if args.json:
        print(json_text(result.to_json()))
    else:
        from shardwise.plan.report import print_plan

        print_plan(result, result_console())
    return 0 if result.fits else 1


def plan_weights(args: argparse.Namespace, unknown: ValueError) -> int:
    """Plan the weights alone of a model whose architecture is unknown, if their size is known."""
    from shardwise.formats.hub import fetch_config
    from shardwise.formats.stored_sizes import stored_sizes
    from shardwise.hardware import find_device
    from shardwise.plan.planner import check_limits
    from shardwise.plan.weights_only import WeightsPlan

    path = Path(args.model).expanduser()
    try:
        sizes = stored_sizes(path if path.exists() else fetch_config(args.model).parent)
    except ValueError as error:
        raise ValueError(
            f"{unknown}; the size of its weights is not known either: {error}"
        ) from None
    check_limits(args.margin, args.gpus_per_node)
    modes: tuple[Mode, ...] = (args.mode,) if args.mode else ("train", "serve")
    num_gpus = args.gpus or (Layout.parse(args.layout).world_size if args.layout else 1)
    result = WeightsPlan(
        path.resolve().name,
        str(unknown),
        sizes,
        find_device(args.gpu),
        num_gpus,
        args.precision or "bf16",
        args.margin,
        modes,
    )
    if args.json:
        print(json_text(result.to_json()))
    else:
        print("\n".join(result.sentences()))
    return 0 if result.fits else 1


def settings_file(model: str) -> Path | None:
    """Return the settings file of a run: `model` itself if it is a TOML file, or `config.toml` in
    the folder of a run; None for any other model."""
    path = Path(model)
    if path.suffix == ".toml":
        return path
    return path if (path / "config.toml").is_file() else None


def choices_of_run(path: Path, layout: str | None) -> tuple["FoundModel", dict[str, Any]]:
    """Return the model of a run, and the arguments of `plan` that describe what `shardwise train`
    would run."""
    from shardwise.formats.catalogue import FoundModel
    from shardwise.train.global_batch import check_divides
    from shardwise.train.resolve import resolve_run, resume_run
    from shardwise.train.settings import read_settings

    planned = read_settings(path)
    run = resume_run(planned) or resolve_run(planned)
    chosen = run.layout if layout is None else Layout.parse(layout)
    settings = run.settings
    check_divides(settings.data.global_batch, chosen.dp, chosen.microbatches)
    choices = {
        "layout": chosen,
        "seq": settings.data.seq_len,
        "micro_batch": settings.microbatch_sequences(chosen),
        "global_batch": settings.data.global_batch,
        "precision": settings.run.precision,
        "gradients": settings.run.gradients,
        "offload": settings.run.offload != "none",
    }
    return FoundModel(settings.model.name, run.config, "run"), choices


def print_known(as_json: bool) -> None:
    """Print the names of models and GPUs."""
    from shardwise.formats.catalogue import CATALOGUE
    from shardwise.hardware import DEVICES

    known = {"models": list(CATALOGUE), "gpus": list(DEVICES)}
    if as_json:
        print(json_text(known))
    else:
        for kind, names in known.items():
            print(f"{kind}: {', '.join(names)}")
