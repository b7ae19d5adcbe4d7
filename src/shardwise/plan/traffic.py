"""Bytes that one rank sends in a step, counted on the table that the run executes.

Here is what the data ranks send each other, weights that are gathered and gradients that are
summed; what tensor and context ranks do, inside the model, is in `exchange.py`. A unit of state is
cut into shards of S bytes over n ranks, and repeated in g groups of them:

    GATHER  S(n - 1)        every rank's shard of the weights goes round a ring of n
    REDUCE  S(n - 1)        so do the gradients, summed on their way, in the dtype in which they are kept
    finish  2S(g - 1)/g     once a step, each shard of the gradients is summed over the groups

Without ZeRO a shard is the whole unit (n = 1), and its sum over all data ranks is the last line. So
with P parameters a plain sum and ZeRO-1 send almost 2P elements a step, ZeRO-2 2P and ZeRO-3 3P
with one micro-batch (Rajbhandari et al. 2020, section 7); every micro-batch more adds P in stage 2
and 3P in stage 3.
"""

import math
from collections import Counter

from shardwise.config import ModelConfig
from shardwise.layout import Layout, ring_bytes
from shardwise.params import stage_units
from shardwise.plan.activations import MicroBatchShape, share_of
from shardwise.plan.exchange import WIDE_BYTES, context_bytes, tensor_bytes
from shardwise.plan.ledger import (
    Gradients,
    Precision,
    computed_bytes,
    element_bytes,
    shard_sizes,
    unit_sizes,
)
from shardwise.plan.step import step_table

CommBytes = dict[str, int | None]
"""By axis; None where the axis is cut and no micro-batch is given, without which what it sends is
not known."""


def comm_bytes(
    config: ModelConfig,
    layout: Layout,
    precision: Precision = "bf16",
    gradients: Gradients = "same",
    microbatch: MicroBatchShape | None = None,
) -> CommBytes:
    """Bytes that a rank sends in one training step: on each axis, one of the stage that sends most
    on it. `dp` is what the data ranks (dp x cp) send each other; replicas of kv heads count under
    `tp`, tied embeddings under `pp`. What the other axes send takes a `microbatch` to tell."""
    found: CommBytes = unpriced(layout)
    element = computed_bytes(precision)
    for stage in range(layout.pp):
        times = step_counts(config, layout, stage)
        sent = {"dp": data_bytes(config, layout, stage, precision, gradients, times)}
        if microbatch is not None:
            sent["tp"] = tensor_bytes(config, layout, stage, microbatch, element, times)
            sent["cp"] = context_bytes(config, layout, stage, microbatch, element)
            sent["pp"] = pipeline_bytes(config, layout, stage, microbatch, element, times)
        found |= {axis: max(num_bytes, found.get(axis) or 0) for axis, num_bytes in sent.items()}
    return found


def unpriced(layout: Layout) -> CommBytes:
    """An axis of one rank sends nothing."""
    return {"dp": 0} | {
        axis: 0 if getattr(layout, axis) == 1 else None for axis in ("tp", "pp", "cp")
    }


def data_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    precision: Precision,
    gradients: Gradients,
    times: Counter[tuple[str, str]],
) -> int:
    weight_bytes = computed_bytes(precision)
    grad_bytes = element_bytes(layout, precision, gradients).gradients
    n = layout.shard_size
    groups = layout.data_size // layout.shard_size
    sizes = shard_sizes(config, layout)
    sent = 0
    for unit in stage_units(config, layout, stage) & sizes.keys():
        sent += times["GATHER", unit] * sizes[unit] * weight_bytes * (n - 1)
        sent += times["REDUCE", unit] * sizes[unit] * grad_bytes * (n - 1)
        sent += 2 * math.ceil(sizes[unit] / groups) * grad_bytes * (groups - 1)
    return sent


def pipeline_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    microbatch: MicroBatchShape,
    element_bytes: int,
    times: Counter[tuple[str, str]],
) -> int:
    """What a rank sends other stages: the residual stream or its gradient at every SEND; and once a
    step, of a tied embedding, its shard of the gradient in fp32, which the first and the last stage
    sum."""
    share = share_of(config, layout, microbatch)
    sent = times["SEND", ""] * share.outer_tokens * share.hidden * element_bytes
    if config.tied and layout.pp > 1 and stage in (0, layout.pp - 1):
        sent += ring_bytes(2 * WIDE_BYTES * shard_sizes(config, layout)["embed"], 2)
    return sent


def stage_elements(config: ModelConfig, layout: Layout) -> int:
    """P: the parameters of the largest stage, before data ranks cut them."""
    sizes = unit_sizes(config, layout)
    return max(
        sum(sizes[unit] for unit in stage_units(config, layout, stage) & sizes.keys())
        for stage in range(layout.pp)
    )


def step_counts(config: ModelConfig, layout: Layout, stage: int) -> Counter[tuple[str, str]]:
    """How often each unit is gathered and reduced in a step, and how often a stage sends. Without a
    pipeline every micro-batch after the first adds the same."""
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
) -> Counter[tuple[str, str]]:
    table = step_table(config, layout, stage, num_microbatches)
    return Counter(
        (action.kind, action.unit) for action in table if action.unit or action.kind == "SEND"
    )


def fsdp_counts(config: ModelConfig, layout: Layout, stage: int) -> Counter[tuple[str, str]]:
    """FSDP has no table: every micro-batch it gathers a block for the forward and (unless it keeps
    it) again for the backward, the rest once, and reduces all."""
    counts: Counter[tuple[str, str]] = Counter()
    for unit in stage_units(config, layout, stage):
        twice = unit.startswith("blocks.") and not layout.keep
        counts["GATHER", unit] = layout.microbatches * (2 if twice else 1)
        counts["REDUCE", unit] = layout.microbatches
    return counts
