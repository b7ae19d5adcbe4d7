"""From logits to the next tokens of a batch: what is told of them, what a sequence changes, the
filters, the choice.

In the order in which vLLM does it, for each row:

    log-probabilities   of the logits as they came (logprobs.py)
    allowed, min_tokens, logit_bias, repetition, frequency and presence penalty   (penalties.py)
    greedy              the largest logit, of equal ones the lowest id
    otherwise           temperature, min_p, top_k, top_p, and a draw (kernels/choose.py on a CPU, filters.py on a GPU)

On a CPU a row's token and log-probabilities are bit for bit the same alone or in company: all is
done row by row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.serving_interface import SamplingRow, ServingKernels
from shardwise.serve.request import Logprob
from shardwise.serve.sampling.filters import draw, keep
from shardwise.serve.sampling.logprobs import log_probabilities
from shardwise.serve.sampling.penalties import Sampling


@dataclass(frozen=True)
class Picked:
    """A row's next token, with its log-probability if its parameters ask for it.

    `token` is None where nothing can be chosen: a logit is NaN or infinite, or all are minus
    infinity (a grammar and min_tokens may leave no token). Such a request ends with finish_reason
    "error"; the other rows are not affected.
    """

    token: int | None
    logprob: Logprob | None = None


def pick(
    logits: Sequence[Tensor] | Tensor,
    samplings: Sequence[Sampling],
    allowed: Sequence[Tensor | None] | None = None,
    kernels: ServingKernels = REFERENCE,
) -> list[Picked]:
    """Choose a token for each row of `logits` [B, V], which stay as they are; `Sampling.add` is
    left to the caller.

    samplings: each row's. A prompt that forks into n answers has n equal rows. allowed: the tokens
    that a row may take, as bits [ceil(V / 32) or more] (int32, the lowest bit first); None: any.
    """
    masks = [None] * len(samplings) if allowed is None else allowed
    assert len(logits) == len(samplings) == len(masks)
    rows = [row.float() for row in logits]
    if rows[0].device.type == "cpu":
        tokens = by_row(rows, samplings, masks, kernels)
    else:
        tokens = at_once(torch.stack(rows), samplings, masks)
    told = _told(rows, samplings, tokens, kernels)
    picked = [Picked(token, told.get(row)) for row, token in enumerate(tokens)]
    return [
        Picked(None) if each.logprob and math.isnan(each.logprob.logprob) else each
        for each in picked
    ]


def by_row(
    rows: Sequence[Tensor],
    samplings: Sequence[Sampling],
    masks: Sequence[Tensor | None],
    kernels: ServingKernels = REFERENCE,
) -> list[int | None]:
    """As a CPU likes it: each row by itself."""
    changed = [_changed(*each) for each in zip(rows, samplings, masks, strict=True)]
    return kernels.sample(changed, [draw_of(sampling) for sampling in samplings])


def draw_of(sampling: Sampling) -> SamplingRow:
    """How the next token of a sequence is chosen; one that is not greedy takes a random number."""
    params = sampling.params
    if params.greedy:
        return SamplingRow(0)
    return SamplingRow(
        params.temperature, params.min_p, params.top_k, params.top_p, sampling.point()
    )


def at_once(
    logits: Tensor, samplings: Sequence[Sampling], masks: Sequence[Tensor | None]
) -> list[int | None]:
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


def _changed(logits: Tensor, sampling: Sampling, mask: Tensor | None) -> Tensor:
    """A copy of a row [V] with all that its sequence changes, or the row itself if that is
    nothing."""
    if mask is None and not sampling.changes:
        return logits
    logits = logits.clone()
    if mask is not None:
        bits = np.unpackbits(
            mask.cpu().numpy().view(np.uint8), count=len(logits), bitorder="little"
        )
        logits[torch.from_numpy(bits == 0).to(logits.device)] = -torch.inf
    sampling.change(logits)
    return logits


def _told(
    rows: Sequence[Tensor],
    samplings: Sequence[Sampling],
    tokens: Sequence[int | None],
    kernels: ServingKernels,
) -> dict[int, Logprob]:
    """By row, for those that ask and have a token."""
    asked = {
        row: (token, each.params.logprobs)
        for row, (token, each) in enumerate(zip(tokens, samplings, strict=True))
        if token is not None and each.params.logprobs is not None
    }
    if not asked:
        return {}
    mine = [rows[row] for row in asked]
    num_top = [num for _, num in asked.values()]
    told = log_probabilities(mine, [token for token, _ in asked.values()], num_top, kernels)
    return dict(zip(asked, told, strict=True))
