"""How well a model foresees a text: its perplexity, and whether the trainer and the server say the
same of it."""

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
"""Whose logits are held at a time."""

RowLogits = Callable[[Tensor], Iterator[Tensor]]
"""Logits [ROWS, V] in fp32 after each of the tokens [T], a few rows at a time."""
Advance = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(nll); nll is the mean of -log p(token) over `tokens`, those of the text but
    the first."""

    perplexity: float
    tokens: int
    nll: float


@dataclass(frozen=True)
class Agreement:
    """How far two log-probabilities of the same token are apart, at most and on average, over
    `tokens`."""

    max_abs_difference: float
    mean_abs_difference: float
    tokens: int


@dataclass(frozen=True)
class Likeness:
    """How a model foresees a text, and how much as another does: on which share of `tokens` both
    would pick the same (`top1`), and the mean KL divergence of its distribution from the other's,
    in nats (`kl`)."""

    perplexity: float
    top1: float
    kl: float
    tokens: int


@dataclass(frozen=True)
class Window:
    """Tokens from `start` to `stop` are run, and the last `num_scored` of those that follow them
    one by one scored."""

    start: int
    stop: int
    num_scored: int


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Every token but the first is scored once. A window starts `stride` tokens after the one
    before it, so that but in the first a token is scored after at least context - stride others.
    `stride` is at most `context`."""
    scored = 0
    start = 0
    while scored < num_tokens - 1:
        stop = min(start + context, num_tokens - 1)
        yield Window(start, stop, stop - scored)
        scored = stop
        start = start + stride


def perplexity(
    model: LoadedModel, tokens: Sequence[int], context: int, stride: int, advance: Advance
) -> Perplexity:
    """Of a text with a sliding window, as Hugging Face's documentation of perplexity describes it,
    but that with no overlap the first token of a window is scored too, after the last of the one
    before."""
    check_text(tokens)
    if not 1 <= stride <= context <= model.config.max_positions:
        raise ValueError(
            f"a stride of {stride} and a context of {context} tokens do not go together; the stride is from 1 to the "
            f"context, and the context at most the model's {model.config.max_positions} positions"
        )
    total = 0.0
    count = len(tokens) - 1
    for window in windows(len(tokens), context, stride):
        logprobs = trained_logprobs(
            model, tokens[window.start : window.stop + 1], window.num_scored
        )
        total -= float(logprobs.double().sum())
        advance(window.stop / count)
    nll = total / count
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, count, nll)


@torch.inference_mode()
def trained_logprobs(
    model: LoadedModel, tokens: Sequence[int], num_scored: int | None = None
) -> Tensor:
    """log p [T - 1, or the last num_scored] of every token after those before it, in fp32: the
    model and attention of training, and the logits as its loss makes them, in the dtype of the
    weights."""
    decoder = Transformer(model.config, REFERENCE)
    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(len(ids) - 1, device=model.device)[None]
    x = decoder.hidden(
        model.weights, ids[None, :-1], positions, Causal(model.config, causal_attention)
    )[0]
    x, following = (x, ids[1:]) if num_scored is None else (x[-num_scored:], ids[-num_scored:])
    found = [
        decoder.logits(model.weights, rows).float().log_softmax(-1).gather(1, mine[:, None])[:, 0]
        for rows, mine in zip(x.split(ROWS), following.split(ROWS), strict=True)
    ]
    return torch.cat(found).cpu()


def likeness(
    model: LoadedModel, other: LoadedModel, tokens: Sequence[int], context: int
) -> Likeness:
    """Of a quantized model with the one that it was made of."""
    ids = torch.tensor(tokens, device=model.device)
    return likeness_of(partial(row_logits, model), partial(row_logits, other), ids, context)


@torch.inference_mode()
def likeness_of(one: RowLogits, other: RowLogits, tokens: Tensor, context: int) -> Likeness:
    """Windows do not overlap; KL is that of the other's distribution p to this one's q, sum p log(p
    / q)."""
    check_text(tokens)
    nll = kl = 0.0
    num_same = 0
    count = len(tokens) - 1
    for window in windows(len(tokens), context, context):
        ids = tokens[window.start : window.stop + 1]
        pairs = zip(one(ids[:-1]), other(ids[:-1]), ids[1:].split(ROWS), strict=True)
        for mine, theirs, following in pairs:
            num_same += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
            mine = mine.log_softmax(-1)
            theirs = theirs.log_softmax(-1)
            nll -= float(mine.gather(1, following[:, None]).sum(dtype=torch.float64))
            kl += float((theirs.exp() * (theirs - mine)).sum(dtype=torch.float64))
    return Likeness(math.exp(nll / count), num_same / count, kl / count, count)


def row_logits(model: LoadedModel, ids: Tensor) -> Iterator[Tensor]:
    """Logits [ROWS, V] in fp32 after each of the tokens [T], a few rows at a time."""
    decoder = Transformer(model.config, REFERENCE)
    x = decoder.hidden(
        model.weights,
        ids[None],
        torch.arange(len(ids), device=model.device)[None],
        Causal(model.config, causal_attention),
    )
    for rows in x[0].split(ROWS):
        yield decoder.logits(model.weights, rows).float()


def agreement(
    path: Path, tokens: Sequence[int], dtype: Precision, context: int | None, advance: Advance
) -> Agreement:
    """The log-probabilities of a text as the trainer has them, against those that the server tells
    of a prompt."""
    from shardwise.parallel.launch import device_of
    from shardwise.serve.llm import LLM

    check_text(tokens)
    model = load_model(path, DTYPES[dtype], device_of(0, 1))
    most = (
        model.config.max_positions - 2
    )  # a prompt has one token more than it runs here, and an answer one
    size = min(most, context or most)
    texts = [tokens[each.start : each.stop + 1] for each in windows(len(tokens), size, size)]
    trained = []
    for number, text in enumerate(texts, start=1):
        trained.append(trained_logprobs(model, text))
        advance(0.5 * number / len(texts))
    del model
    llm = LLM(str(path), dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    served: list[Tensor] = []
    for output in llm.generate(texts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        served.append(torch.tensor([each.logprob for each in output.prompt_logprobs]))
        advance(0.5 + 0.5 * len(served) / len(texts))
    apart = (torch.cat(trained) - torch.cat(served)).abs()
    return Agreement(float(apart.max()), float(apart.mean()), len(apart))


def check_text(tokens: Sequence[int] | Tensor) -> None:
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}; at least 2 can be scored"
        )
