"""Output of `shardwise bench`: rows of figures as a table, or as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.commands.terminal import result_console
from shardwise.measure.rows import Row


def print_rows(
    rows: Sequence[Row], ratios: Mapping[str, float], case_key: str, as_json: bool
) -> None:
    """Print one line per figure and one column per case, then the ratios."""
    if as_json:
        print(json.dumps(rows_json(rows, ratios, case_key)))
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
