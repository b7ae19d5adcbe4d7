"""Tables as CSV files in the form that PyTorch's pipelining reads and writes
(torch.distributed.pipelining.schedules, `_load_csv` and `_dump_csv` with "compute_only"): a line a
rank, a cell a step, `1F0` for the forward of micro-batch 0 through stage 1."""

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
    """Each action in the column of the step in which it comes where all take one step; idle steps
    are empty cells."""
    lines: list[list[str]] = [[] for _ in table.ranks]
    for rank, action, start, _ in replay(table, lambda action: 1.0):
        lines[rank] += [""] * (round(start) - len(lines[rank]))
        lines[rank].append(str(action))
    return "".join(",".join(line) + "\n" for line in lines)


def read_csv(path: Path) -> Table:
    """The table of a file, with the stages on the ranks that have them. A B whose micro-batch has a
    W and no I is read as an I: PyTorch once wrote them so, as papers do. Raises ValueError for what
    cannot be read; whether the table can run, `validate.validate` tells."""
    if (num_bytes := path.stat().st_size) > MOST_BYTES:
        raise ValueError(
            f"{path} has {num_bytes:,} bytes; schedules of up to {MOST_BYTES:,} are read"
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
            f"{path} has a stage {max(placement)} and none of number {missing}; stages count from 0 up"
        )
    num_microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    owners = tuple(placement[stage] for stage in range(len(placement)))
    return Table(tuple(map(tuple, halved(ranks))), owners, num_microbatches)


def read_line(line: str, where: str) -> list[Action]:
    cells = [cell.strip(' "\r\t') for cell in line.split(",")]
    actions = [
        read_cell(cell, f"{where}, cell {number}")
        for number, cell in enumerate(cells, start=1)
        if cell
    ]
    if not actions:
        raise ValueError(
            f"{where} is empty; a schedule has a line for each rank, such as 0F0,0F1,,0B0,0B1"
        )
    return actions


def read_cell(cell: str, where: str) -> Action:
    if match := CELL.fullmatch(cell):
        return Action(KINDS[match[2]], int(match[1]), int(match[3]))
    if LOWERED.fullmatch(cell):
        raise ValueError(
            f"{where}: {cell} is of a schedule that PyTorch has lowered; give the one with F, B, I and W alone "
            '(`_dump_csv(file, format="compute_only")`), since transfers are put in here'
        )
    if cell.endswith("OVERLAP_F_B"):
        raise ValueError(
            f"{where}: {cell} is two actions at a time; write them one after the other, such as 0F1,1B0"
        )
    raise ValueError(
        f"{where}: {cell[:40]!r} is no action; write stage, F, B, I or W, and micro-batch, such as 1W2"
    )


def halved(ranks: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """With the Bs that have a W beside them, and no I, as Is."""

    def those(kind: Kind) -> set[tuple[int, int]]:
        return {
            (action.stage, action.microbatch)
            for actions in ranks
            for action in actions
            if action.kind == kind
        }

    split = those("W") - those("I")

    def read_as(action: Action) -> Action:
        half = action.kind == "B" and (action.stage, action.microbatch) in split
        return replace(action, kind="I") if half else action

    return [[read_as(action) for action in actions] for actions in ranks]
