"""Filters of a batch of logits on a GPU, each a function that reads like its definition.

In the order of vLLM, on rows z of logits with p = softmax(z):

    temperature  z / t: below 1 sharpens the distribution, above 1 flattens it
    min_p        keeps tokens with p >= min_p * max(p)
    top_k        keeps tokens whose logit is at least the k-th largest
    top_p        keeps the most probable tokens until their probabilities sum to top_p
                 (Holtzman et al. 2020)

A token that is filtered out gets logit minus infinity, so each filter sees the distribution that
the one before it left. On a CPU, kernels/reference/sampling.py samples the same tokens faster.

Shapes: B batch (one row per request), V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.kernels.reference.sampling import MIN_TEMPERATURE
from shardwise.serve.request import SamplingParams


def apply_filters(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply all filters in order, each to the rows that use it; every row of `logits` [B, V] has
    temperature > 0.
    """

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    logits = scale(logits, column(max(each.temperature, MIN_TEMPERATURE) for each in params))
    vocab_size = logits.shape[-1]
    min_p = {row: each.min_p for row, each in enumerate(params) if each.min_p > 0}
    top_k = {row: each.top_k for row, each in enumerate(params) if 0 < each.top_k < vocab_size}
    top_p = {row: each.top_p for row, each in enumerate(params) if each.top_p < 1}
    for keep, values in ((filter_min_p, min_p), (filter_top_k, top_k), (filter_top_p, top_p)):
        if values:
            rows = torch.tensor(list(values), device=logits.device)
            logits[rows] = keep(logits[rows], column(values.values()))
    return logits


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return z / t, with the largest z shifted to 0 first, so that a small temperature does not
    overflow.
    """
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens with p >= min_p * max(p); in logits, z >= max(z) + log(min_p)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), -torch.inf)


def filter_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep logits at least as large as the k-th largest, with all that tie with it."""
    largest = logits.topk(int(top_k.max())).values
    return logits.masked_fill(logits < largest.gather(-1, top_k.long() - 1), -torch.inf)


def filter_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep a token if all more probable ones together have less than top_p; of equal tokens the
    lowest id comes first.

    So the most probable token always stays. Sorting a whole vocabulary takes longer than the rest
    of sampling, and the tokens that stay are nearly always among the first thousand.
    """
    vocab_size = logits.shape[-1]
    normalizer = logits.logsumexp(-1, keepdim=True)
    for num_sorted in (min(1000, vocab_size), vocab_size):
        largest = logits.topk(num_sorted).values
        probabilities = (largest - normalizer).exp()
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        num_kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
        if int(num_kept.max()) < num_sorted:
            break
    lowest = largest.gather(-1, num_kept - 1)
    above = logits > lowest
    equal = logits == lowest
    kept = above | (equal & (equal.cumsum(-1) <= num_kept - above.sum(-1, keepdim=True)))
    return logits.masked_fill(~kept, -torch.inf)


def sample_from_logits(logits: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Sample one token for each row of [B, V]: token i with probability softmax(logits)[i], for
    `uniforms` drawn from [0, 1).

    This is inverse transform sampling: the first token whose cumulative probability exceeds the
    uniform number. Sums are in fp64: in fp32, rare tokens of a vocabulary of 100,000 would vanish.
    """
    ends = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    scaled = uniform[:, None] * total
    scaled = torch.minimum(scaled, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(ends, scaled, right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)
