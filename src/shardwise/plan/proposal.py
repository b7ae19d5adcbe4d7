"""The proposal of a plan: the cheapest change that makes a model fit and leaves a margin.

Options on the GPUs at hand come before options on more GPUs, which come in whole nodes. Among
layouts of as many GPUs the price is a rough time of a step. It ranks layouts and predicts nothing:
half of the peak in matrix products, and each axis at the bandwidth of its links.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from typing import Any, NamedTuple

from shardwise.config import ModelConfig
from shardwise.formats.storage_formats import choose_formats
from shardwise.layout import Layout, Recompute, Shard
from shardwise.params import model_specs, num_params
from shardwise.plan.activations import block_bytes, share_of
from shardwise.plan.ledger import BYTES_PER_PARAMETER, computed_bytes
from shardwise.plan.search import (
    RECOMPUTES,
    ZERO_STAGES,
    Candidate,
    Job,
    divisors,
    serving_layouts,
    tensor_sizes,
)
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import AS_STORED

MATMUL_SHARE = 0.5
"""Share of the peak that matrix products reach."""
NODE_BANDWIDTH = 25e9
"""Bytes/s that a GPU sends to another node."""
HOST_BANDWIDTH = 25e9
"""Bytes/s between a GPU and host memory."""
EXPOSED_SHARE = 0.5
"""Share of the communication of data and context parallel that computation does not hide."""
RECOMPUTED_WORK: dict[Recompute, float] = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
MICROBATCHES_PER_STAGE = 4
"""Micro-batches of proposed pipelines: the bubble is less than a quarter of the work."""
MOST_STAGES = 16
"""The most stages of a proposed pipeline."""
LEAST_TOKENS = 512
"""The fewest tokens of a sequence on a context rank."""
MORE_NODES = 64
"""The most numbers of nodes to try, from the fewest that could hold the states."""
FINE_NODES = 24
"""Up to this number of nodes, each number is tried; above it, steps are 4 % of the nodes."""
MOST_GPUS = 100_000
"""The most GPUs of a proposal."""
QUANTIZED: tuple[tuple[str | None, KvDtype], ...] = (
    (None, "auto"),
    (None, "int8"),
    (AS_STORED, "auto"),
    (AS_STORED, "int8"),
    ("int8", "auto"),
    ("int8", "int8"),
    ("int4-g128", "auto"),
    ("int4-g128", "int8"),
)
"""Quantization of weights and KV cache in serving, by the accuracy that it costs."""


class Price(NamedTuple):
    """The cost of an option, the most important part first.

    Attributes:
        other_sizes: whether the axes have other sizes than those requested
        quantized: place in QUANTIZED
        halvings: how often the requested micro-batch is halved
        step_s: rough time per token, times the number of GPUs
    """

    num_gpus: int
    offload: bool
    other_sizes: bool
    quantized: int
    halvings: int
    step_s: float
    zero_stage: int


@dataclass(frozen=True)
class Option:
    """A layout, with the settings of `job` that make it fit."""

    job: Job
    layout: Layout
    price: Price


@dataclass(frozen=True)
class Proposal:
    """The cheapest option that fits within the margin.

    Attributes:
        without_offload: the cheapest option that does not offload, where that takes more GPUs
    """

    option: Option
    candidate: Candidate
    without_offload: "Proposal | None" = None

    @property
    def num_gpus(self) -> int:
        return self.option.price.num_gpus

    def to_json(self) -> dict[str, Any]:
        """Return the layout with all settings that it was found with."""
        job = self.option.job
        return {
            "layout": str(self.candidate.layout),
            "gpus": self.num_gpus,
            "replicas": self.candidate.replicas,
            "micro_batch": job.num_sequences,
            "offload": job.offload,
            "quant": job.quant,
            "kv_dtype": job.kv_dtype,
            "peak_bytes": self.candidate.peak_bytes,
            "without_offload": self.without_offload and self.without_offload.to_json(),
        }


def propose(job: Job, num_gpus: int, requested: Layout | None = None) -> Proposal | None:
    """Return the cheapest option on `num_gpus`, starting from the requested layout if there is one,
    or else on the fewest GPUs that do. Returns None if none of the tried numbers does."""
    found = cheapest(options(job, num_gpus, requested))
    if job.mode == "serve" or job.offload:
        return found or on_more_gpus(job, num_gpus)
    offloading = replace(job, offload=True)
    found = found or cheapest(options(offloading, num_gpus, requested))
    if found is not None:
        return found
    offloaded = on_more_gpus(offloading, num_gpus)
    plain = on_more_gpus(job, num_gpus)
    if offloaded is None or (plain is not None and plain.num_gpus <= offloaded.num_gpus):
        return plain
    return replace(offloaded, without_offload=plain)


def on_more_gpus(job: Job, num_gpus: int) -> Proposal | None:
    """Return the cheapest option on the fewest GPUs above `num_gpus`."""
    tried = (cheapest(options(job, more)) for more in larger_sizes(job, num_gpus))
    return next((found for found in tried if found is not None), None)


def best_fits(job: Job, num_gpus: int, most: int = 3) -> list[Proposal]:
    """Return the cheapest layouts of `num_gpus` that fit without other changes."""
    unchanged = (each for each in options(job, num_gpus) if not each.price.halvings)
    return list(islice(fitting(unchanged), most))


def cheapest(found: Iterator[Option]) -> Proposal | None:
    return next(fitting(found), None)


def fitting(found: Iterator[Option]) -> Iterator[Proposal]:
    """Yield the options that fit within the margin, the cheapest first."""
    for option in sorted(found, key=lambda option: option.price):
        limit = option.job.limit_bytes
        if least_bytes(option) <= limit and option.job.fits_within(option.layout, limit):
            replicas = option.price.num_gpus // option.layout.world_size
            yield Proposal(option, option.job.candidate(option.layout, replicas))


def larger_sizes(job: Job, num_gpus: int) -> Iterator[int]:
    """Yield numbers of GPUs above `num_gpus`: the divisors of a node, then whole nodes, from the
    fewest that could hold the states."""
    node = job.gpus_per_node
    if job.mode == "serve":
        yield from (size for size in divisors(node) if size > num_gpus)
        wider = range(max(node, num_gpus) + 1, job.config.num_heads + 1)
        yield from (size for size in wider if size % node == 0)
        return
    each = BYTES_PER_PARAMETER[job.precision]
    held = each.total - (each.optimizer if job.offload else 0)
    states = parameter_counts(job.config).model * held
    least = max(num_gpus + 1, states // job.limit_bytes)
    yield from (size for size in divisors(node) if least <= size < node)
    nodes = -(-least // node)
    for _ in range(MORE_NODES):
        if nodes * node <= MOST_GPUS:
            yield nodes * node
        nodes += max(1, nodes // FINE_NODES)


# -- options


def options(job: Job, num_gpus: int, requested: Layout | None = None) -> Iterator[Option]:
    """Yield the layouts of `num_gpus` GPUs with the settings that may change."""
    if job.mode == "serve":
        yield from serving_options(job, num_gpus)
        return
    for sequences, halvings in smaller_microbatches(job.num_sequences):
        changed = replace(job, num_sequences=sequences)
        for layout in training_space(job, num_gpus):
            if changed.allows(layout):
                yield training_option(changed, layout, requested is not None, halvings)
        if requested is not None:
            for layout in training_changes(requested):
                if changed.allows(layout):
                    yield training_option(changed, layout, False, halvings)


def training_option(job: Job, layout: Layout, other_sizes: bool, halvings: int) -> Option:
    stage = ZERO_STAGES.index(layout.shard) if layout.shard in ZERO_STAGES else len(ZERO_STAGES)
    price = Price(
        layout.world_size, job.offload, other_sizes, 0, halvings, rough_step_s(job, layout), stage
    )
    return Option(job, layout, price)


def smaller_microbatches(num_sequences: int) -> Iterator[tuple[int, int]]:
    """Yield the micro-batch and its halves, down to one sequence."""
    halvings = 0
    while num_sequences:
        yield num_sequences, halvings
        num_sequences //= 2
        halvings += 1


def training_space(job: Job, num_gpus: int) -> Iterator[Layout]:
    """Yield every layout of `num_gpus` that may be worth its price: all sizes of the axes, ZeRO
    stages and recompute. Sequence parallel comes with tensor parallel, since it only saves memory.
    Pipelines run 1F1B, of which no schedule holds less."""
    for tp in tensor_sizes(job.config, num_gpus, job.gpus_per_node):
        for pp in divisors(num_gpus // tp):
            for cp in divisors(num_gpus // tp // pp):
                if pp > job.config.num_layers or pp > MOST_STAGES:
                    continue
                if cp > 1 and job.seq_tokens < LEAST_TOKENS * cp:
                    continue
                yield from with_states(
                    Layout(
                        dp=num_gpus // tp // pp // cp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        sequence_parallel=tp > 1,
                        schedule="1f1b" if pp > 1 else None,
                        microbatches=MICROBATCHES_PER_STAGE * pp if pp > 1 else 1,
                    ),
                    job.recompute,
                )


def with_states(layout: Layout, least: Recompute) -> Iterator[Layout]:
    """Yield a layout with each ZeRO stage, and `least` recompute or more."""
    stages: tuple[Shard, ...] = ZERO_STAGES if layout.data_size > 1 else ("none",)
    for shard in stages:
        for recompute in RECOMPUTES[RECOMPUTES.index(least) :]:
            yield replace(layout, shard=shard, shard_group=None, recompute=recompute)


def training_changes(layout: Layout) -> Iterator[Layout]:
    """Yield changes to a layout that keep the sizes of its axes: later ZeRO stages, sharding over
    all data ranks, sequence parallel and more recompute."""
    stages = [layout.shard]
    if layout.shard in ZERO_STAGES and layout.data_size > 1:
        stages += ZERO_STAGES[ZERO_STAGES.index(layout.shard) + 1 :]
    states: list[tuple[Shard, int | None]] = [(shard, None) for shard in stages]
    if layout.shard_group is not None:
        states.insert(0, (layout.shard, layout.shard_group))
    parallel = sorted({layout.sequence_parallel, layout.tp > 1})
    recomputes = RECOMPUTES[RECOMPUTES.index(layout.recompute) :]
    for (shard, group), is_parallel, recompute in product(states, parallel, recomputes):
        yield replace(
            layout,
            shard=shard,
            shard_group=group,
            sequence_parallel=is_parallel,
            recompute=recompute,
        )


def serving_options(job: Job, num_gpus: int) -> Iterator[Option]:
    most = job.gpus_per_node if num_gpus <= job.gpus_per_node else num_gpus
    for layout in serving_layouts(job.config, num_gpus, most):
        for place, (quant, kv_dtype) in enumerate(QUANTIZED):
            if (quant and job.quant) or (kv_dtype != "auto" and job.kv_dtype != "auto"):
                continue
            changed = replace(job, kv_dtype=kv_dtype if kv_dtype != "auto" else job.kv_dtype)
            if quant:
                try:
                    sharded = Layout(tp=layout.tp)
                    formats = choose_formats(job.stored, None, job.config, sharded, quant)
                except ValueError:  # of another model, or groups that the layout would split
                    continue
                changed = replace(changed, quant=quant, formats=formats)
            if changed.allows(layout):
                price = Price(num_gpus, False, False, place, 0, float(layout.tp), 0)
                yield Option(changed, layout, price)


# -- price


def least_bytes(option: Option) -> int:
    """Return bytes that an option needs at least, without replaying its step."""
    job = option.job
    layout = option.layout
    if job.mode == "serve":
        return 0
    each = BYTES_PER_PARAMETER[job.precision]
    params = parameter_counts(job.config).model / (layout.tp * layout.pp)
    states = sum(
        params * getattr(each, row) / (layout.shard_size if layout.shards(row) else 1)
        for row in ("parameters", "gradients") + (() if job.offload else ("optimizer",))
    )
    gathered = each.parameters * layout.shards("parameters") + each.gradients * layout.shards(
        "gradients"
    )
    states += gathered * parameter_counts(job.config).block / layout.tp
    block = block_bytes(
        job.config,
        share_of(job.config, layout, job.microbatch),
        computed_bytes(job.precision),
        layout.recompute,
    )
    if layout.pp == 1:
        return int(states) + block * job.config.num_layers
    first_stage = max(0, job.config.num_layers // layout.pp - 1)
    in_flight = min(layout.pp, layout.microbatches) if layout.schedule == "1f1b" else 1
    return max(int(states), block * first_stage * in_flight)


def rough_step_s(job: Job, layout: Layout) -> float:
    """Return a rough time per trained token, times the number of GPUs, in seconds."""
    config = job.config
    element = computed_bytes(job.precision)
    params = parameter_counts(config).model
    work = 1 + RECOMPUTED_WORK[layout.recompute]
    compute = 6 * params * work / (job.device.bf16_flops * MATMUL_SHARE)
    compute *= 1 + (layout.pp - 1) / (layout.microbatches * layout.chunks)
    forwards = 4 / 3 if layout.recompute == "full" else 1.0
    hidden = config.hidden_size * element
    tensor = 8 * forwards * (layout.tp - 1) * config.num_layers * hidden
    keys = 6 * config.num_kv_heads * config.head_dim * element
    context = EXPOSED_SHARE * (layout.cp - 1) * config.num_layers * keys
    stages = 2 * (layout.pp - 1) * hidden
    tokens = layout.dp * layout.microbatches * job.num_sequences * job.seq_tokens
    return (
        compute
        + tensor / bandwidth(job, layout.tp)
        + context / bandwidth(job, layout.tp * layout.cp)
        + stages / bandwidth(job, layout.world_size)
        + data_s(job, layout, params * element) / tokens
    )


def data_s(job: Job, layout: Layout, weight_bytes: int) -> float:
    """Return GPU-seconds of a step that gradients, weights and offloaded states take."""
    rank_bytes = weight_bytes / (layout.tp * layout.pp)
    ring = (layout.data_size - 1) / layout.data_size
    reduced = layout.microbatches if layout.shards("gradients") else 1
    gathered = 2 * layout.microbatches if layout.shards("parameters") else 1
    sent = ring * rank_bytes * (reduced + gathered)
    seconds = EXPOSED_SHARE * sent / bandwidth(job, layout.world_size)
    if job.offload:
        seconds += 3 * rank_bytes / layout.shard_size / HOST_BANDWIDTH
    return seconds * layout.world_size


def bandwidth(job: Job, num_ranks: int) -> float:
    """Return the bytes/s of an axis whose groups span `num_ranks` neighbors."""
    within = num_ranks <= job.gpus_per_node
    return job.device.link_bandwidth if within else min(NODE_BANDWIDTH, job.device.link_bandwidth)


class ParameterCounts(NamedTuple):
    """The number of parameters of a model, and of one of its blocks."""

    model: int
    block: int


@lru_cache(maxsize=16)
def parameter_counts(config: ModelConfig) -> ParameterCounts:
    specs = model_specs(config)
    in_blocks = num_params(spec for spec in specs if spec.layer is not None)
    return ParameterCounts(num_params(specs), in_blocks // config.num_layers)
