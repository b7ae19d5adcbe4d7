"""Bytes that one rank sends in a step, counted on the table that the run executes.

Only what the data ranks send each other is priced so far: weights that are gathered, gradients that are summed. A unit
of state is cut into shards of S bytes over n ranks, and repeated in g groups of them:

    GATHER  S(n - 1)        every rank's shard of the weights goes round a ring of n
    REDUCE  S(n - 1)        so do the gradients, summed on their way, in the dtype in which they are kept
    finish  2S(g - 1)/g     once a step, each shard of the gradients is summed over the groups

Without ZeRO a shard is the whole unit (n = 1), and its sum over all data ranks is the last line. So with P parameters
a plain sum and ZeRO-1 send almost 2P elements a step, ZeRO-2 2P and ZeRO-3 3P with one micro-batch (Rajbhandari et al.
2020, section 7); every micro-batch more adds P in stage 2 and 3P in stage 3.
"""

import math
from collections import Counter

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.params import stage_units
from shardwise.plan.memory import Gradients, Precision, computed_bytes, element_bytes, shard_sizes, unit_sizes
from shardwise.plan.step import step_table

CommBytes = dict[str, int | None]
"""By axis; None where the axis is cut and what it sends is not counted yet."""


def comm_bytes(
    config: ModelConfig, layout: Layout, precision: Precision = "bf16", gradients: Gradients = "same"
) -> CommBytes:
    """Bytes that a rank of the busiest stage sends in one training step. `dp` is what the data ranks (dp x cp) send
    each other; what tensor, pipeline and context parallel send inside the model is not counted yet."""
    busiest = max(data_bytes(config, layout, stage, precision, gradients) for stage in range(layout.pp))
    return {"dp": busiest, **unpriced(layout)}


def unpriced(layout: Layout) -> CommBytes:
    """An axis of one rank sends nothing."""
    return {axis: 0 if getattr(layout, axis) == 1 else None for axis in ("tp", "pp", "cp")}


def data_bytes(config: ModelConfig, layout: Layout, stage: int, precision: Precision, gradients: Gradients) -> int:
    weight_bytes, grad_bytes = computed_bytes(precision), element_bytes(layout, precision, gradients).gradients
    n, groups = layout.shard_size, layout.data_size // layout.shard_size
    times, sizes = step_counts(config, layout, stage), shard_sizes(config, layout)
    sent = 0
    for unit in stage_units(config, layout, stage) & sizes.keys():
        sent += times["GATHER", unit] * sizes[unit] * weight_bytes * (n - 1)
        sent += times["REDUCE", unit] * sizes[unit] * grad_bytes * (n - 1)
        sent += 2 * math.ceil(sizes[unit] / groups) * grad_bytes * (groups - 1)
    return sent


def stage_elements(config: ModelConfig, layout: Layout) -> int:
    """P: the parameters of the largest stage, before data ranks cut them."""
    sizes = unit_sizes(config, layout)
    return max(
        sum(sizes[unit] for unit in stage_units(config, layout, stage) & sizes.keys()) for stage in range(layout.pp)
    )


def step_counts(config: ModelConfig, layout: Layout, stage: int) -> Counter[tuple[str, str]]:
    """How often each unit is gathered and reduced in a step. Every micro-batch after the first adds the same."""
    if layout.shard == "fsdp":
        return fsdp_counts(config, layout, stage)
    one = table_counts(config, layout, stage, 1)
    if layout.microbatches == 1:
        return one
    two = table_counts(config, layout, stage, 2)
    more = layout.microbatches - 1
    return Counter({key: one[key] + more * (two[key] - one[key]) for key in two})


def table_counts(config: ModelConfig, layout: Layout, stage: int, num_microbatches: int) -> Counter[tuple[str, str]]:
    table = step_table(config, layout, stage, num_microbatches)
    return Counter((action.kind, action.unit) for action in table if action.unit)


def fsdp_counts(config: ModelConfig, layout: Layout, stage: int) -> Counter[tuple[str, str]]:
    """FSDP has no table: every micro-batch it gathers a block for the forward and (unless it keeps it) again for the
    backward, the rest once, and reduces all."""
    counts: Counter[tuple[str, str]] = Counter()
    for unit in stage_units(config, layout, stage):
        twice = unit.startswith("blocks.") and not layout.keep
        counts["GATHER", unit] = layout.microbatches * (2 if twice else 1)
        counts["REDUCE", unit] = layout.microbatches
    return counts
