"""What the runs of `bench/train.py` come to: each system's figures, ratios to the best peer of a stage, and these as
JSON, as tables and as a plot.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from plot import Bar, Panel, draw
from rich.table import Table

if TYPE_CHECKING:
    from shardwise.train.profile import Breakdown

SPEED_BAR, PEAK_BAR = 1.1, 0.85
"""What is wanted of ours: at least so many times the tokens/s of the best peer, at most so many times its memory."""


@dataclass(frozen=True)
class Contender:
    """Something that takes the training step: `key` is how it is started, `label` what a bar or row is called."""

    key: str
    maker: str
    label: str


SHARDWISE, PYTORCH, DEEPSPEED = "Shardwise", "PyTorch", "DeepSpeed"
DDP = Contender("ddp", PYTORCH, "DDP")
ZERO_OPTIMIZER = Contender("zero_optimizer", PYTORCH, "DDP + Zero")
FSDP2_KEEP = Contender("fsdp2_keep", PYTORCH, "FSDP2 keep")
FSDP2 = Contender("fsdp2", PYTORCH, "FSDP2")
DEEPSPEEDS = {stage: Contender(f"deepspeed{stage}", DEEPSPEED, f"ZeRO-{stage}") for stage in (1, 2, 3)}


@dataclass(frozen=True)
class Stage:
    """One thing to do, the layout of ours that does it, and what else does. `judged`: held against the bars; `fsdp` is
    PyTorch's own code behind our interface, and is not."""

    name: str
    layout: str
    peers: tuple[Contender, ...]
    judged: bool = True

    @property
    def ours(self) -> Contender:
        return Contender(self.layout, SHARDWISE, self.layout)


STAGES = (
    Stage("dp", "dp2", (DDP,)),
    Stage("z1", "dp2.z1", (ZERO_OPTIMIZER, DEEPSPEEDS[1])),
    Stage("z2", "dp2.z2", (FSDP2_KEEP, DEEPSPEEDS[2])),
    Stage("z3", "dp2.z3", (FSDP2, DEEPSPEEDS[3])),
    Stage("fsdp", "dp2.fsdp", (FSDP2,), judged=False),
)


@dataclass(frozen=True)
class Figures:
    """Of one run, or of several: the best speed, since what disturbs a run only slows it, and the median peak."""

    tokens_per_s: float
    peak_resident_mb: float


def summarize(runs: Sequence[Figures]) -> Figures:
    return Figures(max(run.tokens_per_s for run in runs), statistics.median(run.peak_resident_mb for run in runs))


@dataclass(frozen=True)
class Ratio:
    """Ours to the best peer of a stage: the fastest for speed, the smallest for memory."""

    stage: str
    speed: float
    peak: float
    fastest: str
    smallest: str
    judged: bool

    @property
    def met(self) -> bool:
        return self.speed >= SPEED_BAR and self.peak <= PEAK_BAR


def compare(stages: Sequence[Stage], figures: Mapping[str, Figures]) -> list[Ratio]:
    """Of each stage in which ours and at least one peer ran."""
    ratios = []
    for stage in stages:
        ran = [peer for peer in stage.peers if peer.key in figures]
        if stage.layout not in figures or not ran:
            continue
        ours = figures[stage.layout]
        fastest = max(ran, key=lambda peer: figures[peer.key].tokens_per_s)
        smallest = min(ran, key=lambda peer: figures[peer.key].peak_resident_mb)
        speed = ours.tokens_per_s / figures[fastest.key].tokens_per_s
        peak = ours.peak_resident_mb / figures[smallest.key].peak_resident_mb
        ratios.append(Ratio(stage.name, speed, peak, full_name(fastest), full_name(smallest), stage.judged))
    return ratios


def full_name(contender: Contender) -> str:
    return f"{contender.maker} {contender.label}"


@dataclass(frozen=True)
class Report:
    """All of one comparison. `failed` holds what did not run, by key, with the last line of its error."""

    stages: Sequence[Stage]
    runs: Mapping[str, Sequence[Figures]]
    failed: Mapping[str, str]
    machine: Mapping[str, str | int]

    @property
    def figures(self) -> dict[str, Figures]:
        return {key: summarize(runs) for key, runs in self.runs.items()}

    @property
    def ratios(self) -> list[Ratio]:
        return compare(self.stages, self.figures)

    def to_json(self) -> dict[str, object]:
        """`rows` and `ratios` as every bench prints them, then each single run."""
        units = {"tokens_per_s": "tokens/s", "peak_resident_mb": "MiB"}
        rows = [
            {"name": name, "value": value, "unit": units[name], "of": key}
            for key, figures in self.figures.items()
            for name, value in asdict(figures).items()
        ]
        ratios = {f"tokens_per_s {ratio.stage}": ratio.speed for ratio in self.ratios}
        ratios |= {f"peak_resident_mb {ratio.stage}": ratio.peak for ratio in self.ratios}
        runs = {key: [asdict(run) for run in runs] for key, runs in self.runs.items()}
        told = {"failed": dict(self.failed), "runs": runs, "machine": dict(self.machine)}
        return {"rows": rows, "ratios": ratios, **told}

    def lines(self) -> list[tuple[str, ...]]:
        """Stage, what, tokens/s, peak, and for ours both ratios and what is said of them."""
        figures, ratios = self.figures, {ratio.stage: ratio for ratio in self.ratios}
        lines: list[tuple[str, ...]] = []
        for stage in self.stages:
            for contender in (stage.ours, *stage.peers):
                name = full_name(contender)
                if contender.key not in figures:
                    lines.append((stage.name, name, "-", "-", "", "", "failed"))
                    continue
                each, ratio = figures[contender.key], ratios.get(stage.name)
                told = ("", "", "")
                if ratio and contender == stage.ours:
                    verdict = ("met" if ratio.met else "missed") if ratio.judged else "not judged"
                    told = (f"{ratio.speed:.2f}", f"{ratio.peak:.2f}", verdict)
                lines.append((stage.name, name, f"{each.tokens_per_s:,.0f}", f"{each.peak_resident_mb:,.0f}", *told))
        return lines

    @property
    def columns(self) -> tuple[str, ...]:
        return ("stage", "what", "tokens/s", "peak MiB", f"speed, ≥ {SPEED_BAR}", f"memory, ≤ {PEAK_BAR}", "")

    def to_table(self) -> Table:
        table = Table(title="Training steps, ours to the best peer of the same stage", title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("stage", "what", "") else "right")
        lines = self.lines()
        for at, line in enumerate(lines):
            table.add_row(*line, end_section=line[0] != (lines[at + 1][0] if at + 1 < len(lines) else ""))
        return table

    def to_markdown(self) -> str:
        rows = [self.columns, ("---",) * len(self.columns), *self.lines()]
        parts = ["# Training steps: ours and others", ""]
        parts += [", ".join(f"{name} {value}" for name, value in self.machine.items()) + ".", ""]
        parts += ["| " + " | ".join(row) + " |" for row in rows]
        if self.failed:
            parts += ["", *(f"{key} failed: {reason}" for key, reason in self.failed.items())]
        return "\n".join([*parts, "", "![tokens per second and peak memory by stage](train.svg)", ""])

    def to_svg(self) -> str:
        panels = [
            Panel(title, unit, "stage", self.bars(name))
            for title, unit, name in (
                ("Speed: more is better", "tokens/s", "tokens_per_s"),
                ("Peak resident memory of a rank: less is better", "MiB", "peak_resident_mb"),
            )
        ]
        return draw(panels, (SHARDWISE, PYTORCH, DEEPSPEED))

    def bars(self, name: str) -> dict[str, list[Bar]]:
        return {
            stage.name: [
                Bar(contender.label, contender.maker, getattr(self.figures[contender.key], name))
                for contender in (stage.ours, *stage.peers)
                if contender.key in self.figures
            ]
            for stage in self.stages
        }


def profile_table(breakdown: "Breakdown") -> Table:
    total, limits = sum(breakdown.seconds.values()), breakdown.limits
    table = Table(
        title=f"{breakdown.layout}: a step of {breakdown.step_s:.2f} s, {total:.2f} s under the profiler",
        caption=f"At once on every rank: products {limits.product_flops / 1e9:,.0f} GFLOP/s, copies "
        f"{limits.copy_bytes / 1e9:.1f} GB/s, all-gather {limits.gather_bytes / 1e9:.2f} GB/s",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for column in ("what", "seconds", "share", "at the machine's limit, s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for group, seconds in breakdown.seconds.items():
        needed = breakdown.needed.get(group)
        table.add_row(group, f"{seconds:.3f}", f"{seconds / total:.0%}", "" if needed is None else f"{needed:.3f}")
    return table
