"""Evaluation of a model on a text: perplexity, divergence from a reference model, and agreement of
trainer and server on log-probabilities.

Shapes: T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import DTYPES, Causal
from shardwise.model.transformer import Transformer
from shardwise.precision import Precision
from shardwise.serve.generate import LoadedModel, load_model
from shardwise.serve.request import SamplingParams

ROWS = 64
"""Rows of logits in memory at a time."""

RowLogits = Callable[[Tensor], Iterator[Tensor]]
"""Yields fp32 logits [ROWS, V] after each of the tokens [T], a few rows at a time."""
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


def perplexity(
    model: LoadedModel, tokens: Sequence[int], context: int, stride: int, advance: Advance
) -> Perplexity:
    """Compute the perplexity of a text with a sliding window, as Hugging Face documents it.

    In contrast to theirs, without overlap the first token of a window is scored too, after the last
    token of the window before. Raises ValueError for a text, stride or context that cannot be used.
    """
    check_text(tokens)
    max_positions = model.config.max_positions
    if not 1 <= stride <= context <= max_positions:
        raise ValueError(
            f"stride {stride} and context {context} do not go together: the stride must be from 1 "
            f"to the context, and the context at most the model's {max_positions} tokens"
        )
    total = 0.0
    count = len(tokens) - 1
    for window in windows(len(tokens), context, stride):
        logprobs = training_logprobs(
            model, tokens[window.start : window.stop + 1], window.num_scored
        )
        total -= float(logprobs.double().sum())
        advance(window.stop / count)
    nll = total / count
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, count, nll)


@torch.inference_mode()
def training_logprobs(
    model: LoadedModel, tokens: Sequence[int], num_scored: int | None = None
) -> Tensor:
    """Return log p of each token after those before it, fp32 [T - 1], or of the last `num_scored`.

    Uses the model and attention of training; logits have the dtype of the weights, as in the loss.
    """
    decoder = Transformer(model.config, REFERENCE)
    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(len(ids) - 1, device=model.device)[None]
    x = decoder.hidden(
        model.weights, ids[None, :-1], positions, Causal(model.config, causal_attention)
    )[0]
    targets = ids[1:]
    if num_scored is not None:
        x = x[-num_scored:]
        targets = targets[-num_scored:]
    logprobs = [
        decoder.logits(model.weights, rows).float().log_softmax(-1).gather(1, row_targets[:, None])
        for rows, row_targets in zip(x.split(ROWS), targets.split(ROWS), strict=True)
    ]
    return torch.cat(logprobs)[:, 0].cpu()


def compare_with_reference(
    model: LoadedModel, reference: LoadedModel, tokens: Sequence[int], context: int
) -> ReferenceComparison:
    """Compare a quantized model with the model that it was made from."""
    ids = torch.tensor(tokens, device=model.device)
    return compare_predictions(
        partial(row_logits, model), partial(row_logits, reference), ids, context
    )


@torch.inference_mode()
def compare_predictions(
    logits: RowLogits, reference_logits: RowLogits, tokens: Tensor, context: int
) -> ReferenceComparison:
    """Compare the predictions q of a model with a reference p, in windows without overlap.

    The KL divergence is sum p log(p / q).
    """
    check_text(tokens)
    nll = kl = 0.0
    num_same = 0
    count = len(tokens) - 1
    for window in windows(len(tokens), context, context):
        ids = tokens[window.start : window.stop + 1]
        targets = ids[1:].split(ROWS)
        chunks = zip(logits(ids[:-1]), reference_logits(ids[:-1]), targets, strict=True)
        for model_rows, reference_rows, row_targets in chunks:
            num_same += int((model_rows.argmax(-1) == reference_rows.argmax(-1)).sum())
            log_q = model_rows.log_softmax(-1)
            log_p = reference_rows.log_softmax(-1)
            nll -= float(log_q.gather(1, row_targets[:, None]).sum(dtype=torch.float64))
            kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    return ReferenceComparison(math.exp(nll / count), num_same / count, kl / count, count)


def row_logits(model: LoadedModel, ids: Tensor) -> Iterator[Tensor]:
    """Yield fp32 logits [ROWS, V] after each of the tokens [T], a few rows at a time."""
    decoder = Transformer(model.config, REFERENCE)
    positions = torch.arange(len(ids), device=model.device)[None]
    x = decoder.hidden(model.weights, ids[None], positions, Causal(model.config, causal_attention))
    for rows in x[0].split(ROWS):
        yield decoder.logits(model.weights, rows).float()


def compare_trainer_with_server(
    path: Path, tokens: Sequence[int], dtype: Precision, context: int | None, advance: Advance
) -> LogprobDifference:
    """Compare the trainer's log-probabilities of a text with the server's prompt_logprobs."""
    from shardwise.parallel.launch import device_of
    from shardwise.serve.llm import LLM

    check_text(tokens)
    model = load_model(path, DTYPES[dtype], device_of(0, 1))
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


def check_text(tokens: Sequence[int] | Tensor) -> None:
    """Raise ValueError for a text of fewer than 2 tokens: the first has no probability."""
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}; at least 2 are needed"
        )
