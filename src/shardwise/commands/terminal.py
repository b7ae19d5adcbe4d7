"""Output of commands: results on stdout, progress and logs on stderr."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.measure.rows import Row
from shardwise.writing.json_text import json_text

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


def print_rows(
    rows: Sequence[Row], ratios: Mapping[str, float], case_key: str, as_json: bool
) -> None:
    """Print one line per figure and one column per case, then the ratios."""
    if as_json:
        print(json_text(rows_json(rows, ratios, case_key)))
        return
    from rich.table import Table

    cases = list(dict.fromkeys(row.case for row in rows))
    values = {(row.case, row.name): format_figure(row.value) for row in rows}
    table = Table("", "unit")
    for case in cases:
        table.add_column(case, justify="right")
    for name, unit in dict.fromkeys((row.name, row.unit) for row in rows):
        table.add_row(name, unit, *(values.get((case, name), "") for case in cases))
    result_console().print(table)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")


def rows_json(rows: Sequence[Row], ratios: Mapping[str, float], case_key: str) -> dict[str, Any]:
    """Return the JSON object of a benchmark; `case_key` is the key of a row's case."""
    return {
        "rows": [
            {"name": row.name, "value": row.value, "unit": row.unit, case_key: row.case}
            for row in rows
        ],
        "ratios": dict(ratios),
    }


def format_figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
