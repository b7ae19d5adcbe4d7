"""Output of commands: results on stdout, progress and logs on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[str, float], None]
"""advance(description of the current work, fraction done from 0 to 1)."""
WIDTH = 120
"""Columns of a table that does not go to a terminal."""


def log(text: str) -> None:
    """Print a line on stderr, for people."""
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


def result_console(stderr: bool = False) -> "Console":
    """Return a console as wide as the terminal, or WIDTH columns wide without one."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Show a bar on stderr while the block runs; nothing if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda description, done: progress.update(
            task, description=description, completed=done
        )


def format_rate(per_s: float) -> str:
    """Format tokens per second: whole numbers, or two digits of slow rates."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"
