"""Tables as CSV files in the format of PyTorch's pipelining
(torch.distributed.pipelining.schedules, `_load_csv` and `_dump_csv` with "compute_only"): one line
per rank, one cell per step, `1F0` for the forward of micro-batch 0 through stage 1."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from shardwise.parallel.pipeline.actions import Action, Kind
from shardwise.parallel.pipeline.table import Table, replay

CELL = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})", re.ASCII)
LOWERED = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
MOST_BYTES = 100_000_000


def csv_text(table: Table) -> str:
    """Return a table as CSV: each action in the column of its step, where all actions take one
    step. Idle steps are empty cells."""
    lines: list[list[str]] = [[] for _ in table.ranks]
    for rank, action, start, _ in replay(table, lambda action: 1.0):
        lines[rank] += [""] * (round(start) - len(lines[rank]))
        lines[rank].append(str(action))
    return "".join(",".join(line) + "\n" for line in lines)


def read_csv(path: Path) -> Table:
    """Return the table in a file, with each stage on the rank that has its actions.

    A B whose micro-batch also has a W and no I is read as an I: PyTorch once wrote them so, as
    papers do. Raises ValueError for a file that cannot be read; `validate.validate` checks that the
    table can run.
    """
    if (num_bytes := path.stat().st_size) > MOST_BYTES:
        raise ValueError(
            f"{path} has {num_bytes:,} bytes; schedules of up to {MOST_BYTES:,} bytes can be read"
        )
    lines = path.read_text(encoding="utf-8-sig", errors="replace").rstrip("\r\n").split("\n")
    ranks = [
        read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    ]
    placement = {
        action.stage: rank for rank, actions in reversed([*enumerate(ranks)]) for action in actions
    }
    missing = next(stage for stage in count() if stage not in placement)
    if missing < max(placement):
        raise ValueError(
            f"{path} has stage {max(placement)} but no stage {missing}; number stages from 0"
        )
    num_microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    owners = tuple(placement[stage] for stage in range(len(placement)))
    return Table(tuple(map(tuple, with_split_backwards(ranks))), owners, num_microbatches)


def read_line(line: str, where: str) -> list[Action]:
    cells = [cell.strip(' "\r\t') for cell in line.split(",")]
    actions = [
        read_cell(cell, f"{where}, cell {number}")
        for number, cell in enumerate(cells, start=1)
        if cell
    ]
    if not actions:
        raise ValueError(
            f"{where} is empty; a schedule has one line per rank, such as 0F0,0F1,,0B0,0B1"
        )
    return actions


def read_cell(cell: str, where: str) -> Action:
    if match := CELL.fullmatch(cell):
        return Action(KINDS[match[2]], int(match[1]), int(match[3]))
    if LOWERED.fullmatch(cell):
        raise ValueError(
            f"{where}: {cell} belongs to a schedule that PyTorch has lowered; write it with F, B, "
            'I and W only (`_dump_csv(file, format="compute_only")`): transfers are added here'
        )
    if cell.endswith("OVERLAP_F_B"):
        raise ValueError(
            f"{where}: {cell} is two actions at a time; write one after the other, such as 0F1,1B0"
        )
    raise ValueError(
        f"{where}: {cell[:40]!r} is not an action; write stage, kind (F, B, I or W) and "
        "micro-batch, such as 1W2"
    )


def with_split_backwards(ranks: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the actions with I in place of each B that has a W but no I."""

    def keys(kind: Kind) -> set[tuple[int, int]]:
        return {
            (action.stage, action.microbatch)
            for actions in ranks
            for action in actions
            if action.kind == kind
        }

    split = keys("W") - keys("I")

    def as_split(action: Action) -> Action:
        is_half = action.kind == "B" and (action.stage, action.microbatch) in split
        return replace(action, kind="I") if is_half else action

    return [[as_split(action) for action in actions] for actions in ranks]
