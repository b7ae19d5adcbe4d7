"""Write docs/commands.md, the command reference, from the parsers behind `shardwise --help`.

    python docs/generate_commands.py            # rewrite docs/commands.md
    python docs/generate_commands.py --check    # exit 1 if docs/commands.md is out of date

Tables rather than the help texts themselves, whose layout differs between versions of Python.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from shardwise.cli import build_parser

PAGE = Path(__file__).resolve().parent / "commands.md"

HEAD = """\
# Command reference

Generated from `shardwise --help` by `python docs/generate_commands.py`; do not edit by hand.

`MODEL` is a catalogue name (`llama-3.1-70b`), a parameter count (`70B`), a Hugging Face folder, a
`.gguf` file, a run folder, or a hub id (`org/name`); [supported.md](supported.md) lists the
families and file formats. A layout such as `dp2.tp4.z1` is explained in [layout.md](layout.md).

Every command takes `--help`, `--json` and `--debug`. With `--json`, one JSON object goes to stdout
and nothing else (`serve` prints none); progress and logs go to stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | ran, and the result is negative: does not fit, not equal, a rank failed |
| 2 | the request is invalid or impossible: one sentence on stderr, a traceback with `--debug` |
| 128 + n | stopped by signal n; a training run has saved a checkpoint |
"""

COMMON_FLAGS = ("--help", "--json", "--debug")


def cell(text: str) -> str:
    """Escape `text` for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def invocation(action: argparse.Action) -> str:
    """Return an argument as it is typed: `--gpus N`, `MODEL`, or `{train,serve}`."""
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return value
    flag = max(action.option_strings, key=len)
    return flag if action.nargs == 0 else f"{flag} {value}"


def usage(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    """Return one line with the required arguments; the optional ones are `[options]`."""
    words = [parser.prog]
    for action in actions:
        if not action.option_strings:
            optional = action.nargs in ("?", "*")
            words.append(f"[{invocation(action)}]" if optional else invocation(action))
        elif action.required:
            words.append(invocation(action))
    return " ".join([*words, "[options]"])


def table(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> Iterator[str]:
    formatter = parser._get_formatter()
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in actions:
        text = formatter._expand_help(action) if action.help else ""
        yield f"| `{invocation(action)}` | {cell(text)} |"


def section(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of one command."""
    groups: list[tuple[argparse._ArgumentGroup, list[argparse.Action]]] = []
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if not set(action.option_strings) & set(COMMON_FLAGS)
        ]
        if actions:
            groups.append((group, actions))
    every = [action for _, actions in groups for action in actions]
    yield f"## {parser.prog}"
    yield ""
    yield from textwrap.wrap(" ".join((parser.description or "").split()), 120)
    yield ""
    yield "```"
    yield usage(parser, every)
    yield "```"
    usual = [group for group in groups if group[0].title in ("positional arguments", "options")]
    if usual:
        yield ""
        yield from table(parser, [action for _, actions in usual for action in actions])
    for group, actions in groups:
        if (group, actions) not in usual:
            yield ""
            text = f"**{group.title}**" + (f": {group.description}" if group.description else "")
            yield from textwrap.wrap(" ".join(text.split()), 120)
            yield ""
            yield from table(parser, actions)
    yield ""


def render() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for parser in build_parser().leaves():
        lines += section(parser)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        is_current = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not is_current:
            print(
                "docs/commands.md is out of date: python docs/generate_commands.py", file=sys.stderr
            )
        return 0 if is_current else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
