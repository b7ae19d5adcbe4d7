"""Sampling on a CPU: one row of logits at a time, where each filter reads only the candidates that
the filter before it kept.

It computes the definitions of `serve/sampling/filters.py`, in the same order. Those keep the shape
of the whole batch, for a GPU. A CPU is ten times faster row by row: a row fits in its cache, and
only tokens that may be kept are sorted. A row that is computed by itself is batch-invariant. The
native kernel (`csrc/sampling.h`) works in the same way.

Shapes: V vocabulary, or the candidates that are left.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwise.kernels.serving_interface import SamplingRow

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

BLOCK = 256
"""Probabilities per block of the inverse CDF: the draw finds a block first, then a token in it."""
MIN_TEMPERATURE = 1e-30
"""Lower temperatures are clamped to this one, by which fp32 can still divide."""


def sample_rows(rows: Sequence[Tensor] | Tensor, params: Sequence[SamplingRow]) -> list[int | None]:
    """Return a token for each row of logits [V], fp32.

    It is None where the largest logit is not finite: some are NaN or infinite, or all are minus
    infinity.
    """
    return [sample_row(row, each) for row, each in zip(rows, params, strict=True)]


def sample_row(logits: Tensor, params: SamplingRow) -> int | None:
    largest = logits.numpy().max()  # ten times as fast as torch's
    if not math.isfinite(largest):
        return None
    if params.temperature == 0:
        return int(logits.numpy().argmax())
    scaled = (logits - float(largest)) / max(params.temperature, MIN_TEMPERATURE)
    kept: list[Ids] = []
    if params.min_p > 0:
        kept.append(keep_min_p(scaled.numpy(), params.min_p))
        scaled = scaled[kept[-1]]
    if 0 < params.top_k < len(scaled):
        kept.append(keep_top_k(scaled.numpy(), params.top_k))
        scaled = scaled[kept[-1]]
    probabilities: Floats = scaled.softmax(-1).numpy()
    if params.top_p < 1:
        kept.append(keep_top_p(probabilities, params.top_p))
        probabilities = probabilities[kept[-1]]
    token = inverse_cdf_draw(params.uniform, probabilities)
    for ids in reversed(kept):
        token = int(ids[token])
    return token


def keep_min_p(logits: Floats, min_p: float) -> Ids:
    """Return the ids with p >= min_p * max(p), for logits of which the largest is 0."""
    return np.flatnonzero(logits >= np.float32(math.log(min_p)))


def keep_top_k(logits: Floats, top_k: int) -> Ids:
    """Return the ids of the `top_k` largest logits, and of all that tie with the last of them.

    The k-th largest logit is no smaller than the k-th largest of the maxima of blocks, so smaller
    ones are dropped first.
    """
    maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), 64))
    if top_k > len(maxima):
        return np.flatnonzero(logits >= kth_largest(logits, top_k))
    candidates = np.flatnonzero(logits >= kth_largest(maxima, top_k))
    values = logits[candidates]
    return candidates[values >= kth_largest(values, top_k)]


def kth_largest(values: Floats, k: int) -> np.float32:
    """Return the k-th largest of `values`, k from 1 to their number."""
    return np.partition(values, -k)[-k]


def keep_top_p(probabilities: Floats, top_p: float) -> Ids:
    """Return the fewest ids that have `top_p` together, by falling probability; of equal ones the
    lowest ids.

    Tokens below (1 - top_p) / V have less than 1 - top_p together, so those above it suffice, and
    nearly always those above 1e-4 suffice already. Only the candidates are sorted.
    """
    for threshold in (1e-4, 0.5 * (1 - top_p) / len(probabilities)):
        candidates = np.flatnonzero(probabilities >= np.float32(threshold))
        values = probabilities[candidates]
        if values.sum(dtype=np.float64) > top_p:
            break
    falling = np.sort(values)[::-1]
    before = np.cumsum(falling, dtype=np.float64) - falling
    num_kept = max(1, int(np.count_nonzero(before < top_p)))
    lowest = falling[num_kept - 1]
    keep = values > lowest
    keep[np.flatnonzero(values == lowest)[: num_kept - np.count_nonzero(keep)]] = True
    return candidates[keep]


def inverse_cdf_draw(uniform: float, probabilities: Floats) -> int:
    """Return the index at which the cumulative sum passes `uniform` times the total.

    Sums are in fp64: fp32 would lose rare tokens in a vocabulary of 100,000.
    """
    blocks = np.add.reduceat(
        probabilities, np.arange(0, len(probabilities), BLOCK), dtype=np.float64
    ).cumsum()
    threshold = min(uniform * blocks[-1], np.nextafter(blocks[-1], 0))
    block = int(blocks.searchsorted(threshold, side="right"))
    cdf = probabilities[BLOCK * block : BLOCK * (block + 1)].cumsum(dtype=np.float64)
    threshold = min(threshold - (blocks[block - 1] if block else 0.0), np.nextafter(cdf[-1], 0))
    return BLOCK * block + int(cdf.searchsorted(threshold, side="right"))
