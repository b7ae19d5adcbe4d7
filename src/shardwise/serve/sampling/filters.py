"""A batch of logits on a GPU: each filter is one function that reads like its definition.

In the order in which vLLM applies them, on rows z of logits with p = softmax(z):

    temperature  z / t: below 1 sharpens the distribution, above 1 flattens it
    min_p        keeps tokens with p >= min_p * max(p)
    top_k        keeps tokens whose logit is at least the k-th largest
    top_p        keeps the most probable tokens until together they have probability top_p (Holtzman et al. 2020)

A token that is filtered out has logit minus infinity, so each filter sees the distribution that the
one before it left. A CPU gets the same tokens sooner from kernels/choose.py.

Shapes: B batch (one row per request), V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.kernels.reference.sampling import MIN_TEMPERATURE
from shardwise.serve.request import SamplingParams


def keep(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """All filters in order, each on the rows that ask for it; every row of `logits` [B, V] has
    temperature > 0."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    logits = scale(logits, column(max(each.temperature, MIN_TEMPERATURE) for each in params))
    filters = (
        (keep_min_p, {row: each.min_p for row, each in enumerate(params) if each.min_p > 0}),
        (
            keep_top_k,
            {
                row: each.top_k
                for row, each in enumerate(params)
                if 0 < each.top_k < logits.shape[-1]
            },
        ),
        (keep_top_p, {row: each.top_p for row, each in enumerate(params) if each.top_p < 1}),
    )
    for keep_some, wanted in filters:
        if wanted:
            rows = torch.tensor(list(wanted), device=logits.device)
            logits[rows] = keep_some(logits[rows], column(wanted.values()))
    return logits


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """z / t, with the largest z moved to 0 first, so that the smallest temperature overflows
    nothing."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """p >= min_p * max(p), said in logits: z >= max(z) + log(min_p)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Logits at least as large as the k-th largest; all tokens that tie with it stay."""
    largest = logits.topk(int(top_k.max())).values
    return logits.masked_fill(logits < largest.gather(-1, top_k.long() - 1), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """A token stays if all more probable ones together have less than top_p; of equal tokens the
    lowest id goes first.

    So the most probable token always stays. Sorting a whole vocabulary takes longer than all the
    rest here, and the tokens that stay are nearly always among the first thousand.
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


def draw(logits: Tensor, points: Sequence[float]) -> Tensor:
    """One token for each row of [B, V]: token i with probability softmax(logits)[i], if `points`
    are drawn from [0, 1).

    Lay the probabilities end to end on a line and see on whose piece the point falls. Sums are in
    fp64: in fp32 the pieces of rare tokens would vanish in a vocabulary of 100,000.
    """
    ends = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    scaled = torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None] * total
    scaled = torch.minimum(scaled, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(ends, scaled, right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)
