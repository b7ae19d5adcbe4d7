"""Bytes that one rank sends in a training step, counted from the table that the run executes.

Data ranks exchange weights and gradients. A unit of state is sharded into shards of S bytes over n
ranks, and replicated in g groups of n ranks:

    GATHER  S(n - 1)        every rank's shard of the weights goes round a ring of n
    REDUCE  S(n - 1)        so do the gradients, summed on the way, in the dtype that stores them
    finish  2S(g - 1)/g     once per step, each shard of the gradients is summed over the groups

Without ZeRO a shard is the whole unit (n = 1), and the sum over all data ranks is the last line. So
with P parameters, plain data parallel and ZeRO-1 send almost 2P elements per step, ZeRO-2 2P and
ZeRO-3 3P with one micro-batch (Rajbhandari et al. 2020, section 7). Every further micro-batch adds
P at stage 2 and 3P at stage 3.

Tensor and context ranks exchange activations, in every micro-batch. With n tokens per rank, D
elements per token, and S = n D e bytes (see `activations.py`); t tensor ranks, c context ranks:

    tensor parallel        enter                     leave                     per block, F + B
    without sp             - , all-reduce            all-reduce, -             4S(t-1)/t + 4S(t-1)/t
    with sp                gather, reduce-scatter    reduce-scatter, gather    4S(t-1)/t + 4S(t-1)/t

which are the 8 n D (t-1)/t elements of Shoeybi et al. 2019 and Korthikanti et al. 2022. The
embedding leaves, the head enters, and the softmax of the loss sums two numbers per token and takes
the maximum of one. `selective` gathers the two inputs of a block again; `full` repeats its forward.

    context parallel       forward                   backward
    ring                   (c-1) S of k, v           (c-1) S of k, v, and of their fp32 gradients
    all-to-all             (c-1)/c S of q, k, v      the same two for the gradients
                           and of the output

(Liu et al. 2023; Jacobs et al. 2023). In addition, once per REDUCE, gradients that are partial sums
on every tensor rank are summed in fp32: with sp those of all unsharded parameters (norms, biases
after the reduction, learned positions), those of q and k norms, and those over replicas of KV
heads.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from shardwise.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, longest_chunk
from shardwise.config import ModelConfig
from shardwise.layout import AxisName, Coord, Layout, ring_bytes
from shardwise.parallel.pipeline.schedules import step_table
from shardwise.params import block_unit, model_specs, rank_layers, stage_units, units
from shardwise.plan.activations import MicroBatchShape, Share, num_blocks, share_of
from shardwise.plan.ledger import (
    UnitShapes,
    computed_bytes,
    element_bytes,
    model_shapes,
    shard_sizes,
    unit_sizes,
)
from shardwise.precision import FP32_BYTES, GradientPrecision, Precision
from shardwise.shards import boxes, local_shape, partial_axes

CommBytes = dict[str, int | None]
"""Bytes by axis; None where the axis has several ranks and no micro-batch is given, without which
the number is unknown."""
ModelAxis = Literal["tp", "pp", "cp"]
MODEL_AXES: tuple[ModelAxis, ...] = get_args(ModelAxis)
"""The axes over which ranks exchange activations."""
ActionCounts = Counter[tuple[str, str]]
"""Executions of each (kind, unit) per step."""

NUM_FORWARDS = {"none": 1, "selective": 1, "full": 2}
"""Forward passes of a block per step, by what is recomputed."""


def comm_bytes(
    config: ModelConfig,
    layout: Layout,
    precision: Precision = "bf16",
    gradients: GradientPrecision = "same",
    microbatch: MicroBatchShape | None = None,
) -> CommBytes:
    """Return the bytes that a rank sends in one training step, by axis: on each axis those of the
    pipeline stage that sends most on it.

    `dp` is what the data ranks (dp x cp) send each other. Replicas of KV heads count under `tp`,
    tied embeddings under `pp`. The other axes need a `microbatch`.
    """
    found = unpriced(layout)
    element = computed_bytes(precision)
    for stage in range(layout.pp):
        counts = step_counts(config, layout, stage)
        sent = {"dp": data_bytes(config, layout, stage, precision, gradients, counts)}
        if microbatch is not None:
            sent["tp"] = tensor_bytes(config, layout, stage, microbatch, element, counts)
            sent["cp"] = context_bytes(config, layout, stage, microbatch, element)
            sent["pp"] = pipeline_bytes(config, layout, stage, microbatch, element, counts)
        found |= {axis: max(num_bytes, found.get(axis) or 0) for axis, num_bytes in sent.items()}
    return found


def unpriced(layout: Layout) -> CommBytes:
    """Return the bytes by axis before anything is counted: an axis of one rank sends nothing."""
    return {"dp": 0} | {axis: 0 if getattr(layout, axis) == 1 else None for axis in MODEL_AXES}


# -- data ranks


def data_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    precision: Precision,
    gradients: GradientPrecision,
    counts: ActionCounts,
) -> int:
    """Return the bytes of weights and gradients that a rank sends to other data ranks in a step."""
    weight_bytes = computed_bytes(precision)
    grad_bytes = element_bytes(layout, precision, gradients).gradients
    shapes = model_shapes(config, layout.tp)
    return sum(
        unit_data_bytes(
            shapes[unit],
            layout,
            counts["GATHER", unit] * weight_bytes + counts["REDUCE", unit] * grad_bytes,
            grad_bytes,
        )
        for unit in stage_units(config, layout, stage)
    )


def unit_data_bytes(
    shapes: UnitShapes, layout: Layout, ring_element_bytes: int, grad_bytes: int
) -> int:
    """Return what a rank sends of one unit in a step: `ring_element_bytes` for each element of its
    shard around the ring of shards, and the sum over replicas of gradients of `grad_bytes` each."""
    n, groups = map(layout.size, shapes.axes)
    shard = shapes.shard_elements(layout)
    around = shard * ring_element_bytes * (n - 1)
    return around + 2 * math.ceil(shard / groups) * grad_bytes * (groups - 1)


def stage_elements(config: ModelConfig, layout: Layout) -> int:
    """Return P: the number of parameters of the largest stage, before data ranks shard them."""
    sizes = unit_sizes(config, layout)
    return max(
        sum(sizes[unit] for unit in stage_units(config, layout, stage))
        for stage in range(layout.pp)
    )


def step_counts(config: ModelConfig, layout: Layout, stage: int) -> ActionCounts:
    """Return how often each unit is gathered and reduced in a step, and how often a stage sends.
    Without a pipeline every micro-batch after the first adds the same."""
    if layout.shard == "fsdp":
        return fsdp_counts(config, layout, stage)
    if layout.pp > 1 or layout.microbatches == 1:
        return table_counts(config, layout, stage, layout.microbatches)
    one = table_counts(config, layout, stage, 1)
    two = table_counts(config, layout, stage, 2)
    more = layout.microbatches - 1
    return Counter({key: one[key] + more * (two[key] - one[key]) for key in two})


def table_counts(
    config: ModelConfig, layout: Layout, stage: int, num_microbatches: int
) -> ActionCounts:
    table = step_table(config, layout, stage, num_microbatches)
    return Counter(
        (action.kind, action.unit) for action in table if action.unit or action.kind == "SEND"
    )


def fsdp_counts(config: ModelConfig, layout: Layout, stage: int) -> ActionCounts:
    """Return what FSDP, which has no table, does per step. In every micro-batch it gathers a block
    for the forward and (without `keep`) again for the backward, gathers the other units once, and
    reduces all."""
    counts: ActionCounts = Counter()
    blocks = {block_unit(layer) for layer in rank_layers(config, layout, stage)}
    for unit in stage_units(config, layout, stage):
        twice = unit in blocks and not layout.keep
        counts["GATHER", unit] = layout.microbatches * (2 if twice else 1)
        counts["REDUCE", unit] = layout.microbatches
    return counts


# -- pipeline ranks


def pipeline_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    microbatch: MicroBatchShape,
    element_bytes: int,
    counts: ActionCounts,
) -> int:
    """Return the bytes that a rank sends to other stages in a step: the residual stream or its
    gradient at every SEND, and, once per step, its shard of the gradient of a tied embedding in
    fp32, which the first and the last stage sum."""
    share = share_of(config, layout, microbatch)
    sent = counts["SEND", ""] * share.outer_tokens * share.hidden * element_bytes
    if config.tied and layout.pp > 1 and stage in (0, layout.pp - 1):
        sent += ring_bytes(2 * FP32_BYTES * shard_sizes(config, layout)["embed"], 2)
    return sent


# -- tensor ranks


def tensor_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    microbatch: MicroBatchShape,
    element_bytes: int,
    counts: ActionCounts,
) -> int:
    """Return the bytes that a rank sends to other tensor ranks in a step. `counts` has the REDUCEs
    of each unit."""
    share = share_of(config, layout, microbatch)
    t = layout.tp
    size = share.tokens * share.hidden * element_bytes
    gather = ring_bytes(size, t)  # a reduce-scatter sends the same
    all_reduce = ring_bytes(2 * size, t)
    seam = 2 * gather if layout.sequence_parallel else all_reduce  # forward and backward
    regathered = 2 * gather if layout.sequence_parallel and layout.recompute == "selective" else 0
    passes = NUM_FORWARDS[layout.recompute] + 1
    sent = num_blocks(config, layout, stage) * (passes * 2 * seam + regathered)
    if stage == 0:
        sent += seam
    if stage == layout.pp - 1:
        sent += seam + softmax_bytes(share, t, element_bytes)
    return layout.microbatches * sent + partial_sum_bytes(config, layout, stage, counts)


def softmax_bytes(share: Share, size: int, element_bytes: int) -> int:
    """Return the bytes that the vocabulary-parallel softmax sends: per chunk of rows, one maximum
    and two sums per row, in fp32."""
    sent = 0
    for rows, num in chunk_counts(share.tokens, PRODUCT_BYTES // (share.vocab * element_bytes)):
        for inner, num_inner in chunk_counts(rows, SOFTMAX_BYTES // (share.vocab * FP32_BYTES)):
            maximum = ring_bytes(2 * inner * FP32_BYTES, size)
            sums = ring_bytes(4 * inner * FP32_BYTES, size)
            sent += num * num_inner * (maximum + sums)
    return sent


def chunk_counts(num_rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, number of chunks) for even chunks of at most `most` rows: the equal ones, then
    the remainder."""
    size = longest_chunk(num_rows, most)
    if size:
        yield size, num_rows // size
        yield num_rows % size, 1


@dataclass(frozen=True)
class PartialSum:
    """Elements of a parameter whose gradient is a partial sum on each rank of `axis`: `width` in
    each of `rows` of the `num_rows` rows of the local parameter."""

    axis: AxisName
    rows: int
    num_rows: int
    width: int


@lru_cache(maxsize=16)
def partial_sums(config: ModelConfig, layout: Layout) -> dict[str, tuple[PartialSum, ...]]:
    """Return the partial sums of each unit. They depend on tensor parallelism alone, so `layout`
    has no other axis."""
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    found = {}
    for unit, specs in units(model_specs(config)).items():
        sums = []
        for spec in specs:
            num_rows = local_shape(spec, layout, first)[0]
            rows: Counter[tuple[AxisName, int]] = Counter()
            for part, box in zip(spec.all_parts, boxes(spec, layout, first), strict=True):
                width = math.prod(box.shape[1:])
                for axis in partial_axes(spec, part, layout):
                    rows[axis, width] += box.shape[0]
            sums += [PartialSum(axis, num, num_rows, width) for (axis, width), num in rows.items()]
        found[unit] = tuple(sums)
    return found


def partial_sum_bytes(config: ModelConfig, layout: Layout, stage: int, counts: ActionCounts) -> int:
    """Return the bytes that sums of partial gradients over tensor ranks send in a step.

    All partial sums of a unit travel together, once per REDUCE. Under FSDP they are summed once per
    step, over the rows that a data rank has; this counts the most that one may have.
    """
    by_unit = partial_sums(config, Layout(tp=layout.tp, sequence_parallel=layout.sequence_parallel))
    sizes: dict[AxisName, int] = {
        "tp": layout.tp,
        "kv_replica": layout.kv_replicas(config.num_kv_heads),
    }
    fsdp = layout.shard == "fsdp"
    sent = 0
    for unit in stage_units(config, layout, stage):
        elements: Counter[AxisName] = Counter()
        for each in by_unit[unit]:
            sharded_rows = math.ceil(each.num_rows / layout.shard_size)
            elements[each.axis] += (
                min(each.rows, sharded_rows) if fsdp else each.rows
            ) * each.width
        once = sum(
            ring_bytes(2 * FP32_BYTES * number, sizes[axis]) for axis, number in elements.items()
        )
        sent += once * (1 if fsdp else counts["REDUCE", unit])
    return sent


# -- context ranks


def context_bytes(
    config: ModelConfig, layout: Layout, stage: int, microbatch: MicroBatchShape, element_bytes: int
) -> int:
    """Return the bytes that a rank sends to other context ranks in a step. A hop of a ring sends
    everything to the next rank."""
    share = share_of(config, layout, microbatch)
    c = layout.cp
    if layout.all_to_all:
        widths = share.q + 2 * share.kv, share.q
        sizes = (share.tokens * width * element_bytes for width in widths)
        forward = backward = sum(ring_bytes(size, c) for size in sizes)
    else:
        elements = (c - 1) * share.tokens * 2 * share.kv
        forward = elements * element_bytes
        backward = elements * (element_bytes + FP32_BYTES)
    blocks = layout.microbatches * num_blocks(config, layout, stage)
    return blocks * (NUM_FORWARDS[layout.recompute] * forward + backward)
