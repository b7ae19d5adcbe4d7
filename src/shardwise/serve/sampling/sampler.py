"""Sampling: the next tokens of a batch and their log-probabilities, from its logits.

In the order of vLLM, for each row:

    log-probabilities   of the unmodified logits
    constraints   (constraints.py)
    logit_bias, repetition, frequency and presence penalty   (penalties.py)
    greedy              the largest logit, of equal ones the lowest id
    otherwise           temperature, min_p, top_k, top_p, and a draw
                        (kernels/reference/sampling.py on a CPU, filters.py on a GPU)

On a CPU every row is computed by itself, so its token and log-probabilities are bit-identical
whatever else is in the batch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.serving_interface import SamplingRow, ServingKernels
from shardwise.serve.request import Logprob
from shardwise.serve.sampling.filters import apply_filters, sample_from_logits
from shardwise.serve.sampling.penalties import SamplerState


def sample_tokens(
    logits: Sequence[Tensor] | Tensor,
    samplers: Sequence[SamplerState],
    masks: Sequence[Tensor | None] | None = None,
    kernels: ServingKernels = REFERENCE,
) -> tuple[list[int | None], dict[int, Logprob]]:
    """Sample a token for each row of `logits` [B, V], which are not modified.

    samplers: the state of each row's sequence; calling its `add` is left to the caller. n samples
    of one prompt have n equal rows. masks: the tokens that may come next, as bits
    [ceil(V / 32) or more] (int32, lowest bit first); None: all.

    Returns the token of each row, and by row the log-probabilities that were requested. A token is
    None where nothing can be sampled: a logit is NaN or infinite, or all are minus infinity (the
    constraints of a request may exclude each other). Other rows are not affected.
    """
    row_masks = [None] * len(samplers) if masks is None else masks
    assert len(logits) == len(samplers) == len(row_masks)
    rows = [row.float() for row in logits]
    if rows[0].device.type == "cpu":
        tokens = sample_by_row(rows, samplers, row_masks, kernels)
    else:
        tokens = sample_together(torch.stack(rows), samplers, row_masks)
    logprobs = _requested_logprobs(rows, samplers, tokens, kernels)
    for row, logprob in list(logprobs.items()):
        if math.isnan(logprob.logprob):
            tokens[row] = None
            del logprobs[row]
    return tokens, logprobs


def sample_by_row(
    rows: Sequence[Tensor],
    samplers: Sequence[SamplerState],
    masks: Sequence[Tensor | None],
    kernels: ServingKernels = REFERENCE,
) -> list[int | None]:
    """Sample on a CPU: each row by itself."""
    changed = [_changed(*each) for each in zip(rows, samplers, masks, strict=True)]
    return kernels.sample(changed, [sampling_row(sampler) for sampler in samplers])


def sampling_row(sampler: SamplerState) -> SamplingRow:
    """Return how to sample a sequence's next token; takes a random number unless it is greedy."""
    params = sampler.params
    if params.greedy:
        return SamplingRow(0)
    return SamplingRow(
        params.temperature, params.min_p, params.top_k, params.top_p, sampler.uniform()
    )


def sample_together(
    logits: Tensor, samplers: Sequence[SamplerState], masks: Sequence[Tensor | None]
) -> list[int | None]:
    """Sample on a GPU: all rows in each operation, and one copy of the tokens to the host."""
    changed = [row for row, each in enumerate(samplers) if each.changes or masks[row] is not None]
    logits = logits.clone() if changed else logits
    for row in changed:
        logits[row] = _changed(logits[row], samplers[row], masks[row])
    highest, tokens = logits.max(-1)
    random = [row for row, each in enumerate(samplers) if not each.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        filtered = apply_filters(logits[rows], [samplers[row].params for row in random])
        uniforms = [samplers[row].uniform() for row in random]
        tokens[rows] = sample_from_logits(filtered, uniforms)
    is_valid = highest.isfinite().tolist()
    return [
        token if valid else None for token, valid in zip(tokens.tolist(), is_valid, strict=True)
    ]


def _changed(logits: Tensor, sampler: SamplerState, mask: Tensor | None) -> Tensor:
    """Return a copy of a row [V] with mask, bias and penalties, or the row itself if it has
    none.
    """
    if mask is None and not sampler.changes:
        return logits
    logits = logits.clone()
    if mask is not None:
        mask_bytes = mask.cpu().numpy().view(np.uint8)
        bits = np.unpackbits(mask_bytes, count=len(logits), bitorder="little")
        logits[torch.from_numpy(bits == 0).to(logits.device)] = -torch.inf
    sampler.change(logits)
    return logits


def _requested_logprobs(
    rows: Sequence[Tensor],
    samplers: Sequence[SamplerState],
    tokens: Sequence[int | None],
    kernels: ServingKernels,
) -> dict[int, Logprob]:
    """Return log-probabilities by row, for rows that request them and have a token."""
    requested = {
        row: (token, sampler.params.logprobs)
        for row, (token, sampler) in enumerate(zip(tokens, samplers, strict=True))
        if token is not None and sampler.params.logprobs is not None
    }
    if not requested:
        return {}
    logprobs = token_logprobs(
        [rows[row] for row in requested],
        [token for token, _ in requested.values()],
        [num_top for _, num_top in requested.values()],
        kernels,
    )
    return dict(zip(requested, logprobs, strict=True))


def token_logprobs(
    logits: Sequence[Tensor] | Tensor,
    tokens: Sequence[int],
    num_top: Sequence[int],
    kernels: ServingKernels = REFERENCE,
) -> list[Logprob]:
    """Return for each row of `logits` [R, V] the log-probability of its token, and the `num_top`
    most probable tokens of that row.

    For a prompt's own tokens, row t has the logits after token t, and `tokens` are the next ones.
    NaN stays NaN.
    """
    ids, values = kernels.log_probabilities(logits, tokens, max(num_top, default=0))
    logprobs = []
    for row_ids, row_values, num in zip(ids, values, num_top, strict=True):
        top = zip(row_ids[1 : 1 + num], row_values[1 : 1 + num], strict=True)
        logprobs.append(Logprob(row_ids[0], row_values[0], tuple(top)))
    return logprobs
