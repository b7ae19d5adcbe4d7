"""Why a model does not fit on one GPU, and what is the least change that makes it fit, in sentences
with figures."""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.layout import Layout
from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, NOT_COUNTED
from shardwise.plan.search import Candidate, Job
from shardwise.quant.kv_dtype import vector_bytes
from shardwise.quant.scheme import AS_STORED

DOING = {"train": "In training", "serve": "In inference"}


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def gb(num_bytes: float) -> str:
    """Bytes as GB (1e9) with the digits that matter: 141 GB, 17.6 GB, 0.269 GB."""
    size = num_bytes / 1e9
    return (
        f"{size:,.0f} GB"
        if size >= 99.95
        else f"{size:.3g} GB"
        if size >= 0.001
        else f"{size:.2g} GB"
    )


def count(number: int) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def why_one_is_not_enough(job: Job) -> tuple[str, ...]:
    """Row by row, a sentence each, why `job` does not fit on one GPU; nothing where it does."""
    one = job.on_one_gpu
    if one.fits:
        return ()
    rows = one.ledger[0].rows
    limit = one.limit_bytes
    each = BYTES_PER_PARAMETER[job.precision]
    weights = rows["parameters"]
    number = count(num_params(model_specs(job.config)))
    held = f"in {job.precision} ({each.parameters} bytes each)"
    if job.quant:
        held = f"with the matrices of its blocks {quantized_to(job.quant)} and the rest {held}"
    alone = "these alone exceed it" if weights > limit else "these alone would fit"
    left_out = NOT_COUNTED[job.mode]
    return (
        f"{DOING[job.mode]}, {job.name} does not fit on one {job.device.name}, which can hold {gb(limit)}.",
        f"Its {number} parameters are {gb(weights)} {held}: {alone}.",
        *(training_rows(job) if job.mode == "train" else serving_rows(job)),
        f"Together: {gb(one.peak_bytes)}, {one.peak_bytes / limit:.3g} times what the GPU can hold; {listed(left_out)} "
        f"come{'s' * (len(left_out) == 1)} on top and {'are' if len(left_out) > 1 else 'is'} not counted here.",
    )


def quantized_to(quant: str) -> str:
    return "as they are stored" if quant == AS_STORED else f"in {quant}"


def training_rows(job: Job) -> list[str]:
    ledger = job.on_one_gpu.ledger[0]
    each = BYTES_PER_PARAMETER[job.precision]
    rows = ledger.rows
    master = "an fp32 master copy of each weight and " if job.precision == "bf16" else ""
    parts = " + ".join(["4"] * (each.optimizer // 4))
    recompute = job.on_one_gpu.layout.recompute
    some = {
        "none": "what it computes",
        "selective": "most of it",
        "full": "the input of each block",
    }[recompute]
    return [
        f"The backward pass adds a gradient for each: {gb(rows['gradients'])} ({each.gradients} bytes).",
        f"Adam keeps {master}two moments: {gb(rows['optimizer'])} ({parts} bytes). "
        f"These states are {each.total} bytes a parameter, {gb(ledger.state_bytes)}.",
        f"A forward pass of {sequences(job)} keeps {some} for the backward: {gb(rows['activations'])} of activations, "
        f"and {gb(rows['logits'])} for the logits, a chunk at a time, with the gradient of the head.",
    ]


def sequences(job: Job) -> str:
    return f"{job.num_sequences:,} sequence{'s' * (job.num_sequences > 1)} of {job.seq_tokens:,} tokens"


def serving_rows(job: Job) -> list[str]:
    config = job.config
    rows = job.on_one_gpu.ledger[0].rows
    vector = vector_bytes(job.kv_dtype, BYTES_PER_PARAMETER[job.precision].parameters)
    scaled = f" in {job.kv_dtype}, each with a scale" if vector.scale else ""
    window = config.sliding_window if config.windowed_layers else None
    within = (
        f", of which a window of {window:,} stays" if window and window < job.seq_tokens else ""
    )
    return [
        f"The KV cache of one request of {job.seq_tokens:,} tokens{within} adds {gb(rows['kv'])} "
        f"({config.kv_bytes_per_token(vector.element, vector.scale):,} bytes a token: keys and values of "
        f"{config.num_layers} layers x {config.num_kv_heads} kv heads x {config.head_dim}{scaled})."
    ]


def smallest_change(job: Job, candidate: Candidate) -> str | None:
    """The least change to `candidate` that fits; None where it fits as it is."""
    if candidate.fits:
        return None
    layout = candidate.layout
    found = job.nearest_fit(candidate.layout)
    shorter = job.longest_seq_tokens(layout) if job.mode == "serve" else 0
    shortened = (
        f"--seq {shorter} on {layout} as it is: that is the longest request that fits"
        if shorter
        else ""
    )
    if found is None:
        return f"{shortened}." if shortened else nothing_fits(job, layout)
    gpus = found.layout.world_size
    uses = f"{gb(found.peak_bytes)} of {gb(found.limit_bytes)} on the fullest"
    if gpus == layout.world_size:
        change = f"{found.layout} on the same {gpus} GPU{'s' * (gpus > 1)}: {uses}"
    else:
        least = (
            "at least " if job.mode == "serve" else ""
        )  # training may do with fewer where tp or cp cut activations
        change = (
            f"{least}{gpus} GPUs of this kind, with {found.layout} ({fewest(job, layout)}): {uses}"
        )
    left_out = listed(NOT_COUNTED[job.mode])
    left = f", which leaves {gb(found.limit_bytes - found.peak_bytes)} for {left_out}"
    return f"{change}{left}{'; or ' + shortened if shortened else ''}."


def fewest(job: Job, layout: Layout) -> str:
    if job.mode == "serve":
        return "the fewest over which its heads can be cut"
    kept = ".".join(
        f"{axis}{size}" for axis in ("tp", "pp", "cp") if (size := getattr(layout, axis)) > 1
    )
    return f"the fewest{f' for {kept}' * bool(kept)} with all states cut over data ranks"


def nothing_fits(job: Job, layout: Layout) -> str:
    if job.mode == "serve":
        return f"No tensor-parallel size that its {job.config.num_heads} heads allow fits; a larger GPU is needed."
    least = job.candidate(replace(layout, recompute="full")).ledger
    kept = gb(max(stage.rows["activations"] + stage.rows["logits"] for stage in least))
    return (
        f"No number of GPUs of this kind is enough for {layout} with all states cut over data ranks: even with rc-full "
        f"its activations and logits are {kept}. Shorter sequences (--seq), fewer at a time (--micro-batch), more tp "
        "with sp, more cp, or a larger GPU are needed."
    )
