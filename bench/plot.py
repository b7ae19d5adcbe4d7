"""Bar charts as SVG, drawn in plain Python, for light and dark pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 1080
PANEL_HEIGHT = 260
LEGEND_HEIGHT = 34
LEFT = 80
RIGHT = 20
TOP = 54
BOTTOM = 46
BAR_SLOT = 50
"""The least width of a bar with its label."""
FLOOR = PANEL_HEIGHT - BOTTOM
SPAN = PANEL_HEIGHT - BOTTOM - TOP
STYLE = """
.paper { fill: #ffffff; } .line { stroke: #d0d7de; }
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.bar0 { fill: #0b62c4; } .bar1 { fill: #c2570c; } .bar2 { fill: #6b7280; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .line { stroke: #3d444d; } text { fill: #e6edf3; }
.bar0 { fill: #6cb2ff; } .bar1 { fill: #ff9d57; } .bar2 { fill: #9aa4b2; }
}
.title { font-size: 14px; font-weight: 600; } .small { font-size: 10px; }
"""
MOST_SERIES = 3


@dataclass(frozen=True)
class Bar:
    """One bar: `name` is its label, `series` decides its colour."""

    name: str
    series: str
    value: float


@dataclass(frozen=True)
class Panel:
    """One chart: `unit` and `across` label its axes; `groups` are bars by the label of their
    group."""

    title: str
    unit: str
    across: str
    groups: Mapping[str, Sequence[Bar]]

    @property
    def slots(self) -> int:
        """Its bars, and the width of one more around each group."""
        return sum(len(group) + 1 for group in self.groups.values())

    @property
    def ticks(self) -> list[float]:
        return ticks_up_to(
            max((bar.value for group in self.groups.values() for bar in group), default=0.0)
        )


def draw(panels: Sequence[Panel], series: Sequence[str]) -> str:
    """Return an SVG of the panels in rows, small ones side by side, with a legend of up to three
    series."""
    assert len(series) <= MOST_SERIES
    rows = arrange(panels)
    height = LEGEND_HEIGHT + len(rows) * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        *legend(series),
    ]
    for number, row in enumerate(rows):
        left = 0.0
        top = LEGEND_HEIGHT + number * PANEL_HEIGHT
        stretch = (WIDTH - len(row) * (LEFT + RIGHT)) / max(1, sum(panel.slots for panel in row))
        for panel in row:
            width = LEFT + panel.slots * stretch + RIGHT
            drawn = [*axes(panel, width), *bars(panel, series, width)]
            parts += [f'<g transform="translate({left:.1f} {top})">', *drawn, "</g>"]
            left += width
    return "\n".join([*parts, "</svg>", ""])


def arrange(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Return the panels in rows, in order, as many per row as fit."""
    rows: list[list[Panel]] = []
    left = 0
    for panel in panels:
        needed = LEFT + panel.slots * BAR_SLOT + RIGHT
        if needed > left:
            rows.append([])
            left = WIDTH
        rows[-1].append(panel)
        left -= needed
    return rows


def legend(series: Sequence[str]) -> list[str]:
    parts = []
    x = LEFT
    for name in series:
        parts.append(
            f'<rect x="{x}" y="14" width="12" height="12" class="bar{series.index(name)}"/>'
        )
        parts.append(text_at(x + 18, 24, name, "start"))
        x += 40 + 8 * len(name)
    return parts


def axes(panel: Panel, width: float) -> list[str]:
    parts = [
        text_at(LEFT, 24, panel.title, "start", "title"),
        f'<g transform="translate(16 {FLOOR - SPAN / 2}) rotate(-90)">'
        f"{text_at(0, 0, panel.unit)}</g>",
        text_at(LEFT - 8, FLOOR + 34, panel.across, "end"),
    ]
    for tick in panel.ticks:
        y = FLOOR - SPAN * tick / panel.ticks[-1]
        parts.append(
            f'<line class="line" x1="{LEFT}" x2="{width - RIGHT:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(text_at(LEFT - 8, y + 4, f"{tick:,.10g}", "end"))
    return parts


def bars(panel: Panel, series: Sequence[str], width: float) -> list[str]:
    """Return the groups side by side, with the width of one bar between them."""
    slot = (width - LEFT - RIGHT) / max(1, panel.slots)
    x = LEFT + slot / 2
    parts = []
    for group_name, group in panel.groups.items():
        parts.append(text_at(x + slot * len(group) / 2, FLOOR + 34, group_name, kind="title"))
        for bar in group:
            height = SPAN * bar.value / panel.ticks[-1]
            parts += one_bar(bar, x, slot, height, f"bar{series.index(bar.series)}")
            x += slot
        x += slot
    return parts


def one_bar(bar: Bar, x: float, slot: float, height: float, kind: str) -> list[str]:
    middle = x + slot / 2
    width = slot * 0.8
    return [
        f'<rect x="{middle - width / 2:.1f}" y="{FLOOR - height:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" class="{kind}"><title>{escape(bar.series)}, {escape(bar.name)}: '
        f"{bar.value:,.0f}</title></rect>",
        text_at(middle, FLOOR - height - 5, f"{bar.value:,.0f}"),
        text_at(middle, FLOOR + 15, bar.name, kind="small"),
    ]


def text_at(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def ticks_up_to(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest` in even steps, nine at most."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(nice * power for nice in (1, 2, 2.5, 5) if nice * power <= rough)
    return [step * number for number in range(math.ceil(highest / step) + 1)]
