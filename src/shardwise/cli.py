"""The frame of the command line: finds the subcommand, runs it, and turns a user's mistake into one
sentence.

Exit codes: 0 done; 1 ran, and the answer is no; 2 the request cannot be understood or satisfied;
130 interrupted. Each command lives in `shardwise.commands` as `add_X(subparsers)`, which declares
its flags and sets `run`, and `run_X(args) -> int`, which imports what it needs: neither help nor
planning may wait for torch.
"""

import argparse
import io
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwise.commands.bench import add_bench
from shardwise.commands.convert import add_convert
from shardwise.commands.data import add_data
from shardwise.commands.demo import add_demo
from shardwise.commands.eval import add_eval
from shardwise.commands.generate import add_generate
from shardwise.commands.parity import add_parity
from shardwise.commands.plan import add_plan
from shardwise.commands.schedule import add_schedule
from shardwise.commands.serve import add_serve
from shardwise.commands.train import add_config, add_train
from shardwise.suggest import nearest

COMMANDS = (
    add_plan, add_schedule, add_data, add_config, add_train, add_parity, add_convert, add_eval, add_generate, add_serve,
    add_bench, add_demo,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Raises ValueErrors, so that its errors end like every other mistake. A flag is written out,
    since a guessed abbreviation changes its meaning when a flag is added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    @property
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` tells more")


class PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"{parser.prog} {version('shardwise')}")
        except PackageNotFoundError:
            print(f"{parser.prog} (run from its source, not installed)")
        parser.exit()


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and those of its subcommands by name."""
    parser = Parser(
        prog="shardwise", description="Plan, train and serve language models cut over many devices."
    )
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print the version and exit"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add_command in COMMANDS:
        add_command(subparsers)
    commands: dict[str, Parser] = dict(subparsers.choices)
    for command in commands.values():
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout and nothing else"
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, commands


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ValueError for an unknown command or flag, with the nearest that exists."""
    parser, commands = build_parser()
    first = argv[0] if argv else ""
    if not first:
        raise ValueError(f"say what to do: {', '.join(commands)}; `shardwise --help` tells more")
    if not first.startswith("-") and first not in commands:
        near = nearest(first, commands, most=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(commands)}"
        raise ValueError(f"there is no command {first!r}; {hint}")
    if first in commands:
        check_flags(first, argv[1:], commands[first].flags)
    return parser.parse_args(argv)


def check_flags(command: str, words: Sequence[str], flags: list[str]) -> None:
    for word in itertools.takewhile(lambda word: word != "--", words):
        flag = word.split("=")[0]
        if flag.startswith("--") and flag not in flags:
            near = nearest(flag, flags, most=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"`shardwise {command} --help` lists what it takes"
            )
            raise ValueError(f"{command} does not take {flag}; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without Unicode loses a bar, not the answer
    warnings.showwarning = show_warning
    try:
        args = parse(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse after --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return 130
    except (
        BrokenPipeError
    ):  # the reader, such as `head`, has seen enough; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        sentence = user_sentence(error)
        if sentence is None:
            raise
        if "--debug" in argv:
            traceback.print_exc()
        print(f"shardwise: {sentence}", file=sys.stderr)
        return 2


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"shardwise: {message}", file=sys.stderr)


def open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) is None to Python; what goes there is to go
    nowhere."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def user_sentence(error: ValueError | OSError) -> str | None:
    """What to tell the user; None for an error that is ours."""
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    if error.strerror is None:
        return None
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
