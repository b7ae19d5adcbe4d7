"""Log-probabilities of tokens that were chosen, or given: under the logits as the model made them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.serve.request import Logprob


def log_probabilities(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[Logprob]:
    """For each row of `logits` [T, V] its token's log_softmax in fp32, with the `num_top` most probable of that row.

    For a prompt's own tokens: row t is of the logits after token t, `tokens` are those that came next. Rows are taken
    one by one on a CPU (in its cache, and alike in any company), in chunks on a GPU. NaN stays NaN.
    """
    assert len(logits) == len(tokens) == len(num_top)
    told: list[Logprob] = []
    for part in logits.split(1 if logits.device.type == "cpu" else 64):
        start, end = len(told), len(told) + len(part)
        told += _of_rows(part.float(), tokens[start:end], num_top[start:end])
    return told


def _of_rows(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[Logprob]:
    top = most_probable(logits, max(num_top)) if any(num_top) else [[] for _ in tokens]
    told = [[token, *ids] for token, ids in zip(tokens, top, strict=True)]
    values = logits.log_softmax(-1).gather(-1, torch.tensor(told, device=logits.device)).tolist()
    return [
        Logprob(token, row[0], tuple(zip(ids[:num], row[1:], strict=False)))
        for token, ids, row, num in zip(tokens, top, values, num_top, strict=True)
    ]


def most_probable(logits: Tensor, k: int) -> list[list[int]]:
    """The ids of the k largest logits of each row of [T, V], largest first, of equal ones the lowest id first.

    topk says nothing about ties, so one more than k are asked for: if that one ties, all that do are looked at.
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
