"""A timeline as text: one row per rank to scale, a small table, and the meaning of its numbers."""

from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Memory, held_forwards
from shardwise.plan.simulate import Timeline
from shardwise.plan.svg import COLOURS, MEANINGS, RGB, shade, stage_chunks

IDLE: RGB = (58, 63, 71)
MOST_ROWS = 64


def print_timeline(timeline: Timeline, title: str, memory: Memory, console: Console) -> None:
    console.print(f"[bold]{title}[/bold]")
    console.print(legend(timeline, has_colour(console)))
    peaks = timeline.peak_in_flight
    label = len(str(len(peaks) - 1))
    note = max(len("in flight"), len(str(max(peaks))))
    columns = max(1, console.width - label - note - 2)
    console.print(Text(f"{'':{label}} {'':{columns}} in flight", style="dim"))
    for rank in shown_ranks(len(peaks)):
        if rank is None:
            console.print("⋮")
        else:
            row = Text(f"{rank:{label}} ").append_text(
                picture(timeline, rank, columns, has_colour(console))
            )
            console.print(row.append(f" {peaks[rank]:>{note}}"), no_wrap=True, overflow="crop")
    console.print(figures(timeline, memory))
    console.print(meaning(timeline))


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def shown_ranks(num_ranks: int) -> list[int | None]:
    """Return the ranks to show: all, or the first and the last of very many."""
    if num_ranks <= MOST_ROWS:
        return [*range(num_ranks)]
    half = MOST_ROWS // 2
    return [*range(half), None, *range(num_ranks - half, num_ranks)]


def legend(timeline: Timeline, colour: bool) -> Text:
    used = {action.kind for actions in timeline.table.ranks for action in actions}
    text = Text()
    for kind in (kind for kind in COLOURS if kind in used):
        text.append(f" {kind} ", style=style(COLOURS[kind]) if colour else "").append(
            f" {MEANINGS[kind]}  "
        )
    if colour:
        return text.append("   ", style=style(IDLE)).append(" idle")
    return text.append(" ·  idle   lower case: every other micro-batch")


def style(background: RGB) -> str:
    return f"#14171a on #{''.join(f'{part:02x}' for part in background)}"


def picture(timeline: Timeline, rank: int, columns: int, colour: bool) -> Text:
    """Return the row of a rank: each cell has the colour of its actions, mixed where there are
    several."""
    actions = timeline.table.ranks[rank]
    starts = timeline.starts[rank]
    ends = timeline.ends[rank]
    scale = columns / timeline.makespan
    cells: list[list[tuple[float, Action]]] = [[] for _ in range(columns)]
    marks = [""] * columns
    for action, start, end in zip(actions, starts, ends, strict=True):
        first = start * scale
        last = end * scale
        for cell in range(int(first), min(columns, int(last) + 1)):
            cells[cell].append((min(last, cell + 1) - max(first, cell), action))
        label = str(action.microbatch)
        if last - first >= len(label) + 1.5:  # so that numbers never touch
            at = int((first + last - len(label)) / 2 + 0.5)
            marks[at : at + len(label)] = label
    chunk = stage_chunks(timeline.table)
    drawn = [
        (mark or (" " if colour else letter(shares)), style(mixed(shares, chunk)) if colour else "")
        for shares, mark in zip(cells, marks, strict=True)
    ]
    runs = groupby(drawn, key=lambda each: each[1])
    return Text.assemble(
        *(("".join(mark for mark, _ in run), background) for background, run in runs)
    )


def letter(shares: Sequence[tuple[float, Action]]) -> str:
    """Return the kind that fills most of a cell, in lower case for every other micro-batch, so that
    a micro-batch ends where the case changes."""
    idle = 1 - sum(share for share, _ in shares)
    most, action = max(shares, key=lambda each: each[0], default=(0.0, None))
    if action is None or most < idle:
        return "·"
    return action.kind.lower() if action.microbatch % 2 else action.kind


def mixed(shares: Sequence[tuple[float, Action]], chunk: Sequence[int]) -> RGB:
    parts = [
        (share, shade(action.kind, chunk[action.stage], max(chunk) + 1)) for share, action in shares
    ]
    parts.append((max(0.0, 1 - sum(share for share, _ in shares)), IDLE))
    red, green, blue = (round(sum(share * colour[i] for share, colour in parts)) for i in range(3))
    return min(red, 255), min(green, 255), min(blue, 255)


def figures(timeline: Timeline, memory: Memory) -> RichTable:
    values = {
        "bubble / total": f"{timeline.bubble_fraction:.2%}",
        "bubble / ideal": f"{timeline.bubble_over_ideal:.2%}",
        "idle / makespan": f"{timeline.idle_fraction:.2%}",
        "makespan": f"{timeline.makespan:.6g}",
        "most in flight": str(max(timeline.peak_in_flight)),
    }
    if memory.limit is not None:
        ranks = timeline.table.ranks
        most = max(max(held_forwards(actions, memory.mem_w)) for actions in ranks)
        limit = memory.limit * len(ranks)
        values["most held / limit"] = f"{most / timeline.table.chunks:.4g} / {limit:.4g}"
    table = RichTable(box=SIMPLE_HEAD, show_edge=False)
    for name in values:
        table.add_column(name, justify="right")
    table.add_row(*values.values())
    return table


def meaning(timeline: Timeline) -> Text:
    chunk = " of a chunk" if timeline.table.chunks > 1 else ""
    return Text(
        f"The slowest rank takes {timeline.span:.6g} from its first action to its last and works "
        f"{timeline.work:.6g} of it. The rest is bubble: {timeline.bubble_fraction:.1%} of the "
        f"total, {timeline.bubble_over_ideal:.1%} on top of the ideal. In flight are forwards"
        f"{chunk} whose backward is not complete; their activations are in memory.",
        style="dim",
    )
