"""Results of benchmarks: one row per figure and case, a case being a layout or a load."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure of one case."""

    name: str
    value: float
    unit: str
    case: str


def ratios_to_first(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Return the figures `names` of each later case over the first case, as `NAME CASE/FIRST`.

    A figure that a case lacks, or that is 0 in the first case, is left out.
    """
    values = {(row.case, row.name): row.value for row in rows}
    first, *others = dict.fromkeys(row.case for row in rows)
    return {
        f"{name} {case}/{first}": values[case, name] / values[first, name]
        for name in names
        for case in others
        if values.get((first, name)) and (case, name) in values
    }
