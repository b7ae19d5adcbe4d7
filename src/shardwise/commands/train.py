"""`shardwise train` and `shardwise config`: a run from one TOML file."""

import argparse
import json
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import say

if TYPE_CHECKING:
    from shardwise.train.loop import Outcome


def add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model on the ranks of a layout",
        description="Train as a TOML file says (`shardwise config` prints one). Starts the ranks of its layout on this "
        "machine; under torchrun it joins the ranks that are there.",
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", help="the settings of the run, or with --resume its folder"
    )
    parser.add_argument("--layout", metavar="L", help="in place of run.layout, for example dp4.m2")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run's newest checkpoint"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        dest="overrides",
        help="change one setting; may be given many times",
    )
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Exit 0 when the last step is done, 1 when a rank failed, the run diverged or could not be
    saved, 128 + its number when a signal stopped it."""
    from shardwise.parallel.launch import RankFailed, Stopped, is_first_rank
    from shardwise.train.run import start_run
    from shardwise.train.settings import read_settings, to_toml

    overrides = args.overrides + (
        [f"run.layout={json.dumps(args.layout)}"] if args.layout is not None else []
    )
    settings = read_settings(Path(args.config), overrides)
    folder = settings.run.folder
    again = f"shardwise train {shlex.quote(folder)} --resume"
    try:
        outcome = start_run(
            settings, args.resume, say, lambda: print(to_toml(settings), file=sys.stderr)
        )
    except RankFailed as failure:
        print(failure, file=sys.stderr)
        if args.json:
            print(json.dumps({"run": folder, "failed": str(failure)}))
        say(f"the run failed; {what_is_left(folder, again)}")
        return 1
    except Stopped as stop:
        say(f"stopped at once by a second {stop}; {what_is_left(folder, again)}")
        return 128 + stop.signal
    except KeyboardInterrupt:  # one rank runs in this process
        say(f"stopped at once by a second SIGINT; {what_is_left(folder, again)}")
        return 130
    if is_first_rank():
        if args.json:
            print(json.dumps({"run": folder, **asdict(outcome)}))
        text = ending(outcome, folder, again)
        if outcome.stopped or outcome.diverged or outcome.unsaved:
            say(text)
        elif not args.json:
            print(text)
    return (
        128 + outcome.stopped
        if outcome.stopped
        else 1
        if outcome.diverged or outcome.unsaved
        else 0
    )


def ending(outcome: "Outcome", folder: str, again: str) -> str:
    """How the run ended, in a sentence."""
    if outcome.diverged:
        return (
            f"the gradient or loss of step {outcome.diverged} is not finite, so that step is not kept (a lower "
            f"optimizer.lr may help); {what_is_left(folder, again)}"
        )
    if outcome.unsaved:
        return f"step {outcome.step} could not be saved: {outcome.unsaved}; {what_is_left(folder, again)}"
    if outcome.stopped:
        name = signal.Signals(outcome.stopped).name
        return f"stopped by {name} after step {outcome.step}; {folder} is saved, `{again}` goes on"
    if outcome.loss is None:
        return f"{folder}: was done, after {outcome.step} steps"
    return f"{folder}: {outcome.step} steps, loss {outcome.loss:.4f}"


def what_is_left(folder: str, again: str) -> str:
    """Of a run that ended without saving."""
    from shardwise.formats.run_checkpoint import list_checkpoints

    saved = list_checkpoints(Path(folder) / "checkpoints")
    return (
        f"{saved[-1]} is kept, `{again}` goes on from there"
        if saved
        else f"nothing was saved, `{again}` starts anew"
    )


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
