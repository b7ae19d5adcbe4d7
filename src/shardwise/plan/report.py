"""A plan for people: tables of GB (1e9) with a bar of the limit, then the reasons in sentences."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, Ledger, Mode
from shardwise.plan.planner import Answer, Plan
from shardwise.plan.search import Candidate, Job
from shardwise.plan.traffic import stage_elements
from shardwise.plan.why import count, gb, quantized_to, sequences

BAR_CELLS = 8
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
        f"[bold]{plan.model.name}[/bold]: {params} parameters, {config.num_layers} layers x {config.hidden_size}, "
        f"{config.num_heads} heads, {config.num_kv_heads} kv heads, vocabulary {config.vocab_size}",
        highlight=False,
    )
    console.print(
        f"{plan.num_gpus} x {device.name}, {gb(device.memory_bytes)} each to use", highlight=False
    )
    for answer in plan.answers:
        console.print(answer_text(plan, answer))
    left_out = "; ".join(
        f"in {TITLES[each.job.mode].lower()} {', '.join(each.uncounted)}" for each in plan.answers
    )
    console.print(
        f"GB are 1e9 bytes, on the fullest GPU. Not counted yet: {left_out}.",
        style="dim",
        highlight=False,
    )


def answer_text(plan: Plan, answer: Answer) -> RenderableType:
    parts: list[RenderableType] = [Text(f"\n{title(plan, answer)}", style="bold"), table(answer)]
    if answer.job.mode == "train":
        parts.append(sent_note(answer))
    if answer.remark:
        parts.insert(1, Text(answer.remark, style="dim"))
    if answer.reasons and not answer.fits:
        parts += [Text("Why one GPU is not enough"), *map(indented, answer.reasons)]
    if answer.smallest_change:
        parts += [Text("The smallest change that fits"), indented(answer.smallest_change)]
    return Group(*parts)


def sent_note(answer: Answer) -> Text:
    """What the column `sent` says, what is sent besides, and what is not counted."""
    said = "sent: by a GPU to other data ranks in a step, in multiples of its P parameters"
    inside = ", ".join(filter(None, map(sent_inside, answer.candidates)))
    besides = f"; besides, inside the model, {inside}" if inside else ""
    missing = any(each.comm_bytes["pp"] is None for each in answer.candidates)
    return Text(f"{said}{besides}{'; what pp sends is not counted yet' * missing}.", style="dim")


def sent_inside(candidate: Candidate) -> str:
    """What ranks of the other axes send each other."""
    axes = [
        f"{gb(sent)} over {axis}"
        for axis in ("tp", "pp", "cp")
        if (sent := candidate.comm_bytes[axis])
    ]
    return f"{' and '.join(axes)} with {candidate.layout}" if axes else ""


def title(plan: Plan, answer: Answer) -> str:
    each = BYTES_PER_PARAMETER[plan.precision]
    if answer.job.mode == "train":
        return (
            f"{TITLES['train']} in {plan.precision}, {each.total} bytes a parameter before cutting, "
            f"micro-batches of {sequences(answer.job)}"
        )
    held = f", matrices of the blocks {quantized_to(plan.quant)}" if plan.quant else ""
    kept = f", keys and values in {plan.kv_dtype}" if plan.kv_dtype != "auto" else ""
    return f"{TITLES['serve']} in {plan.precision}{held}{kept}, one request of {plan.seq_tokens:,} tokens on each replica"


def indented(sentence: str) -> Padding:
    return Padding(Text(sentence), (0, 0, 0, 2))


def table(answer: Answer) -> Table:
    rows = ROWS[answer.job.mode]
    staged = any(candidate.layout.pp > 1 for candidate in answer.candidates)
    decimals = 2 if max(candidate.peak_bytes for candidate in answer.candidates) >= 10e9 else 4
    found = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    found.add_column("layout", overflow="fold")  # the one that gives way where there is no room
    for name in (["stage"] if staged else []) + [*rows, "total"]:
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column(f"of {gb(answer.job.device.memory_bytes)}", no_wrap=True)
    found.add_column("", no_wrap=True)
    if answer.job.mode == "train":
        found.add_column("sent", justify="right", no_wrap=True)
    for candidate in answer.candidates:
        for stage in candidate.ledger:
            name = str(candidate.layout) if stage.stage == 0 else ""
            sizes = [*(stage.rows[row] for row in rows), stage.total_bytes]
            numbers = [f"{size / 1e9:,.{decimals}f}" for size in sizes]
            before = [name, str(stage.stage)] if staged else [name]
            after = (
                [sent(answer.job, candidate) if name else ""] if answer.job.mode == "train" else []
            )
            used = stage.total_bytes / candidate.limit_bytes
            found.add_row(*before, *numbers, bar(used), verdict(candidate, stage), *after)
    return found


def sent(job: Job, candidate: Candidate) -> str:
    """Elements that data ranks send each other in a step, as papers give them: in multiples of the
    parameters."""
    weights = (
        stage_elements(job.config, candidate.layout) * BYTES_PER_PARAMETER[job.precision].parameters
    )
    multiple = (candidate.comm_bytes["dp"] or 0) / weights
    return f"{multiple:,.0f}P" if multiple >= 1000 else f"{multiple:.3g}P"


def verdict(candidate: Candidate, stage: Ledger) -> Text:
    over = stage.total_bytes - candidate.limit_bytes
    if over > 0:
        return Text(f"{gb(over)} over", style="red")
    return Text(f"{stage.total_bytes / candidate.limit_bytes:.0%}, fits", style="green")


def bar(share: float) -> Text:
    """How much of the limit is used; an arrow says that it goes on."""
    if share > 1:
        return Text("█" * (BAR_CELLS - 1) + "▶", style="red")
    cells = max(1, round(share * BAR_CELLS))
    return Text("█" * cells + "·" * (BAR_CELLS - cells), style="green")
