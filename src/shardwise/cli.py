"""The command line: finds the command, runs it, and turns a user's mistake into one sentence.

Exit codes: 0 done; 1 ran with a negative result; 2 the request cannot be understood or satisfied;
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
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
from shardwise.writing.lasting_stream import lasting

PROG = "shardwise"
MAX_SENTENCE = 1500
COMMANDS = (
    add_plan, add_schedule, add_data, add_config, add_train, add_parity, add_convert, add_eval,
    add_generate, add_serve, add_bench, add_demo,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError, so that its errors end like every other mistake.

    Flags cannot be abbreviated: an abbreviation would change its meaning when a flag is added.
    `other_names` maps flags of other software to flags of this parser.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.other_names: Mapping[str, str] = {}

    @property
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def subcommands(self) -> dict[str, "Parser"]:
        """The parsers of `COMMAND X`, by X; empty for a command that has none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def leaves(self) -> Iterator["Parser"]:
        """Yield the parsers below this one that run something."""
        for parser in self.subcommands.values():
            yield from parser.leaves()
        if not self.subcommands:
            yield self

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see `{self.prog} --help`")


class PrintVersion(argparse.Action):
    """Print the version, which is looked up only when needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"{parser.prog} {version('shardwise')}")
        except PackageNotFoundError:
            print(f"{parser.prog} (run from its source, not installed)")
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(
        prog=PROG, description="Plan, train and serve language models sharded over many devices."
    )
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print the version and exit"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add_command in COMMANDS:
        add_command(subparsers)
    for command in parser.leaves():
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout and nothing else"
        )
        command.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Raises ValueError for an unknown command or flag, with the nearest."""
    parser = build_parser()
    check_words(parser, argv, {})
    return parser.parse_args(argv)


def check_words(parser: Parser, words: Sequence[str], siblings: Mapping[str, Parser]) -> None:
    """Raise ValueError if `words` name no command of `parser`, or a flag that it does not take.
    `siblings` are the other subcommands of its command, by name."""
    commands = parser.subcommands
    first = words[0] if words else ""
    if first in commands:
        others = {other.prog: other for name, other in commands.items() if name != first}
        check_words(commands[first], words[1:], others if parser.prog != PROG else {})
    elif commands and (not first or (first.startswith("-") and first not in parser.flags)):
        raise ValueError(f"choose a command: {', '.join(commands)}; see `{parser.prog} --help`")
    elif commands and not first.startswith("-"):
        near = nearest(first, commands, most=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(commands)}"
        raise ValueError(f"unknown command {first!r}; {hint}")
    elif parser.prog != PROG:
        check_flags(parser, words, siblings)


def check_flags(parser: Parser, words: Sequence[str], siblings: Mapping[str, Parser]) -> None:
    """Raise ValueError for a flag that `parser` does not take, with the command that does or the
    nearest flag."""
    for word in itertools.takewhile(lambda word: word != "--", words):
        flag = word.split("=")[0]
        if not flag.startswith("--") or flag in parser.flags:
            continue
        name = parser.prog.removeprefix(f"{PROG} ")
        for sibling, other in siblings.items():
            if flag in other.flags:
                other_name = sibling.removeprefix(f"{PROG} ")
                raise ValueError(f"{flag} is a flag of `{other_name}`, not of `{name}`")
        near = nearest(flag, parser.flags, most=1)
        if flag in parser.other_names:
            near = [parser.other_names[flag]]
        hint = f"did you mean {near[0]}?" if near else f"see `{parser.prog} --help`"
        raise ValueError(f"{name} does not take {flag}; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. What stderr does not take is dropped."""
    argv = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode loses only a bar
    warnings.showwarning = show_warning
    with redirect_stderr(lasting(sys.stderr)):
        return run_command(argv)


def run_command(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse after --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: Python's flush at exit must not fail.
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
    """Replace streams that the caller closed (`>&-`), which are None in Python, by /dev/null."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def user_sentence(error: ValueError | OSError) -> str | None:
    """Return the error message for the user, or None for a fault of Shardwise itself. It is cut
    where a library has quoted all of a file."""
    if isinstance(error, ValueError):
        sentence = " ".join(str(error).split())
        return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[:MAX_SENTENCE]} ..."
    if error.strerror is None:
        return None
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
