"""From logits to the next tokens of a batch: what is told of them, what a sequence changes, the filters, the choice.

In the order in which vLLM does it, for each row:

    log-probabilities   of the logits as they came (logprobs.py)
    allowed, min_tokens, logit_bias, repetition, frequency and presence penalty   (penalties.py)
    greedy              the largest logit, of equal ones the lowest id
    otherwise           temperature, min_p, top_k, top_p, and a draw (choose.py on a CPU, filters.py on a GPU)

On a CPU a row's token and log-probabilities are bit for bit the same alone or in company: what is done to several rows
at once is exact (the largest of a row), all else is done row by row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.serve.choose import choose
from shardwise.serve.filters import draw, keep
from shardwise.serve.logprobs import log_probabilities
from shardwise.serve.penalties import Sampling
from shardwise.serve.request import Logprob


@dataclass(frozen=True)
class Picked:
    """A row's next token, with its log-probability if its parameters ask for it.

    `token` is None where nothing can be chosen: a logit is NaN or infinite, or all are minus infinity (a grammar and
    min_tokens may leave no token). Such a request ends with finish_reason "error"; the other rows are not affected.
    """

    token: int | None
    logprob: Logprob | None = None


def pick(logits: Tensor, samplings: Sequence[Sampling], allowed: Sequence[Tensor | None] | None = None) -> list[Picked]:
    """Choose a token for each row of `logits` [B, V], which stay as they are; `Sampling.add` is left to the caller.

    samplings: each row's. A prompt that forks into n answers has n equal rows.
    allowed: the tokens that a row may take, as bits [ceil(V / 32) or more] (int32, the lowest bit first); None: any.
    """
    assert len(logits) == len(samplings)
    logits = logits.float()
    masks = [None] * len(samplings) if allowed is None else allowed
    assert len(masks) == len(samplings)
    tokens = by_row(logits, samplings, masks) if logits.device.type == "cpu" else at_once(logits, samplings, masks)
    told = _told(logits, samplings, tokens)
    picked = [Picked(token, told.get(row)) for row, token in enumerate(tokens)]
    return [Picked(None) if each.logprob and math.isnan(each.logprob.logprob) else each for each in picked]


def by_row(logits: Tensor, samplings: Sequence[Sampling], masks: Sequence[Tensor | None]) -> list[int | None]:
    """As a CPU likes it: the largest of all rows in one pass, what is changed or drawn row by row."""
    tokens: list[int | None] = [None] * len(samplings)
    if any(each.params.greedy for each in samplings):
        tokens = _largest(logits)
    for row, (sampling, mask) in enumerate(zip(samplings, masks, strict=True)):
        if sampling.params.greedy and not (sampling.changes or mask is not None):
            continue
        mine = _changed(logits[row], sampling, mask)
        tokens[row] = (
            _largest(mine[None])[0] if sampling.params.greedy else choose(mine, sampling.params, sampling.point())
        )
    return tokens


def at_once(logits: Tensor, samplings: Sequence[Sampling], masks: Sequence[Tensor | None]) -> list[int | None]:
    """As a GPU likes it: all rows in each operation, and the tokens fetched from it once."""
    changed = [row for row, each in enumerate(samplings) if each.changes or masks[row] is not None]
    logits = logits.clone() if changed else logits
    for row in changed:
        logits[row] = _changed(logits[row], samplings[row], masks[row])
    highest, tokens = logits.max(-1)
    random = [row for row, each in enumerate(samplings) if not each.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        filtered = keep(logits[rows], [samplings[row].params for row in random])
        tokens[rows] = draw(filtered, [samplings[row].point() for row in random])
    can = highest.isfinite().tolist()
    return [token if finite else None for token, finite in zip(tokens.tolist(), can, strict=True)]


def _largest(logits: Tensor) -> list[int | None]:
    """The id of the largest logit of each row [B, V] on a CPU, where numpy is ten times as fast as torch."""
    rows = logits.numpy()
    ids = rows.argmax(-1)
    finite = np.isfinite(rows[np.arange(len(rows)), ids])
    return [int(id) if can else None for id, can in zip(ids, finite, strict=True)]


def _changed(logits: Tensor, sampling: Sampling, mask: Tensor | None) -> Tensor:
    """A copy of a row [V] with all that its sequence changes, or the row itself if that is nothing."""
    if mask is None and not sampling.changes:
        return logits
    logits = logits.clone()
    if mask is not None:
        bits = np.unpackbits(mask.cpu().numpy().view(np.uint8), count=len(logits), bitorder="little")
        logits[torch.from_numpy(bits == 0).to(logits.device)] = -torch.inf
    sampling.change(logits)
    return logits


def _told(logits: Tensor, samplings: Sequence[Sampling], tokens: Sequence[int | None]) -> dict[int, Logprob]:
    """By row, for those that ask and have a token."""
    asked = {
        row: (token, each.params.logprobs)
        for row, (token, each) in enumerate(zip(tokens, samplings, strict=True))
        if token is not None and each.params.logprobs is not None
    }
    if not asked:
        return {}
    rows = list(asked)
    mine = logits if len(rows) == len(logits) else logits[rows]
    told = log_probabilities(mine, [token for token, _ in asked.values()], [num for _, num in asked.values()])
    return dict(zip(rows, told, strict=True))
