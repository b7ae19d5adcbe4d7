"""A plan as text: tables in GB (1e9 bytes) with a bar of the limit, then the reasons in
sentences."""

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, Ledger, Mode
from shardwise.plan.planner import ModePlan, Plan
from shardwise.plan.search import Candidate, Job
from shardwise.plan.traffic import MODEL_AXES, stage_elements
from shardwise.plan.why import count, gb, held_bytes, quantized_to, sequences

BAR_CELLS = 8
MIN_COLUMN = 8
ROWS: dict[Mode, tuple[str, ...]] = {
    "train": ("parameters", "gradients", "optimizer", "activations", "logits", "buffers"),
    "serve": ("parameters", "kv"),
}
TITLES: dict[Mode, str] = {"train": "Training", "serve": "Serving"}


def print_plan(plan: Plan, console: Console) -> None:
    config = plan.model.config
    device = plan.device
    params = count(num_params(model_specs(config)))
    console.print(
        f"[bold]{plan.model.name}[/bold]: {params} parameters, {config.num_layers} layers, "
        f"hidden size {config.hidden_size}, {config.num_heads} heads, "
        f"{config.num_kv_heads} KV heads, vocabulary {config.vocab_size}",
        highlight=False,
    )
    memory = f"{gb(device.memory_bytes)} usable of {gb(device.total_bytes)}"
    console.print(f"{plan.num_gpus} x {device.name}, {memory} each", highlight=False)
    for each in plan.modes:
        console.print(mode_text(plan, each, console))
    uncounted = "; ".join(
        f"in {TITLES[each.job.mode].lower()} {', '.join(each.uncounted)}" for each in plan.modes
    )
    console.print(
        f"GB are 1e9 bytes, on the most heavily loaded GPU. Not counted yet: {uncounted}.",
        style="dim",
        highlight=False,
    )


def mode_text(plan: Plan, mode: ModePlan, console: Console) -> RenderableType:
    table = candidate_table(mode)
    is_wide = table_width(table, console) <= console.width
    parts: list[RenderableType] = [
        Text(f"\n{title(plan, mode)}", style="bold"),
        table if is_wide else candidate_lines(mode),
    ]
    if mode.job.mode == "train":
        parts.append(sent_note(mode))
    elif mode.fits:
        parts.append(room_note(mode))
    if mode.remark:
        parts.insert(1, Text(mode.remark, style="dim"))
    if mode.reasons and not mode.fits:
        number = "one GPU is" if plan.num_gpus == 1 else f"{plan.num_gpus:,} GPUs are"
        parts += [Text(f"Why {number} not enough"), *map(indented, mode.reasons)]
    if mode.smallest_change:
        parts += [Text("The smallest change that fits"), indented(mode.smallest_change)]
    return Group(*parts)


def table_width(table: Table, console: Console) -> int:
    """Return the columns that a table needs."""
    unlimited = console.options.update(width=sys.maxsize)
    return Measurement.get(console, unlimited, table).maximum


def room_note(mode: ModePlan) -> Text:
    """Return how many requests of the planned length each layout serves at a time."""
    limit = mode.job.limit_bytes
    room = ", ".join(
        f"{each.layout} {each.max_concurrency(limit):,}" for each in mode.candidates if each.fits
    )
    length = f"{mode.job.seq_tokens:,} tokens"
    return Text(f"Requests of {length} that fit at a time, per replica: {room}.", style="dim")


def sent_note(mode: ModePlan) -> Text:
    """Return what the column `sent` means, the traffic that it leaves out, and what is not
    counted."""
    meaning = (
        "sent = what each GPU sends per step for data parallelism, in multiples of its P parameters"
    )
    others = ", ".join(filter(None, map(model_traffic, mode.candidates)))
    addition = f"; plus {others}" if others else ""
    missing = any(each.comm_bytes["pp"] is None for each in mode.candidates)
    uncounted = "; pp traffic is not counted yet" if missing else ""
    return Text(f"{meaning}{addition}{uncounted}.", style="dim")


def model_traffic(candidate: Candidate) -> str:
    """Return the bytes that ranks of the other axes send each other."""
    axes = [
        f"{gb(num_bytes)} over {axis}"
        for axis in MODEL_AXES
        if (num_bytes := candidate.comm_bytes[axis])
    ]
    return f"{' and '.join(axes)} with {candidate.layout}" if axes else ""


def title(plan: Plan, mode: ModePlan) -> str:
    if mode.job.mode == "train":
        where = ", the optimizer in host memory" if mode.job.offload else ""
        return (
            f"{TITLES['train']} in {plan.precision}, {held_bytes(mode.job)} bytes per parameter "
            f"before sharding{where}, micro-batches of {sequences(mode.job)}"
        )
    weights = f", block matrices {quantized_to(plan.quant)}" if plan.quant else ""
    cache = f", KV cache in {plan.kv_dtype}" if plan.kv_dtype != "auto" else ""
    request = f"one request of {plan.seq_tokens:,} tokens per replica"
    return f"{TITLES['serve']} in {plan.precision}{weights}{cache}, {request}"


def indented(sentence: str) -> Padding:
    return Padding(Text(sentence), (0, 0, 0, 2))


def candidate_table(mode: ModePlan) -> Table:
    """Return one row per layout, or per stage of it, with its ledger against the limit."""
    rows = ROWS[mode.job.mode]
    trains = mode.job.mode == "train"
    has_stages = any(candidate.layout.pp > 1 for candidate in mode.candidates)
    decimals = 2 if max(candidate.peak_bytes for candidate in mode.candidates) >= 10e9 else 4
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("layout", no_wrap=True)
    for name in (["stage"] if has_stages else []) + [*rows, "total"]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"of {gb(mode.job.device.memory_bytes)}", no_wrap=True)
    table.add_column("", no_wrap=True)
    if trains:
        table.add_column("sent", justify="right", no_wrap=True)
    for candidate in mode.candidates:
        for stage in candidate.ledger:
            name = str(candidate.layout) if stage.stage == 0 else ""
            sizes = [*(stage.rows[row] for row in rows), stage.total_bytes]
            numbers = [f"{size / 1e9:,.{decimals}f}" for size in sizes]
            before = [name, str(stage.stage)] if has_stages else [name]
            sent = sent_multiple(mode.job, candidate) if name else ""
            used = stage.total_bytes / candidate.limit_bytes
            status = fit_status(candidate, stage, mode.job.limit_bytes)
            table.add_row(*before, *numbers, bar(used), status, *([sent] if trains else []))
    return table


def candidate_lines(mode: ModePlan) -> Text:
    """Return the table for a narrow terminal: each layout on a line above its numbers."""
    names = [*ROWS[mode.job.mode], "total"]
    widths = [max(len(name), MIN_COLUMN) for name in names]
    lines = Text(cells(names, widths), style="dim", no_wrap=True)
    for candidate in mode.candidates:
        fullest = max(candidate.ledger, key=lambda stage: stage.total_bytes)
        lines.append(f"\n{candidate.layout}  ", style="bold")
        lines.append_text(fit_status(candidate, fullest, mode.job.limit_bytes))
        if mode.job.mode == "train":
            lines.append(f", sends {sent_multiple(mode.job, candidate)}", style="dim")
        for stage in candidate.ledger:
            sizes = [*(stage.rows[row] for row in ROWS[mode.job.mode]), stage.total_bytes]
            numbers = [f"{size / 1e9:,.2f}" for size in sizes]
            lines.append(f"\n{cells(numbers, widths)}", style="not dim")
    return lines


def cells(words: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))


def sent_multiple(job: Job, candidate: Candidate) -> str:
    """Return the elements that a data rank sends in a step as papers state them: in multiples of P
    parameters."""
    weights = (
        stage_elements(job.config, candidate.layout) * BYTES_PER_PARAMETER[job.precision].parameters
    )
    multiple = (candidate.comm_bytes["dp"] or 0) / weights
    if candidate.layout.data_size == 1:
        return "-"
    return f"{multiple:,.0f}P" if multiple >= 1000 else f"{multiple:.3g}P"


def fit_status(candidate: Candidate, stage: Ledger, tight_bytes: int) -> Text:
    """Return whether a stage fits; it is tight above `tight_bytes`, which leave the margin."""
    over = stage.total_bytes - candidate.limit_bytes
    if over > 0:
        return Text(f"{gb(over)} over", style="red")
    share = f"{stage.total_bytes / candidate.limit_bytes:.0%}"
    if stage.total_bytes > tight_bytes:
        return Text(f"{share}, tight", style="yellow")
    return Text(f"{share}, fits", style="green")


def bar(share: float) -> Text:
    """Return a bar of the used share of the limit; an arrow marks more than all of it."""
    if share > 1:
        return Text("█" * (BAR_CELLS - 1) + "▶", style="red")
    cells = max(1, round(share * BAR_CELLS))
    return Text("█" * cells + "·" * (BAR_CELLS - cells), style="green")
