"""Log-probabilities of tokens that were chosen, or given, and of the most probable ones:
log_softmax in fp32.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.interface import Told

ROWS_ON_GPU = 64
"""Worked on at once. On a CPU it is one: in its cache, and alike in any company."""


def log_probabilities(
    logits: Sequence[Tensor] | Tensor, tokens: Sequence[int], num_top: int
) -> Told:
    """For each row of `logits` [R, V] its token, then the `num_top` most probable ones. NaN stays
    NaN."""
    assert len(logits) == len(tokens)
    ids: list[list[int]] = []
    values: list[list[float]] = []
    on_cpu = logits[0].device.type == "cpu"
    for part in (
        (row[None] for row in logits) if on_cpu else torch.stack(list(logits)).split(ROWS_ON_GPU)
    ):
        rows = part.float()
        mine = tokens[len(ids) : len(ids) + len(part)]
        top = most_probable(rows, num_top) if num_top else [[] for _ in mine]
        told = [[token, *others] for token, others in zip(mine, top, strict=True)]
        ids += told
        values += rows.log_softmax(-1).gather(-1, torch.tensor(told, device=rows.device)).tolist()
    return ids, values


def most_probable(logits: Tensor, k: int) -> list[list[int]]:
    """The ids of the k largest logits of each row of [R, V], largest first, of equal ones the
    lowest id first.

    topk says nothing about ties, so one more than k are asked for: if that one ties, all that do
    are looked at.
    """
    values, ids = (part.tolist() for part in logits.topk(min(k + 1, logits.shape[-1])))
    found: list[list[int]] = []
    for row, (largest, their_ids) in enumerate(zip(values, ids, strict=True)):
        pairs = sorted(zip(largest, their_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        if len(largest) > k and largest[k - 1] == largest[k]:
            pairs = [pair for pair in pairs if pair[0] > largest[k]]
            equal = (logits[row] == largest[k]).nonzero()[: k - len(pairs), 0]
            pairs += [(largest[k], id) for id in equal.tolist()]
        found.append([id for _, id in pairs[:k]])
    return found
