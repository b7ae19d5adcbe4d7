"""Explanation in sentences: why a model does not fit on one GPU, and the smallest change that makes
it fit."""

from dataclasses import replace

from shardwise.layout import Layout
from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, NOT_COUNTED
from shardwise.plan.search import Candidate, Job
from shardwise.plan.traffic import MODEL_AXES
from shardwise.quant.kv_dtype import vector_bytes
from shardwise.quant.scheme import AS_STORED
from shardwise.suggest import listed

DOING = {"train": "In training", "serve": "In inference"}


def gb(num_bytes: float) -> str:
    """Return bytes as GB (1e9) with the significant digits: 141 GB, 17.6 GB, 0.269 GB."""
    size = num_bytes / 1e9
    if size >= 99.95:
        return f"{size:,.0f} GB"
    return f"{size:.3g} GB" if size >= 0.001 else f"{size:.2g} GB"


def count(number: int) -> str:
    """Return a number with three digits and a word: 70.6 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def why_one_is_not_enough(job: Job) -> tuple[str, ...]:
    """Return why `job` does not fit on one GPU, one sentence per row; nothing where it does."""
    candidate = job.on_one_gpu
    if candidate.fits:
        return ()
    limit = candidate.limit_bytes
    weights = candidate.ledger[0].rows["parameters"]
    number = count(num_params(model_specs(job.config)))
    dtype = f"in {job.precision} ({BYTES_PER_PARAMETER[job.precision].parameters} bytes each)"
    if job.quant:
        dtype = f"with the matrices of its blocks {quantized_to(job.quant)} and the rest {dtype}"
    alone = "these alone exceed it" if weights > limit else "these alone would fit"
    uncounted = NOT_COUNTED[job.mode]
    are = "are" if len(uncounted) > 1 else "is"
    return (
        f"{DOING[job.mode]}, {job.name} does not fit on one {job.device.name}, which can hold "
        f"{gb(limit)}.",
        f"Its {number} parameters are {gb(weights)} {dtype}: {alone}.",
        *(training_rows(job) if job.mode == "train" else serving_rows(job)),
        f"Together: {gb(candidate.peak_bytes)}, {candidate.peak_bytes / limit:.3g} times what the "
        f"GPU can hold; {listed(uncounted)} {are} extra and not included.",
    )


def quantized_to(quant: str) -> str:
    return "as stored" if quant == AS_STORED else f"in {quant}"


def training_rows(job: Job) -> list[str]:
    ledger = job.on_one_gpu.ledger[0]
    each = BYTES_PER_PARAMETER[job.precision]
    rows = ledger.rows
    master = "an fp32 master copy of each weight and " if job.precision == "bf16" else ""
    terms = " + ".join(["4"] * (each.optimizer // 4))
    saved = {
        "none": "what it computes",
        "selective": "most of what it computes",
        "full": "the input of each block",
    }[job.on_one_gpu.layout.recompute]
    return [
        f"The backward pass adds a gradient for each: {gb(rows['gradients'])} "
        f"({each.gradients} bytes).",
        f"Adam needs {master}two moments: {gb(rows['optimizer'])} ({terms} bytes). "
        f"These states are {each.total} bytes per parameter, {gb(ledger.state_bytes)}.",
        f"A forward pass of {sequences(job)} saves {saved} for the backward: "
        f"{gb(rows['activations'])} of activations, and {gb(rows['logits'])} for the logits, "
        "one chunk at a time, with the gradient of the head.",
    ]


def sequences(job: Job) -> str:
    plural = "s" if job.num_sequences > 1 else ""
    return f"{job.num_sequences:,} sequence{plural} of {job.seq_tokens:,} tokens"


def serving_rows(job: Job) -> list[str]:
    config = job.config
    rows = job.on_one_gpu.ledger[0].rows
    vector = vector_bytes(job.kv_dtype, BYTES_PER_PARAMETER[job.precision].parameters)
    scaled = f" in {job.kv_dtype}, each with a scale" if vector.scale else ""
    window = config.sliding_window if config.windowed_layers else None
    is_windowed = window and window < job.seq_tokens
    within = f" (a window of {window:,} of them is cached)" if is_windowed else ""
    token_bytes = config.kv_bytes_per_token(vector.element, vector.scale)
    return [
        f"The KV cache of one request of {job.seq_tokens:,} tokens{within} adds {gb(rows['kv'])} "
        f"({token_bytes:,} bytes per token: keys and values of {config.num_layers} layers x "
        f"{config.num_kv_heads} KV heads x {config.head_dim}{scaled})."
    ]


def smallest_change(job: Job, candidate: Candidate) -> str | None:
    """Return the smallest change to `candidate` that fits; None where it fits as it is."""
    if candidate.fits:
        return None
    layout = candidate.layout
    nearest = job.nearest_fit(candidate.layout)
    shorter = job.longest_seq_tokens(layout) if job.mode == "serve" else 0
    shortened = f"--seq {shorter} with {layout}, the longest request that fits" if shorter else ""
    if nearest is None:
        return f"{shortened}." if shortened else nothing_fits(job, layout)
    gpus = nearest.layout.world_size
    uses = f"peak of {gb(nearest.peak_bytes)} of {gb(nearest.limit_bytes)} per GPU"
    if gpus == layout.world_size:
        change = f"{nearest.layout} on the same {gpus} GPU{'s' * (gpus > 1)}: {uses}"
    else:
        # In training, tp or cp shard activations, so fewer GPUs may do.
        least = "at least " if job.mode == "serve" else ""
        reason = fewest(job, layout)
        change = f"{least}{gpus} GPUs of this type with {nearest.layout} ({reason}): {uses}"
    free = gb(nearest.limit_bytes - nearest.peak_bytes)
    left = f", which leaves {free} for {listed(NOT_COUNTED[job.mode])}"
    return f"{change}{left}{'; or ' + shortened if shortened else ''}."


def fewest(job: Job, layout: Layout) -> str:
    """Return in which family of layouts a number of GPUs is the smallest that fits."""
    if job.mode == "serve":
        return "the smallest tensor-parallel size that the head count allows"
    sizes = ".".join(f"{axis}{size}" for axis in MODEL_AXES if (size := getattr(layout, axis)) > 1)
    return f"the minimum{f' for {sizes}' * bool(sizes)} with ZeRO-3 over data ranks"


def nothing_fits(job: Job, layout: Layout) -> str:
    if job.mode == "serve":
        return (
            f"No tensor-parallel size that its {job.config.num_heads} heads allow fits; use a "
            "larger GPU."
        )
    ledger = job.candidate(replace(layout, recompute="full")).ledger
    saved = gb(max(stage.rows["activations"] + stage.rows["logits"] for stage in ledger))
    return (
        f"{layout} with ZeRO-3 does not fit on any number of these GPUs: even with rc-full its "
        f"activations and logits are {saved}. Use shorter sequences (--seq), smaller "
        "micro-batches (--micro-batch), more tp with sp, more cp, or a larger GPU."
    )
