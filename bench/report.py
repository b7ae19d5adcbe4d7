"""The report of `bench/train.py`: figures of each system and ratios to the best peer of a stage, as
JSON, tables and a plot."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plot import Bar, Panel, draw
from rich.table import Table

if TYPE_CHECKING:
    from profile_train import Breakdown

    from shardwise.measure.train_step import Workload


@dataclass(frozen=True)
class Bars:
    """Goals for Shardwise: a least ratio of tokens/s to the best peer, a largest ratio of peak
    memory."""

    speed: float
    peak: float | None = None

    def met(self, speed: float, peak: float) -> bool:
        return speed >= self.speed and (self.peak is None or peak <= self.peak)


DATA_BARS = Bars(1.1, 0.85)
TENSOR_BARS = Bars(1.2)
CONTEXT_BARS = Bars(1.0)
PIPELINE_BARS = Bars(1.1)


@dataclass(frozen=True)
class Contender:
    """A system that runs training steps: `key` starts it, `label` is its name in the report."""

    key: str
    maker: str
    label: str


SHARDWISE = "Shardwise"
PYTORCH = "PyTorch"
DEEPSPEED = "DeepSpeed"
DDP = Contender("ddp", PYTORCH, "DDP")
ZERO_OPTIMIZER = Contender("zero_optimizer", PYTORCH, "DDP + Zero")
FSDP2_KEEP = Contender("fsdp2_keep", PYTORCH, "FSDP2 keep")
FSDP2 = Contender("fsdp2", PYTORCH, "FSDP2")
DEEPSPEEDS = {
    stage: Contender(f"deepspeed{stage}", DEEPSPEED, f"ZeRO-{stage}") for stage in (1, 2, 3)
}
DTENSORS = (
    Contender("dtensor", PYTORCH, "DTensor"),
    Contender("dtensor_sp", PYTORCH, "DTensor SP"),
)
CONTEXTS = (
    Contender("context_ddp", PYTORCH, "CP DDP"),
    Contender("context_fsdp2", PYTORCH, "CP FSDP2"),
)
PIPELINES = {
    key: Contender(f"pipeline_{key}", PYTORCH, f"PP {label}")
    for key, label in (
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("interleaved", "Interleaved"),
        ("zb1p", "ZB1P"),
    )
}


@dataclass(frozen=True)
class Work:
    """Training work that all contenders of a stage share, as arguments of `shardwise bench train`;
    None is its default."""

    model: Path | None = None
    length: int | None = None
    sequences: int | None = None

    @property
    def words(self) -> list[str]:
        """Arguments of its command line."""
        named = {"--length": self.length, "--sequences": self.sequences}
        options = [word for name, number in named.items() if number for word in (name, str(number))]
        return [*([str(self.model)] if self.model else []), *options]

    @property
    def workload(self) -> "Workload":
        from shardwise.commands.bench import find_workload

        return find_workload(str(self.model) if self.model else None, self.length, self.sequences)

    @property
    def title(self) -> str:
        from shardwise.params import model_specs

        workload = self.workload
        num_weights = sum(spec.numel for spec in model_specs(workload.config) if not spec.tied_to)
        return f"{num_weights / 1e6:.1f} M, {workload.sequences} x {workload.length} tokens"


EVEN_HEADS = Path(__file__).resolve().parent / "llama-63m"
"""A shape near that of the other stages, with an even number of heads and KV heads."""
DATA_WORK = Work()
TENSOR_WORK = Work(EVEN_HEADS)
CONTEXT_WORK = Work(EVEN_HEADS, length=4096, sequences=1)
PIPELINE_WORK = Work(sequences=1)


@dataclass(frozen=True)
class Stage:
    """A kind of parallelism: the layout of Shardwise and the peers. `bars` is None where Shardwise
    runs PyTorch's own code."""

    name: str
    layout: str
    peers: tuple[Contender, ...]
    work: Work = DATA_WORK
    bars: Bars | None = DATA_BARS

    @property
    def ours(self) -> Contender:
        return Contender(self.layout, SHARDWISE, self.layout)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return self.ours, *self.peers


STAGES = (
    Stage("dp", "dp2", (DDP,)),
    Stage("z1", "dp2.z1", (ZERO_OPTIMIZER, DEEPSPEEDS[1])),
    Stage("z2", "dp2.z2", (FSDP2_KEEP, DEEPSPEEDS[2])),
    Stage("z3", "dp2.z3", (FSDP2, DEEPSPEEDS[3])),
    Stage("fsdp", "dp2.fsdp", (FSDP2,), bars=None),
    Stage("tp", "tp2", DTENSORS, TENSOR_WORK, TENSOR_BARS),
    Stage("sp", "tp2.sp", DTENSORS, TENSOR_WORK, TENSOR_BARS),
    Stage("cp", "cp2", CONTEXTS, CONTEXT_WORK, CONTEXT_BARS),
    Stage("a2a", "cp2.a2a", CONTEXTS, CONTEXT_WORK, CONTEXT_BARS),
    Stage("gpipe", "pp2.gpipe.l9-3.m8", (PIPELINES["gpipe"],), PIPELINE_WORK, PIPELINE_BARS),
    Stage("1f1b", "pp2.1f1b.l9-3.m8", (PIPELINES["1f1b"],), PIPELINE_WORK, PIPELINE_BARS),
    Stage(
        "interleaved",
        "pp2.interleaved.v2.l5-2-4-1.m8",
        (PIPELINES["interleaved"],),
        PIPELINE_WORK,
        PIPELINE_BARS,
    ),
    Stage("zb", "pp2.zb-h1.l9-3.m8", (PIPELINES["zb1p"],), PIPELINE_WORK, PIPELINE_BARS),
)


@dataclass(frozen=True)
class Figures:
    """Speed and memory of one run, or of several: the best speed, because disturbances only slow a
    run down, and the median peak."""

    tokens_per_s: float
    peak_resident_mb: float


def summarize(runs: Sequence[Figures]) -> Figures:
    return Figures(
        max(run.tokens_per_s for run in runs),
        statistics.median(run.peak_resident_mb for run in runs),
    )


@dataclass(frozen=True)
class Ratio:
    """Shardwise over the best peer of a stage: the fastest for speed, the smallest for memory."""

    stage: str
    speed: float
    peak: float
    fastest: str
    smallest: str
    bars: Bars | None

    @property
    def verdict(self) -> str:
        if self.bars is None:
            return "not judged"
        return "met" if self.bars.met(self.speed, self.peak) else "missed"

    @property
    def cells(self) -> tuple[str, str, str]:
        """Both ratios, each with its bar, and the verdict."""
        speed = f"{self.speed:.2f}"
        peak = f"{self.peak:.2f}"
        if self.bars:
            speed += f" (≥ {self.bars.speed})"
            peak += f" (≤ {self.bars.peak})" if self.bars.peak else ""
        return speed, peak, self.verdict


def compare(stages: Sequence[Stage], figures: Mapping[str, Figures]) -> list[Ratio]:
    """Return the ratios of each stage in which Shardwise and at least one peer ran."""
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
        ratios.append(
            Ratio(stage.name, speed, peak, full_name(fastest), full_name(smallest), stage.bars)
        )
    return ratios


def full_name(contender: Contender) -> str:
    return f"{contender.maker} {contender.label}"


@dataclass(frozen=True)
class Report:
    """One comparison. `failed` has the last line of the error of each contender that failed."""

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
        """Return `rows` and `ratios` as every benchmark prints them, then the single runs."""
        units = {"tokens_per_s": "tokens/s", "peak_resident_mb": "MiB"}
        rows = [
            {"name": name, "value": value, "unit": units[name], "of": key}
            for key, figures in self.figures.items()
            for name, value in asdict(figures).items()
        ]
        ratios = {f"tokens_per_s {ratio.stage}": ratio.speed for ratio in self.ratios}
        ratios |= {f"peak_resident_mb {ratio.stage}": ratio.peak for ratio in self.ratios}
        runs = {key: [asdict(run) for run in runs] for key, runs in self.runs.items()}
        details = {"failed": dict(self.failed), "runs": runs, "machine": dict(self.machine)}
        return {"rows": rows, "ratios": ratios, **details}

    def lines(self) -> list[tuple[str, ...]]:
        """Return stage, contender, tokens/s, peak, and for Shardwise ratios and verdict."""
        figures = self.figures
        ratios = {ratio.stage: ratio for ratio in self.ratios}
        lines: list[tuple[str, ...]] = []
        for stage in self.stages:
            for contender in stage.contenders:
                name = full_name(contender)
                if contender.key not in figures:
                    lines.append((stage.name, name, "-", "-", "", "", "failed"))
                    continue
                each = figures[contender.key]
                ratio = ratios.get(stage.name)
                cells = ratio.cells if ratio and contender == stage.ours else ("", "", "")
                lines.append(
                    (
                        stage.name,
                        name,
                        f"{each.tokens_per_s:,.0f}",
                        f"{each.peak_resident_mb:,.0f}",
                        *cells,
                    )
                )
        return lines

    @property
    def columns(self) -> tuple[str, ...]:
        return ("stage", "what", "tokens/s", "peak MiB", "speed", "memory", "")

    @property
    def works(self) -> dict[Work, list[Stage]]:
        """The stages of each work; figures of different works are not comparable."""
        return {
            work: [s for s in self.stages if s.work == work]
            for work in dict.fromkeys(s.work for s in self.stages)
        }

    @property
    def work_lines(self) -> list[str]:
        return [
            f"{', '.join(stage.name for stage in stages)}: {work.title}"
            for work, stages in self.works.items()
        ]

    def to_table(self) -> Table:
        table = Table(
            title="Training steps: Shardwise over the best peer of the same stage",
            title_justify="left",
            caption="\n".join(self.work_lines),
            caption_justify="left",
        )
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("stage", "what", "") else "right")
        lines = self.lines()
        for at, line in enumerate(lines):
            table.add_row(
                *line, end_section=line[0] != (lines[at + 1][0] if at + 1 < len(lines) else "")
            )
        return table

    def to_markdown(self) -> str:
        rows = [self.columns, ("---",) * len(self.columns), *self.lines()]
        parts = ["# Training steps: Shardwise and others", ""]
        parts += [", ".join(f"{name} {value}" for name, value in self.machine.items()) + ".", ""]
        parts += [*(f"- {line} per data rank and micro-batch" for line in self.work_lines), ""]
        parts += ["| " + " | ".join(row) + " |" for row in rows]
        if self.failed:
            parts += ["", *(f"{key} failed: {reason}" for key, reason in self.failed.items())]
        return "\n".join(
            [*parts, "", "![tokens per second and peak memory by stage](train.svg)", ""]
        )

    def to_svg(self) -> str:
        panels = [
            Panel(f"{title} ({work.title})", unit, "stage", self.bars(name, stages))
            for title, unit, name in (
                ("Speed, more is better", "tokens/s", "tokens_per_s"),
                ("Peak memory, less is better", "MiB per rank", "peak_resident_mb"),
            )
            for work, stages in self.works.items()
        ]
        return draw(panels, (SHARDWISE, PYTORCH, DEEPSPEED))

    def bars(self, name: str, stages: Sequence[Stage]) -> dict[str, list[Bar]]:
        return {
            stage.name: [
                Bar(contender.label, contender.maker, getattr(self.figures[contender.key], name))
                for contender in stage.contenders
                if contender.key in self.figures
            ]
            for stage in stages
        }


def profile_table(breakdown: "Breakdown") -> Table:
    total = sum(breakdown.seconds.values())
    limits = breakdown.limits
    table = Table(
        title=f"{breakdown.layout}: a step of {breakdown.step_s:.2f} s, {total:.2f} s under the "
        "profiler",
        caption=f"Limits, on every rank at once: products {limits.product_flops / 1e9:,.0f} "
        f"GFLOP/s, copies {limits.copy_bytes / 1e9:.1f} GB/s, all-gather "
        f"{limits.gather_bytes / 1e9:.2f} GB/s",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("what", "seconds", "share", "at the machine's limit, s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for group, seconds in breakdown.seconds.items():
        needed = breakdown.needed.get(group)
        table.add_row(
            group,
            f"{seconds:.3f}",
            f"{seconds / total:.0%}",
            "" if needed is None else f"{needed:.3f}",
        )
    return table
