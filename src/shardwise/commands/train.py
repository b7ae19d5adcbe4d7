"""`shardwise train` and `shardwise config`: a training run from one TOML file."""

import argparse
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import log
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.train.loop import Outcome
    from shardwise.train.settings import Run


def add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model under any layout",
        description="Train with the settings in a TOML file (`shardwise config` prints one). "
        "Starts the ranks of the layout on this machine; under torchrun, joins the ranks that "
        "torchrun started.",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG.toml",
        help="TOML settings file; with --resume, the file or the run folder",
    )
    parser.add_argument(
        "--layout", metavar="L", help="override run.layout, for example with dp4.m2"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the run"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        dest="overrides",
        help="override one setting, for example run.steps=100; repeatable",
    )
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Exit 0 after the last step, 1 when a rank failed, the loss diverged or saving failed, 128 + n
    after signal n."""
    from shardwise.parallel.launch import RankFailed, Stopped, is_first_rank
    from shardwise.train.rank import OutOfMemory
    from shardwise.train.run import start_run
    from shardwise.train.settings import read_settings

    overrides = list(args.overrides)
    if args.layout is not None:
        overrides.append(f"run.layout={json_text(args.layout)}")
    settings = read_settings(Path(args.config), overrides)
    folder = settings.run.folder
    try:
        outcome = start_run(settings, args.resume, log, print_run)
    except RankFailed as failure:
        print(failure, file=sys.stderr)
        if args.json:
            print(json_text({"run": folder, "failed": str(failure)}))
        log(f"the run failed; {how_to_resume(folder)}")
        return 1
    except OutOfMemory as error:  # one rank runs in this process
        if args.debug:
            raise
        log(f"{error}; {how_to_resume(folder)}")
        return 1
    except Stopped as stop:
        log(f"stopped at once by a second {stop}; {how_to_resume(folder)}")
        return 128 + stop.signal
    except KeyboardInterrupt:  # one rank runs in this process
        log(f"stopped at once by a second SIGINT; {how_to_resume(folder)}")
        return 130
    failed = bool(outcome.diverged or outcome.unsaved)
    if is_first_rank():
        if args.json:
            print(json_text({"run": folder, **asdict(outcome)}))
        if outcome.stopped or failed:
            log(summarize_outcome(outcome, folder))
        elif not args.json:
            print(summarize_outcome(outcome, folder))
    if outcome.stopped:
        return 128 + outcome.stopped
    return 1 if failed else 0


def print_run(run: "Run") -> None:
    """Print the settings of a run and their summary on stderr."""
    from shardwise.train.settings import to_toml
    from shardwise.train.summary import run_summary

    print(to_toml(run.settings), *run_summary(run), sep="\n", file=sys.stderr)


def summarize_outcome(outcome: "Outcome", folder: str) -> str:
    """Return one sentence on how the run ended and how to continue it."""
    if outcome.diverged:
        return (
            f"the gradient or loss of step {outcome.diverged} is not finite, so that step was "
            f"discarded (a lower optimizer.lr may help); {how_to_resume(folder)}"
        )
    if outcome.unsaved:
        return f"step {outcome.step} was not saved: {outcome.unsaved}; {how_to_resume(folder)}"
    if outcome.stopped:
        name = signal.Signals(outcome.stopped).name
        return (
            f"stopped by {name} after step {outcome.step}; {folder} is saved, resume with "
            f"`{resume_command(folder)}`"
        )
    if outcome.loss is None:
        return f"{folder}: already finished ({outcome.step} steps); raise run.steps to continue"
    held_out = outcome.held_out_loss
    held_out_text = "" if held_out is None else f", held-out loss {held_out:.4f}"
    return (
        f"{folder}: {outcome.step} steps, loss {outcome.loss:.4f}{held_out_text}; try "
        f"`shardwise generate {shlex.quote(folder)} --prompt TEXT`"
    )


def how_to_resume(folder: str) -> str:
    """Return what a run that ended without saving resumes from, and the command."""
    from shardwise.formats.run_checkpoint import list_checkpoints

    saved = list_checkpoints(Path(folder) / "checkpoints")
    command = resume_command(folder)
    if saved:
        return f"resume from {saved[-1]} with `{command}`"
    return f"nothing was saved; `{command}` restarts from step 0"


def resume_command(folder: str) -> str:
    return f"shardwise train {shlex.quote(folder)} --resume"


def add_config(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="print a commented settings file to start from",
        description="Print every setting of `shardwise train` with its default and its meaning, "
        "as TOML.",
    )
    parser.set_defaults(run=run_config)


def run_config(args: argparse.Namespace) -> int:
    from shardwise.train.settings import Settings, to_toml

    print(json_text(asdict(Settings())) if args.json else to_toml(Settings(), explained=True))
    return 0
