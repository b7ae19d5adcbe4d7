"""Where commands write: the answer to stdout, the progress of what takes a while to stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[str, float], None]
"""advance(what is being done, how much of it is done from 0 to 1)."""


def say(text: str) -> None:
    """A line for people, beside the answer."""
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


def answer_console(stderr: bool = False) -> "Console":
    """A console as wide as the terminal, and wide enough for a table where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=120)


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """A bar while the block runs; on what is no terminal, nothing."""
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
        yield lambda what, done: progress.update(task, description=what, completed=done)
