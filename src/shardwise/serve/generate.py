"""One prompt, one answer, token by token: prefill, then a step for each new token over the KV
cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.model_source import open_source, read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from shardwise.quantize.load_quantized import load_quantized
from shardwise.serve.cache import Cache
from shardwise.serve.request import SamplingParams
from shardwise.serve.sampling.penalties import Sampling
from shardwise.serve.sampling.sampler import pick
from shardwise.serve.sampling.stopping import Answer

PREFILL_TOKENS = 512
"""Prompts are run in chunks of this many tokens, so that activations do not grow with the
prompt."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on one device, ready to run."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Generated:
    """An answer. `logprobs` are those of the chosen tokens under the unmodified distribution;
    `tokens_per_s` counts the new tokens after the first, `first_token_s` the prompt and the
    first."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    first_token_s: float
    tokens_per_s: float


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, quant: str | None = None
) -> LoadedModel:
    """Load a Hugging Face folder, a GGUF file or a run whole, with its tokenizer; `quant` as in
    EngineSettings."""
    source = open_source(path)
    config = read_config(source)
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, config.vocab_size)
    one = Layout()
    weights = load_quantized(
        source, config, model_specs(config), one, one.coord(0), dtype, quant, device
    )
    return LoadedModel(config, weights, tokenizer, dtype, device)  # type: ignore[arg-type]  # `linear` takes both kinds


def check_length(config: ModelConfig, num_prompt: int, max_tokens: int) -> None:
    """Raise ValueError if a prompt and its answer exceed the model's positions, with what would
    work."""
    if num_prompt == 0:
        raise ValueError("the prompt is empty; give it at least one token")
    room = config.max_positions - num_prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt} tokens and the model {config.max_positions} positions; shorten it"
        )
    if max_tokens > room:
        raise ValueError(
            f"{num_prompt} prompt tokens and {max_tokens} new ones exceed the model's {config.max_positions} "
            f"positions; at most {room} new tokens work"
        )


@torch.inference_mode()
def generate(
    model: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Continue `prompt` until an end token (which is not part), a stop string or
    `params.max_tokens`; one answer, whatever `params.n`. `show` gets text as it is certain."""
    room = model.config.max_positions - len(prompt)
    max_tokens = max(1, room) if params.max_tokens is None else params.max_tokens
    check_length(model.config, len(prompt), max_tokens)
    params.check_vocabulary(model.config.vocab_size)
    decoder = Transformer(model.config, REFERENCE)
    cache = Cache(model.config, len(prompt) + max_tokens, model.dtype, model.device)
    answer = Answer(model.tokenizer, params, max_tokens)
    sampling = Sampling(replace(params, logprobs=0), prompt, answer.end_ids)
    tokens: list[int] = []
    logprobs: list[float] = []
    shown: list[str] = []
    began = time.perf_counter()
    first_at = began
    logits = prefill(decoder, model, cache, prompt)
    while True:
        (picked,) = pick(logits, [sampling])
        if picked.token is None or picked.logprob is None:
            raise ValueError(
                "the model's logits are not numbers: its weights are damaged, or it diverged in training"
            )
        first_at = first_at if answer.num_tokens else time.perf_counter()
        sampling.add(picked.token)
        piece = answer.add(picked.token)
        if piece.text:
            shown.append(piece.text)
            show(piece.text)
        if picked.token not in answer.end_ids:
            tokens.append(picked.token)
            logprobs.append(picked.logprob.logprob)
        if piece.finish_reason is not None:
            break
        logits = run(decoder, model, cache, [picked.token])
    ended = time.perf_counter()
    rate = (len(tokens) - 1) / (ended - first_at) if len(tokens) > 1 else 0.0
    assert piece.finish_reason in ("stop", "length")
    return Generated(
        "".join(shown),
        tuple(tokens),
        tuple(logprobs),
        len(prompt),
        piece.finish_reason,
        first_at - began,
        rate,
    )


def prefill(
    decoder: Transformer, model: LoadedModel, cache: Cache, prompt: Sequence[int]
) -> Tensor:
    """Run the prompt in chunks; the logits [1, V] after its last token."""
    for start in range(0, len(prompt), PREFILL_TOKENS):
        logits = run(decoder, model, cache, prompt[start : start + PREFILL_TOKENS])
    return logits


def run(decoder: Transformer, model: LoadedModel, cache: Cache, tokens: Sequence[int]) -> Tensor:
    """Run the next tokens of the sequence; the logits [1, V] after the last of them, in fp32."""
    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)[None]
    x = decoder.hidden(
        model.weights, torch.tensor([list(tokens)], device=model.device), positions, cache
    )
    cache.advance(len(tokens))
    return decoder.logits(model.weights, x[:, -1]).float()
