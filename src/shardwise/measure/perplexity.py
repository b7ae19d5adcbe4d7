"""Evaluation of a model on a text: perplexity, divergence from a reference model, and agreement of
trainer and server on log-probabilities.

Shapes: T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.measure.reference_model import ROWS, load_reference_model, training_logprobs
from shardwise.model.layers import DTYPES
from shardwise.precision import Precision
from shardwise.serve.request import SamplingParams

RowLogits = Callable[[Tensor, int], Iterator[Tensor]]
"""row_logits(ids [T], n) yields fp32 logits [ROWS, V] after each of the last n tokens, a few rows
at a time."""
Advance = Callable[[float], None]
"""advance(fraction done, from 0 to 1)."""


@dataclass(frozen=True)
class Perplexity:
    """exp(nll), where nll is the mean of -log p(token) over `tokens`: all but the first."""

    perplexity: float
    tokens: int
    nll: float


@dataclass(frozen=True)
class LogprobDifference:
    """The largest and the mean difference of two log-probabilities per token, over `tokens`."""

    max_abs_difference: float
    mean_abs_difference: float
    tokens: int


@dataclass(frozen=True)
class ReferenceComparison:
    """A model compared with a reference model on a text.

    Attributes:
        perplexity: Perplexity of the model.
        top1: Share of tokens at which both predict the same token.
        kl: Mean KL divergence of the model's distribution from the reference's, in nats.
        tokens: Tokens scored.
    """

    perplexity: float
    top1: float
    kl: float
    tokens: int


@dataclass(frozen=True)
class Window:
    """Run the tokens from `start` to `stop`, and score the last `num_scored` of those that follow
    them one by one.
    """

    start: int
    stop: int
    num_scored: int


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows that score every token but the first once.

    A window starts `stride` (at most `context`) tokens after the last one. Except in the first
    window, each token is scored after at least context - stride others.
    """
    num_scored = 0
    start = 0
    while num_scored < num_tokens - 1:
        stop = min(start + context, num_tokens - 1)
        yield Window(start, stop, stop - num_scored)
        num_scored = stop
        start = start + stride


@torch.inference_mode()
def perplexity(
    logits: RowLogits, tokens: Sequence[int], context: int, stride: int, advance: Advance
) -> Perplexity:
    """Compute the perplexity of a text with a sliding window, as Hugging Face documents it.

    In contrast to theirs, without overlap the first token of a window is scored too, after the last
    token of the window before. Raises ValueError for a text of fewer than 2 tokens.
    """
    check_text(tokens)
    total = 0.0
    count = len(tokens) - 1
    ids = torch.tensor(tokens)
    for window in windows(len(tokens), context, stride):
        targets = ids[window.stop + 1 - window.num_scored : window.stop + 1].split(ROWS)
        chunks = logits(ids[window.start : window.stop], window.num_scored)
        for rows, row_targets in zip(chunks, targets, strict=True):
            total += nll_sum(rows.log_softmax(-1), row_targets)
        advance(window.stop / count)
    nll = total / count
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, count, nll)


def nll_sum(logprobs: Tensor, targets: Tensor) -> float:
    """Return the sum of -log p of `targets` [T] under log-probabilities [T, V]."""
    picked = logprobs.gather(1, targets.to(logprobs.device)[:, None])
    return -float(picked.sum(dtype=torch.float64))


def check_windows(context: int, stride: int, max_positions: int) -> None:
    """Raise ValueError for a stride or context that cannot be used with the model."""
    if not 1 <= stride <= context <= max_positions:
        raise ValueError(
            f"stride {stride} and context {context} do not go together: the stride must be from 1 "
            f"to the context, and the context at most the model's {max_positions} tokens"
        )


@torch.inference_mode()
def compare_with_reference(
    logits: RowLogits, reference_logits: RowLogits, tokens: Sequence[int], context: int
) -> ReferenceComparison:
    """Compare the predictions q of a model with a reference p, in windows without overlap.

    The KL divergence is sum p log(p / q).
    """
    check_text(tokens)
    all_ids = torch.tensor(tokens)
    nll = kl = 0.0
    num_same = 0
    count = len(tokens) - 1
    for window in windows(len(tokens), context, context):
        ids = all_ids[window.start : window.stop + 1]
        targets = ids[1:].split(ROWS)
        each_logits = (each(ids[:-1], len(ids) - 1) for each in (logits, reference_logits))
        chunks = zip(*each_logits, targets, strict=True)
        for model_rows, reference_rows, row_targets in chunks:
            num_same += int((model_rows.argmax(-1) == reference_rows.argmax(-1)).sum())
            log_q = model_rows.log_softmax(-1)
            log_p = reference_rows.log_softmax(-1)
            nll += nll_sum(log_q, row_targets)
            kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    return ReferenceComparison(math.exp(nll / count), num_same / count, kl / count, count)


def compare_trainer_with_server(
    path: Path, tokens: Sequence[int], dtype: Precision, context: int | None, advance: Advance
) -> LogprobDifference:
    """Compare the trainer's log-probabilities of a text with the server's prompt_logprobs."""
    from shardwise.parallel.launch import device_of
    from shardwise.serve.llm import LLM

    check_text(tokens)
    model = load_reference_model(path, DTYPES[dtype], device_of(0, 1))
    # A prompt has one token more than the trainer runs, and its completion has one more.
    limit = model.config.max_positions - 2
    size = min(limit, context or limit)
    texts = [tokens[each.start : each.stop + 1] for each in windows(len(tokens), size, size)]
    trained = []
    for number, text in enumerate(texts, start=1):
        trained.append(training_logprobs(model, text))
        advance(0.5 * number / len(texts))
    del model
    llm = LLM(str(path), dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    served: list[Tensor] = []
    for output in llm.generate(texts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        served.append(torch.tensor([each.logprob for each in output.prompt_logprobs]))
        advance(0.5 + 0.5 * len(served) / len(texts))
    difference = (torch.cat(trained) - torch.cat(served)).abs()
    return LogprobDifference(float(difference.max()), float(difference.mean()), len(difference))


def check_text(tokens: Sequence[int]) -> None:
    """Raise ValueError for a text of fewer than 2 tokens: the first has no probability."""
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}; at least 2 are needed"
        )
