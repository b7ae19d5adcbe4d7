"""One row of logits on a CPU: each filter leaves fewer candidates, and the next one looks at those
alone.

The definitions of serve/filters.py, in the same order. There a whole batch keeps its shape, as a
GPU likes it; a CPU is ten times faster when it takes row after row, each of which fits in its
cache, and sorts only what could be kept. And a row that is worked on by itself cannot depend on its
batch mates, not even in its last bit. The native kernel (`csrc/sampling.h`) is made alike.

Shapes: V vocabulary, or as many candidates as are left.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwise.kernels.interface import Draw

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

BLOCK = 256
"""Sums of this many probabilities are looked at before any single one."""
COLDEST = 1e-30
"""A lower temperature is taken for this one, which fp32 can still divide by."""


def choose_each(rows: Sequence[Tensor] | Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The token of each row [V], fp32. None where there is no largest logit: some are NaN or
    infinite, or all are minus infinity."""
    return [choose(row, draw) for row, draw in zip(rows, draws, strict=True)]


def choose(logits: Tensor, draw: Draw) -> int | None:
    highest = logits.numpy().max()  # ten times as fast as torch's
    if not math.isfinite(highest):
        return None
    if draw.temperature == 0:
        return int(logits.numpy().argmax())
    scaled = (logits - float(highest)) / max(draw.temperature, COLDEST)
    kept: list[Ids] = []
    if draw.min_p > 0:
        kept.append(keep_min_p(scaled.numpy(), draw.min_p))
        scaled = scaled[kept[-1]]
    if 0 < draw.top_k < len(scaled):
        kept.append(keep_top_k(scaled.numpy(), draw.top_k))
        scaled = scaled[kept[-1]]
    probabilities: Floats = scaled.softmax(-1).numpy()
    if draw.top_p < 1:
        kept.append(keep_top_p(probabilities, draw.top_p))
        probabilities = probabilities[kept[-1]]
    token = piece_under(draw.point, probabilities)
    for places in reversed(kept):
        token = int(places[token])
    return token


def keep_min_p(logits: Floats, min_p: float) -> Ids:
    """Where p >= min_p * max(p), said in logits of which the largest is 0."""
    return np.flatnonzero(logits >= np.float32(math.log(min_p)))


def keep_top_k(logits: Floats, top_k: int) -> Ids:
    """Where logits are at least as large as the k-th largest; all that tie with it stay.

    The k-th largest of all is no smaller than the k-th largest among the maxima of blocks.
    """
    maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), 64))
    if top_k > len(maxima):
        return np.flatnonzero(logits >= kth_largest(logits, top_k))
    candidates = np.flatnonzero(logits >= kth_largest(maxima, top_k))
    values = logits[candidates]
    return candidates[values >= kth_largest(values, top_k)]


def kth_largest(values: Floats, k: int) -> np.float32:
    """The k-th largest of all `values`, k from 1 to their number."""
    return np.partition(values, -k)[-k]


def keep_top_p(probabilities: Floats, top_p: float) -> Ids:
    """Where the fewest tokens are that have `top_p` together, taken by falling probability, of
    equal ones the first.

    All tokens below (1 - top_p) / V together have less than 1 - top_p, so those above have enough,
    and nearly always those above 1/10,000 have enough already: only they are sorted.
    """
    for least in (1e-4, 0.5 * (1 - top_p) / len(probabilities)):
        candidates = np.flatnonzero(probabilities >= np.float32(least))
        values = probabilities[candidates]
        if values.sum(dtype=np.float64) > top_p:
            break
    falling = np.sort(values)[::-1]
    before = np.cumsum(falling, dtype=np.float64) - falling
    num_kept = max(1, int(np.count_nonzero(before < top_p)))
    lowest = falling[num_kept - 1]
    stays = values > lowest
    stays[np.flatnonzero(values == lowest)[: num_kept - np.count_nonzero(stays)]] = True
    return candidates[stays]


def piece_under(point: float, probabilities: Floats) -> int:
    """Whose piece lies under `point` times the sum of all: first which block's, then which one's in
    it.

    Sums are in fp64: in fp32 the pieces of rare tokens would vanish in a vocabulary of 100,000.
    """
    blocks = np.add.reduceat(
        probabilities, np.arange(0, len(probabilities), BLOCK), dtype=np.float64
    ).cumsum()
    point = min(point * blocks[-1], np.nextafter(blocks[-1], 0))
    block = int(blocks.searchsorted(point, side="right"))
    pieces = probabilities[BLOCK * block : BLOCK * (block + 1)].cumsum(dtype=np.float64)
    point = min(point - (blocks[block - 1] if block else 0.0), np.nextafter(pieces[-1], 0))
    return BLOCK * block + int(pieces.searchsorted(point, side="right"))
