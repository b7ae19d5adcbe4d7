"""Timelines as SVG, drawn in plain Python; readable on light and dark pages."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from xml.sax.saxutils import escape

from shardwise.parallel.pipeline.table import Table
from shardwise.plan.simulate import Timeline

RGB = tuple[int, int, int]
COLOURS: dict[str, RGB] = {
    "F": (108, 166, 240),
    "B": (240, 138, 93),
    "I": (246, 189, 80),
    "W": (112, 193, 140),
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}
WIDTH = 1200
LEFT = 62
RIGHT = 18
TOP = 86
PANEL_GAP = 34
BOTTOM = 52
PLOT_WIDTH = WIDTH - LEFT - RIGHT
STYLE = """
.paper { fill: #ffffff; } .idle { fill: #eef0f3; } .line { stroke: #afb8c1; }
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .idle { fill: #22272e; } .line { stroke: #545d68; }
text { fill: #e6edf3; }
}
.number { fill: #14171a; font-size: inherit; text-anchor: middle; }
"""


def stage_chunks(table: Table) -> list[int]:
    """Return the chunk of each virtual stage: its index among the stages of its rank."""
    counts: defaultdict[int, Iterator[int]] = defaultdict(count)
    return [next(counts[rank]) for rank in table.placement]


def shade(kind: str, chunk: int, chunks: int) -> RGB:
    """Return the colour of a kind of action, paler for earlier chunks."""
    pale = 0.55 * (chunks - 1 - chunk) / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * pale) for part in COLOURS[kind])
    return red, green, blue


def draw_timelines(title: str, panels: Sequence[tuple[str, Timeline]], unit: str) -> str:
    """Return an SVG of timelines. Each rank is a row, time runs from left to right, and each action
    is as wide as it is long, with the number of its micro-batch where that fits. Panels are
    stacked, with a caption each, on one scale of time in `unit`."""
    timelines = [timeline for _, timeline in panels]
    row = min(28.0, max(5.0, 480 / len(timelines[0].starts)))
    tops = [
        TOP + index * (row * len(timelines[0].starts) + PANEL_GAP) for index in range(len(panels))
    ]
    bottom = tops[-1] + row * len(timelines[0].starts)
    height = round(bottom + BOTTOM)
    end = max(timeline.makespan for timeline in timelines)
    chunk = stage_chunks(timelines[0].table)
    kinds = {action.kind for actions in timelines[0].table.ranks for action in actions}
    size = f'width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size}>',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}{''.join(fills(max(chunk) + 1))}</style>",
        f'<rect class="paper" {size} rx="6"/>',
        svg_text(LEFT, 28, title, kind="title"),
        *svg_legend([kind for kind in COLOURS if kind in kinds], max(chunk) + 1),
    ]
    for (label, timeline), top in zip(panels, tops, strict=True):
        parts += [
            svg_text(LEFT, 48 if top == TOP else top - 8, label),
            *rows(timeline, top, row, chunk, PLOT_WIDTH / end),
        ]
    return "\n".join([*parts, *axis(end, height - BOTTOM + 3, unit), "</svg>", ""])


def caption(timeline: Timeline) -> str:
    return (
        f"bubble {timeline.bubble_fraction:.2%} of the total, "
        f"{timeline.bubble_over_ideal:.2%} over the ideal; makespan {timeline.makespan:.6g}; "
        f"at most {max(timeline.peak_in_flight)} forwards in flight"
    )


def svg_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    attributes = f' text-anchor="{anchor}"' * (anchor != "start") + f' class="{kind}"' * bool(kind)
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def fills(chunks: int) -> Iterator[str]:
    """Yield a style for each kind and chunk."""
    for kind in COLOURS:
        for chunk in range(chunks):
            colour = "".join(f"{part:02x}" for part in shade(kind, chunk, chunks))
            yield f".{kind}{chunk} {{ fill: #{colour}; }}\n"


def svg_legend(kinds: list[str], chunks: int) -> Iterator[str]:
    x = LEFT
    meanings = [(kind, f"{kind} {MEANINGS[kind]}") for kind in kinds]
    for kind, meaning in [*meanings, ("idle", "idle")]:
        colour = "idle" if kind == "idle" else f"{kind}{chunks - 1}"
        yield f'<rect x="{x}" y="60" width="12" height="12" class="{colour}"/>'
        yield svg_text(x + 17, 70, meaning)
        x += 42 + 6 * len(meaning)
    if chunks > 1:
        yield svg_text(x, 70, f"paler: earlier of the {chunks} chunks of a rank")


def rows(
    timeline: Timeline, top: float, row: float, chunk: list[int], scale: float
) -> Iterator[str]:
    every = math.ceil(11 / row)  # names where they fit
    for rank in range(len(timeline.starts)):
        y = top + rank * row
        if rank % every == 0:
            yield svg_text(LEFT - 8, y + row / 2 + 4, f"rank {rank}", "end")
        yield from bars(timeline, rank, y, row, chunk, scale)


def bars(
    timeline: Timeline, rank: int, y: float, row: float, chunk: list[int], scale: float
) -> Iterator[str]:
    """Yield the row of one rank. All bars of one colour are one path, which keeps large pictures
    small."""
    height = row - (2 if row > 12 else 1)
    font = min(11.0, 0.5 * row)
    paths: defaultdict[str, list[str]] = defaultdict(list)
    numbers = []
    for action, start, end in zip(
        timeline.table.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        x = LEFT + start * scale
        width = (end - start) * scale
        width = max(width - 0.8, 0.75 * width)  # leaves a gap to the next one
        paths[f"{action.kind}{chunk[action.stage]}"].append(
            f"M{x:.1f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z"
        )
        number = str(action.microbatch)
        if font >= 6 and 0.6 * font * len(number) + 1 <= width:
            numbers.append(
                svg_text(x + width / 2, y + height / 2 + 0.35 * font, number, kind="number")
            )
    yield f'<rect class="idle" x="{LEFT}" y="{y:.1f}" width="{PLOT_WIDTH}" height="{height:.1f}"/>'
    for kind, path in paths.items():
        yield f'<path class="{kind}" d="{"".join(path)}"/>'
    yield f'<g style="font-size: {font:.1f}px">{"".join(numbers)}</g>'


def axis(makespan: float, y: float, unit: str) -> Iterator[str]:
    """Yield the axis of time, with ticks at round numbers."""
    yield f'<line class="line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    for tick in round_ticks(makespan):
        x = LEFT + PLOT_WIDTH * tick / makespan
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 5:.1f}"/>'
        yield svg_text(x, y + 19, f"{tick:.10g}", "middle")
    yield svg_text(WIDTH - RIGHT, y + 37, f"time, in {unit}", "end")


def round_ticks(end: float, most: int = 12) -> list[float]:
    """Return at most `most` round numbers from 0 to `end` in even steps."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10, 20) if power * nice * (most - 1) >= end)
    return [step * number for number in range(math.floor(end / step + 1e-9) + 1)]
