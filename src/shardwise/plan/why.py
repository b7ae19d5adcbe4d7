"""Explanation in sentences: why a model does not fit on the GPUs, what each remedy would save, and
the smallest change that makes it fit."""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.kv_pages import cached_tokens
from shardwise.layout import Layout
from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, NOT_COUNTED
from shardwise.plan.proposal import MORE_NODES, Proposal
from shardwise.plan.search import Candidate, Job, tensor_sizes
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


def why_not(job: Job, num_gpus: int, nearest: Candidate) -> tuple[str, ...]:
    """Return why `job` does not fit on its GPUs, one sentence per item. `nearest` is the layout of
    the plan that needs least."""
    if num_gpus == 1:
        return why_one_is_not_enough(job)
    limit = nearest.limit_bytes
    over = nearest.peak_bytes - limit
    rows = max(nearest.ledger, key=lambda stage: stage.total_bytes).rows
    largest = max(rows, key=lambda row: rows[row])
    return (
        f"{DOING[job.mode]}, {job.name} does not fit on {num_gpus:,} x {job.device.name}, each of "
        f"which can hold {gb(limit)}.",
        *(shared_states(job, num_gpus) if job.mode == "train" else shared_weights(job, nearest)),
        f"{nearest.layout} needs {gb(nearest.peak_bytes)} per GPU, {gb(over)} too much. Its "
        f"largest row is {largest}, {gb(rows[largest])}.",
        *savings(job, nearest),
    )


def shared_states(job: Job, num_gpus: int) -> Iterator[str]:
    each = BYTES_PER_PARAMETER[job.precision]
    params = num_params(model_specs(job.config))
    held = held_bytes(job)
    states = params * held
    terms = [f"{each.parameters} for the weight", f"{each.gradients} for the gradient"]
    terms += [] if job.offload else [f"{each.optimizer} for AdamW"]
    host = " besides AdamW's in host memory" if job.offload else ""
    fit = "more than it can hold" if states / num_gpus > job.device.memory_bytes else "which fits"
    yield (
        f"Its {count(params)} parameters need {held} bytes each{host}: {listed(terms)}, "
        f"{gb(states)} in all. Sharded over all {num_gpus:,} GPUs that is "
        f"{gb(states / num_gpus)} per GPU, {fit}."
    )


def held_bytes(job: Job) -> int:
    """Return the bytes of states per parameter that GPUs hold, before sharding."""
    each = BYTES_PER_PARAMETER[job.precision]
    return each.total - (each.optimizer if job.offload else 0)


def shared_weights(job: Job, nearest: Candidate) -> Iterator[str]:
    weights = job.on_one_gpu.ledger[0].rows["parameters"]
    tp = nearest.layout.tp
    yield (
        f"Its {count(num_params(model_specs(job.config)))} parameters are {gb(weights)} "
        f"{stored(job)}, {gb(nearest.ledger[0].rows['parameters'])} per GPU over tp{tp}."
    )


def savings(job: Job, nearest: Candidate) -> Iterator[str]:
    """Yield what single remedies would save on each GPU, for the layout `nearest`."""
    if job.mode == "serve":
        return
    layout = nearest.layout
    tp = max(tensor_sizes(job.config, layout.dp, job.gpus_per_node))
    remedies = {
        "recompute (rc-full)": (job, replace(layout, recompute="full")),
        "ZeRO-3": (job, replace(layout, shard="zero3", shard_group=None)),
        "offload of the optimizer": (replace(job, offload=True), layout),
        "micro-batches of half the size": (
            replace(job, num_sequences=max(1, job.num_sequences // 2)),
            layout,
        ),
    }
    if layout.tp == 1 and tp > 1:
        sharded = replace(layout, dp=layout.dp // tp, tp=tp, sequence_parallel=True)
        remedies[f"tp{tp} with sp"] = (job, sharded)
    found = []
    for name, (changed_job, changed) in remedies.items():
        if (changed_job, changed) != (job, layout) and job.allows(changed):
            saved = nearest.peak_bytes - changed_job.candidate(changed).peak_bytes
            if saved > 0:
                found.append((saved, name))
    if found:
        each = [f"{name} {gb(saved)}" for saved, name in sorted(found, reverse=True)]
        yield f"Each of these alone saves, per GPU: {listed(each)}."


def why_one_is_not_enough(job: Job) -> tuple[str, ...]:
    """Return why `job` does not fit on one GPU, one sentence per row; nothing where it does."""
    candidate = job.on_one_gpu
    if candidate.fits:
        return ()
    limit = candidate.limit_bytes
    weights = candidate.ledger[0].rows["parameters"]
    number = count(num_params(model_specs(job.config)))
    alone = "these alone exceed it" if weights > limit else "these alone would fit"
    uncounted = NOT_COUNTED[job.mode]
    are = "are" if len(uncounted) > 1 else "is"
    return (
        f"{DOING[job.mode]}, {job.name} does not fit on one {job.device.name}, which can hold "
        f"{gb(limit)}.",
        f"Its {number} parameters are {gb(weights)} {stored(job)}: {alone}.",
        *(training_rows(job) if job.mode == "train" else serving_rows(job)),
        f"Together: {gb(candidate.peak_bytes)}, {candidate.peak_bytes / limit:.3g} times what the "
        f"GPU can hold; {listed(uncounted)} {are} extra and not included.",
    )


def stored(job: Job) -> str:
    """Return how the weights are stored."""
    dtype = f"in {job.precision} ({BYTES_PER_PARAMETER[job.precision].parameters} bytes each)"
    if job.quant:
        return f"with the matrices of its blocks {quantized_to(job.quant)} and the rest {dtype}"
    return dtype


def quantized_to(quant: str) -> str:
    return "as stored" if quant == AS_STORED else f"in {quant}"


def training_rows(job: Job) -> list[str]:
    ledger = job.on_one_gpu.ledger[0]
    each = BYTES_PER_PARAMETER[job.precision]
    rows = ledger.rows
    master = "an fp32 master copy of each weight and " if job.precision == "bf16" else ""
    terms = " + ".join(["4"] * (each.optimizer // 4))
    optimizer = num_params(model_specs(job.config)) * each.optimizer
    on_host = " in host memory" if job.offload else ""
    states = "On the GPU, the states" if job.offload else "These states"
    saved = {
        "none": "what it computes",
        "selective": "most of what it computes",
        "full": "the input of each block",
    }[job.on_one_gpu.layout.recompute]
    return [
        f"The backward pass adds a gradient for each: {gb(rows['gradients'])} "
        f"({each.gradients} bytes).",
        f"Adam needs {master}two moments: {gb(optimizer)}{on_host} ({terms} bytes). "
        f"{states} are {held_bytes(job)} bytes per parameter, {gb(ledger.state_bytes)}.",
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
    num_cached = cached_tokens(job.seq_tokens, config.kv_window)
    is_rolling = num_cached < job.seq_tokens
    within = f" (the pages of its sliding window hold {num_cached:,})" if is_rolling else ""
    token_bytes = config.kv_bytes_per_token(vector.element, vector.scale)
    return [
        f"The KV cache of one request of {job.seq_tokens:,} tokens{within} adds {gb(rows['kv'])} "
        f"({token_bytes:,} bytes per token: keys and values of {config.num_layers} layers x "
        f"{config.num_kv_heads} KV heads x {config.head_dim}{scaled})."
    ]


def smallest_change(job: Job, num_gpus: int, layout: Layout, found: Proposal | None) -> str:
    """Return the smallest change that fits, in words. `layout` is where the search started."""
    shorter = job.longest_seq_tokens(layout) if job.mode == "serve" else 0
    shortened = f"--seq {shorter} with {layout}, the longest request that fits" if shorter else ""
    if found is None:
        return f"{shortened}." if shortened else nothing_fits(job)
    changes = [change(job, num_gpus, found)]
    if found.without_offload is not None:
        changes.append(f"without --offload {change(job, num_gpus, found.without_offload)}")
    return f"{'; or '.join([*changes, shortened] if shortened else changes)}."


def change(job: Job, num_gpus: int, found: Proposal) -> str:
    """Return a proposal, and the memory that it leaves, in words."""
    candidate = found.candidate
    total_bytes = job.device.total_bytes
    free = gb(total_bytes - candidate.peak_bytes)
    return (
        f"{candidate.layout}{settings(job, found)} on {gpus(job, num_gpus, found)}: peak of "
        f"{gb(candidate.peak_bytes)} per GPU, which leaves {free} of its {gb(total_bytes)} free "
        f"(--margin {job.margin:g})"
    )


def settings(job: Job, found: Proposal) -> str:
    """Return the settings that a proposal changes."""
    changed = found.option.job
    words = []
    if changed.num_sequences != job.num_sequences:
        words.append(f"--micro-batch {changed.num_sequences}")
    if changed.quant != job.quant:
        words.append(f"--quant {changed.quant}")
    if changed.kv_dtype != job.kv_dtype:
        words.append(f"--kv-dtype {changed.kv_dtype}")
    if changed.offload:
        rows = replace(job, offload=False).candidate(found.option.layout).ledger
        host = max(stage.rows["optimizer"] for stage in rows)
        words.append(f"--offload ({gb(host)} of host memory per GPU)")
    return f" with {listed(words)}" if words else ""


def gpus(job: Job, num_gpus: int, found: Proposal) -> str:
    """Return the GPUs of a proposal: the same, or how many in how many nodes."""
    number = found.num_gpus
    servers = f", {found.candidate.replicas} servers" if found.candidate.replicas > 1 else ""
    plural = "s" if number > 1 else ""
    if number == num_gpus:
        return f"the same {number:,} GPU{plural}{servers}"
    nodes = number // job.gpus_per_node
    within = f" ({nodes} nodes of {job.gpus_per_node})" if nodes > 1 else ""
    return f"{number:,} GPU{plural} of this type{within}{servers}"


def nothing_fits(job: Job) -> str:
    if job.mode == "serve":
        return (
            f"No tensor-parallel size that its {job.config.num_heads} heads allow fits, even with "
            "int4 weights and an int8 KV cache; use a larger GPU."
        )
    return (
        f"No layout fits on up to {MORE_NODES} nodes more than its states need, even with rc-full "
        "and micro-batches of one sequence. Use shorter sequences (--seq) or a larger GPU."
    )
