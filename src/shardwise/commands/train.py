"""`shardwise train` and `shardwise config`: a run from one TOML file."""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model on the ranks of a layout",
        description="Train as a TOML file says (`shardwise config` prints one). Starts the ranks of its layout on this "
        "machine; under torchrun it joins the ranks that are there.",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="the settings of the run")
    parser.add_argument("--layout", metavar="L", help="in place of run.layout, for example dp4.m2")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", dest="overrides",
        help="change one setting; may be given many times",
    )  # fmt: skip
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Exit 0 when the last step is done, 1 when a rank failed, 128 + its number when a signal stopped the run."""
    from shardwise.parallel.launch import RankFailed, Stopped, is_first_rank
    from shardwise.train.run import start_run
    from shardwise.train.settings import read_settings, to_toml

    overrides = args.overrides + ([f"run.layout={json.dumps(args.layout)}"] if args.layout else [])
    settings = read_settings(Path(args.config), overrides)
    folder = settings.run.folder
    again = f"shardwise train {args.config} --resume"
    if is_first_rank():
        print(to_toml(settings), file=sys.stderr)
    try:
        outcome = start_run(settings, args.resume, warn)
    except RankFailed as failure:
        print(
            f"{failure}\nshardwise: the run failed; its last checkpoint is kept, so `{again}` goes on", file=sys.stderr
        )
        return 1
    except Stopped as stop:
        print(f"shardwise: stopped by {stop}; {folder} is saved, `{again}` goes on", file=sys.stderr)
        return 128 + stop.signal
    if outcome.stopped is not None:
        name = signal.Signals(outcome.stopped).name
        warn(f"stopped by {name} after step {outcome.step}; {folder} is saved, `{again}` goes on")
        return 128 + outcome.stopped
    if args.json and is_first_rank():
        print(json.dumps({"run": folder, **asdict(outcome)}))
    elif is_first_rank():
        print(f"{folder}: {outcome.step} steps, loss {outcome.loss:.4f}" if outcome.loss else f"{folder}: was done")
    return 0


def warn(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr)


def add_config(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="print a commented settings file to start from",
        description="Print every setting of `shardwise train` with its default and what it does, as TOML.",
    )
    parser.set_defaults(run=run_config)


def run_config(args: argparse.Namespace) -> int:
    from shardwise.train.settings import Settings, to_toml

    print(json.dumps(asdict(Settings())) if args.json else to_toml(Settings(), explained=True))
    return 0
