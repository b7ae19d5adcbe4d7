"""Generation in its simplest form: one prompt, one completion, a KV cache for one sequence.

The prompt is computed first (prefill), then each new token in a step of its own (decode). A token's
keys and values never change once computed, since attention is causal. So each step computes them
for the new tokens alone and reads the rest from the cache: a step costs one token's work, where
recomputing would cost the whole sequence.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
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
from shardwise.serve.engine.engine import make_sequence
from shardwise.serve.request import Request, SamplingParams, check_length
from shardwise.serve.sampling.sampler import sample_tokens

PREFILL_TOKENS = 512
"""Prompts are computed in chunks of this many tokens, which bounds the activations."""


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
    """A completion and its timing.

    Attributes:
        text: The completion, without the end token or stop string.
        tokens: Its tokens, without the end token.
        logprobs: Their log-probabilities under the unmodified logits.
        prompt_tokens: Number of tokens of the prompt.
        finish_reason: Why it ended.
        first_token_s: Seconds for the prompt and the first token.
        tokens_per_s: Rate of the tokens after the first.
    """

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
    """Load a Hugging Face folder, a GGUF file or a run, with its tokenizer, unsharded; `quant` as
    in EngineSettings.
    """
    source = open_source(path)
    config = read_config(source)
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, config.vocab_size)
    layout = Layout()
    specs = model_specs(config)
    weights = load_quantized(source, config, specs, layout, layout.coord(0), dtype, quant, device)
    return LoadedModel(config, weights, tokenizer, dtype, device)  # type: ignore[arg-type]  # `linear` takes both kinds


@torch.inference_mode()
def generate(
    model: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Continue `prompt` until an end token, a stop string or `params.max_tokens`.

    One completion, whatever `params.n`. `show` gets text as soon as no later token can change it.
    Raises ValueError for a request that does not fit the model.
    """
    max_tokens = check_length(len(prompt), params.max_tokens, model.config.max_positions)
    params.check_vocabulary(model.config.vocab_size)
    request = Request(tuple(prompt), replace(params, logprobs=0, prompt_logprobs=None))
    sequence = make_sequence(0, request, model.tokenizer, max_tokens)
    decoder = Transformer(model.config, REFERENCE)
    cache = Cache(model.config, len(prompt) + max_tokens, model.dtype, model.device)
    tokens: list[int] = []
    logprobs: list[float] = []
    texts: list[str] = []
    start_s = time.perf_counter()
    first_s = 0.0
    logits = prefill(decoder, model, cache, prompt)
    while True:
        (token,), sampled_logprobs = sample_tokens(logits, [sequence.sampler])
        if token is None:
            raise ValueError(
                "the model's logits are not numbers: its weights are damaged, or it diverged in "
                "training"
            )
        first_s = first_s or time.perf_counter() - start_s
        delta = sequence.append(token)
        if delta.text:
            texts.append(delta.text)
            show(delta.text)
        if token not in sequence.end_ids:
            tokens.append(token)
            logprobs.append(sampled_logprobs[0].logprob)
        if delta.finish_reason is not None:
            break
        logits = compute(decoder, model, cache, [token])
    decode_s = time.perf_counter() - start_s - first_s
    rate = (len(tokens) - 1) / decode_s if len(tokens) > 1 else 0.0
    assert delta.finish_reason in ("stop", "length")
    return Generated(
        "".join(texts),
        tuple(tokens),
        tuple(logprobs),
        len(prompt),
        delta.finish_reason,
        first_s,
        rate,
    )


def prefill(
    decoder: Transformer, model: LoadedModel, cache: "Cache", prompt: Sequence[int]
) -> Tensor:
    """Compute the prompt in chunks; return the logits [1, V] after its last token."""
    for start in range(0, len(prompt), PREFILL_TOKENS):
        logits = compute(decoder, model, cache, prompt[start : start + PREFILL_TOKENS])
    return logits


def compute(
    decoder: Transformer, model: LoadedModel, cache: "Cache", tokens: Sequence[int]
) -> Tensor:
    """Compute the next tokens of the sequence; return the logits [1, V] after the last, in fp32."""
    device = model.device
    positions = torch.arange(cache.length, cache.length + len(tokens), device=device)[None]
    ids = torch.tensor([list(tokens)], device=device)
    x = decoder.hidden(model.weights, ids, positions, cache)
    cache.advance(len(tokens))
    return decoder.logits(model.weights, x[:, -1]).float()


class Cache:
    """Keys and values of one sequence, [layer, K, max_tokens, C] each, filled from the front.

    It is the model's `attend` for the next T tokens, at positions `length` and on; then call
    `advance(T)`.
    """

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.length = 0
        shape = (config.num_layers, config.num_kv_heads, max_tokens, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, T, H, C], k and v [1, T, K, C] of the new tokens -> [1, T, H, C]."""
        start = self.length
        stop = self.length + q.shape[1]
        assert stop <= self.max_tokens
        self.keys[layer, :, start:stop] = k[0].transpose(0, 1)
        self.values[layer, :, start:stop] = v[0].transpose(0, 1)
        window = self.config.window(layer)
        first = 0 if window is None else max(0, start + 1 - window)  # that a new token attends to
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[None, layer, :, first:stop],
            self.values[None, layer, :, first:stop],
            attn_mask=self.mask(first, start, stop, window, q.device),
            enable_gqa=self.config.num_heads != self.config.num_kv_heads,
        )
        return out.transpose(1, 2)

    def mask(
        self, first: int, start: int, stop: int, window: int | None, device: torch.device
    ) -> Tensor | None:
        """Return the attention mask [new tokens, cached tokens from `first`], true where a token
        attends; None for a single new token, which attends to all.
        """
        if stop - start == 1:
            return None
        queries = torch.arange(start, stop, device=device)[:, None]
        distance = queries - torch.arange(first, stop, device=device)[None, :]
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens just computed as part of the sequence."""
        self.length += num_tokens
