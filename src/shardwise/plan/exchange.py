"""Bytes that ranks send each other inside the model: what tensor and context parallel do to
activations.

A rank sends these in every micro-batch, as its axes count them. With n tokens a rank, D elements
each, and S = n D e bytes (see `activations.py`); t tensor ranks, c context ranks:

    tensor parallel        enter                     leave                     a block, forward + backward
    without sp             - , all-reduce            all-reduce, -             4S(t-1)/t + 4S(t-1)/t
    with sp                gather, reduce-scatter    reduce-scatter, gather    4S(t-1)/t + 4S(t-1)/t

which are the 8 n D (t-1)/t elements of Shoeybi et al. 2019 and Korthikanti et al. 2022. The
embedding leaves, the head enters, and the softmax of the loss sums two numbers a token and finds
the maximum of one. `selective` gathers the two inputs of a block again, `full` repeats its forward.

    context parallel       forward                   backward
    ring                   (c-1) S of k, v           (c-1) S of k, v and (c-1) S of their gradients, in fp32
    all-to-all             (c-1)/c S of q, k, v      the same two of the gradients
                           and of the output

(Liu et al. 2023; Jacobs et al. 2023). Besides, once for each REDUCE, gradients of which every
tensor rank has one term are summed in fp32: under sp of all that is not cut (norms, biases after
the reduction, learned positions), of q and k norms, and over replicas of kv heads.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwise.config import ModelConfig
from shardwise.layout import AxisName, Coord, Layout, ring_bytes
from shardwise.model.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, longest_chunk
from shardwise.params import boxes, local_shape, model_specs, partial_axes, stage_units, units
from shardwise.plan.activations import MicroBatchShape, Share, num_blocks, share_of

WIDE_BYTES = 4  # fp32
FORWARDS = {"none": 1, "selective": 1, "full": 2}
"""How often a block is run forward."""


def tensor_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    microbatch: MicroBatchShape,
    element_bytes: int,
    times: Counter[tuple[str, str]],
) -> int:
    """What a rank sends other tensor ranks in a step. `times` counts the REDUCEs of each unit in
    it."""
    share = share_of(config, layout, microbatch)
    t = layout.tp
    size = share.tokens * share.hidden * element_bytes
    half = ring_bytes(size, t)  # a gather, or a reduce-scatter
    seam = (
        2 * half if layout.sequence_parallel else ring_bytes(2 * size, t)
    )  # of either kind, there and back
    gathered_again = 2 * half if layout.sequence_parallel and layout.recompute == "selective" else 0
    sent = num_blocks(config, layout, stage) * (
        (FORWARDS[layout.recompute] + 1) * 2 * seam + gathered_again
    )
    if stage == 0:
        sent += seam
    if stage == layout.pp - 1:
        sent += seam + softmax_bytes(share, t, element_bytes)
    return layout.microbatches * sent + partial_bytes(config, layout, stage, times)


def softmax_bytes(share: Share, size: int, element_bytes: int) -> int:
    """Of each chunk of rows one maximum and two sums a row, in fp32."""
    sent = 0
    for rows, num in chunks(share.tokens, PRODUCT_BYTES // (share.vocab * element_bytes)):
        for inner, num_inner in chunks(rows, SOFTMAX_BYTES // (share.vocab * WIDE_BYTES)):
            maximum, sums = (
                ring_bytes(2 * numbers * inner * WIDE_BYTES, size) for numbers in (1, 2)
            )
            sent += num * num_inner * (maximum + sums)
    return sent


def chunks(num_rows: int, most: int) -> Iterator[tuple[int, int]]:
    """(rows, how many) of even chunks of at most `most` rows: equal ones, and what is left."""
    size = longest_chunk(num_rows, most)
    if size:
        yield size, num_rows // size
        yield num_rows % size, 1


@dataclass(frozen=True)
class Terms:
    """Rows of a parameter of `num_rows` x `width` elements, of whose gradient each rank of `axis`
    has one term."""

    axis: AxisName
    rows: int
    num_rows: int
    width: int


@lru_cache(maxsize=16)
def unit_terms(config: ModelConfig, layout: Layout) -> dict[str, tuple[Terms, ...]]:
    """By unit; of a layout of tensor parallel alone, on which they depend."""
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    found = {}
    for unit, specs in units(model_specs(config)).items():
        terms = []
        for spec in specs:
            rows: Counter[AxisName] = Counter()
            for part, box in zip(spec.rows, boxes(spec, layout, first), strict=True):
                rows.update({axis: box.shape[0] for axis in partial_axes(spec, part, layout)})
            whole, *columns = local_shape(spec, layout, first)
            terms += [Terms(axis, num, whole, math.prod(columns)) for axis, num in rows.items()]
        found[unit] = tuple(terms)
    return found


def partial_bytes(
    config: ModelConfig, layout: Layout, stage: int, times: Counter[tuple[str, str]]
) -> int:
    """All terms of a unit are summed together, once for each REDUCE. FSDP knows nothing of them:
    they are summed once a step, of the rows that a data rank has, here the most that one may
    have."""
    by_unit = unit_terms(config, Layout(tp=layout.tp, sequence_parallel=layout.sequence_parallel))
    sizes: dict[AxisName, int] = {
        "tp": layout.tp,
        "kv_replica": layout.kv_replicas(config.num_kv_heads),
    }
    fsdp = layout.shard == "fsdp"
    sent = 0
    for unit in stage_units(config, layout, stage) & by_unit.keys():
        elements: Counter[AxisName] = Counter()
        for each in by_unit[unit]:
            held = (
                min(each.rows, math.ceil(each.num_rows / layout.shard_size)) if fsdp else each.rows
            )
            elements[each.axis] += held * each.width
        once = sum(
            ring_bytes(2 * WIDE_BYTES * number, sizes[axis]) for axis, number in elements.items()
        )
        sent += once * (1 if fsdp else times["REDUCE", unit])
    return sent


def context_bytes(
    config: ModelConfig, layout: Layout, stage: int, microbatch: MicroBatchShape, element_bytes: int
) -> int:
    """What a rank sends other context ranks in a step. A hop of a ring goes whole to the next
    rank."""
    share = share_of(config, layout, microbatch)
    c = layout.cp
    if layout.all_to_all:
        sizes = (
            share.tokens * width * element_bytes for width in (share.q + 2 * share.kv, share.q)
        )
        forward = backward = sum(ring_bytes(size, c) for size in sizes)
    else:
        elements = (c - 1) * share.tokens * 2 * share.kv
        forward = elements * element_bytes
        backward = elements * (element_bytes + WIDE_BYTES)
    blocks = layout.microbatches * num_blocks(config, layout, stage)
    return blocks * (FORWARDS[layout.recompute] * forward + backward)
