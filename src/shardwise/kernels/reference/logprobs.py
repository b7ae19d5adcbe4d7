"""Log-probabilities of sampled or given tokens and of the most probable tokens: log_softmax in
fp32.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.serving_interface import TokenLogprobs

ROWS_ON_GPU = 64
"""Rows per operation on a GPU. On a CPU it is one row, which fits in the cache and is
batch-invariant."""


def log_probabilities(
    logits: Sequence[Tensor] | Tensor, tokens: Sequence[int], num_top: int
) -> TokenLogprobs:
    """Return for each row of `logits` [R, V] its token, then the `num_top` most probable ones. NaN
    stays NaN."""
    assert len(logits) == len(tokens)
    ids: list[list[int]] = []
    values: list[list[float]] = []
    on_cpu = logits[0].device.type == "cpu"
    for part in (
        (row[None] for row in logits) if on_cpu else torch.stack(list(logits)).split(ROWS_ON_GPU)
    ):
        rows = part.float()
        part_tokens = tokens[len(ids) : len(ids) + len(part)]
        top = most_probable(rows, num_top) if num_top else [[] for _ in part_tokens]
        row_ids = [[token, *others] for token, others in zip(part_tokens, top, strict=True)]
        ids += row_ids
        index = torch.tensor(row_ids, device=rows.device)
        values += rows.log_softmax(-1).gather(-1, index).tolist()
    return ids, values


def most_probable(logits: Tensor, k: int) -> list[list[int]]:
    """Return the ids of the k largest logits of each row of [R, V], the largest first; of equal
    ones the lowest id first.

    `topk` does not define the order of ties, so it returns one more than k. If that one ties with
    the k-th, all tokens that tie are compared.
    """
    values, ids = (part.tolist() for part in logits.topk(min(k + 1, logits.shape[-1])))
    top_ids: list[list[int]] = []
    for row, (largest, largest_ids) in enumerate(zip(values, ids, strict=True)):
        pairs = sorted(zip(largest, largest_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        if len(largest) > k and largest[k - 1] == largest[k]:
            pairs = [pair for pair in pairs if pair[0] > largest[k]]
            equal = (logits[row] == largest[k]).nonzero()[: k - len(pairs), 0]
            pairs += [(largest[k], id) for id in equal.tolist()]
        top_ids.append([id for _, id in pairs[:k]])
    return top_ids
