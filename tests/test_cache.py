"""Attention over the cache is attention over the whole sequence, however the tokens arrive."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.serve.generate import Cache
from tiny_models import VOCAB, our_weights, tiny_model

LOGITS = 1e-5  # of the largest logit, in fp32
CPU = torch.device("cpu")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one kv head": ("llama-tied", {"num_key_value_heads": 1}),
    "as many kv heads as heads": ("llama-tied", {"num_key_value_heads": 4}),
    "biases": ("llama-biases", {}),
    "mistral": ("mistral", {}),
    "window of 1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows in layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
         "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
}  # fmt: skip


def tiny(case: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    name, changes = CASES[case]
    model = tiny_model(name, **changes)
    return from_hugging_face(model.config.to_dict()), our_weights(model)


def new_cache(config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32) -> Cache:
    """Filled with NaN, so that reading what was never written shows."""
    cache = Cache(config, max_tokens, dtype, CPU)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@torch.no_grad()
def over_cache(
    config: ModelConfig, weights: dict[str, Tensor], cache: Cache, tokens: Tensor
) -> Tensor:
    """Logits of the next tokens [T] of a sequence."""
    positions = torch.arange(cache.length, cache.length + len(tokens))[None]
    logits = Transformer(config, REFERENCE).forward(weights, tokens[None], positions, cache)
    cache.advance(len(tokens))
    return logits[0]


@torch.no_grad()
def at_once(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    return Transformer(config, REFERENCE).forward(
        weights, tokens[None], torch.arange(len(tokens))[None], Causal(config, causal_attention)
    )[0]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= LOGITS * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_the_full_forward(case: str) -> None:
    """Greedy from 3 tokens to 40: logits within the tolerance at every step, and the same
    tokens."""
    config, weights = tiny(case)
    cache = new_cache(config, 40)
    sequence = torch.tensor([7, 100, 42])
    logits = over_cache(config, weights, cache, sequence)[-1]
    while len(sequence) < 40:
        expected = at_once(config, weights, sequence)[-1]
        assert_close(logits, expected)
        assert logits.argmax() == expected.argmax()
        sequence = torch.cat((sequence, logits.argmax()[None]))
        logits = over_cache(config, weights, cache, sequence[-1:])[-1]
    assert cache.length == 40


@pytest.mark.parametrize("case", CASES)
def test_any_chunks_give_the_logits_of_all_tokens(case: str) -> None:
    config, weights = tiny(case)
    tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    expected = at_once(config, weights, tokens)

    @given(cuts=st.sets(st.integers(1, 39), max_size=6), spare=st.integers(0, 3))
    @settings(max_examples=examples(25))
    def same(cuts: set[int], spare: int) -> None:
        cache = new_cache(config, 40 + spare)
        edges = [0, *sorted(cuts), 40]
        parts = [over_cache(config, weights, cache, tokens[a:b]) for a, b in pairwise(edges)]
        assert_close(torch.cat(parts), expected)

    same()


def test_room_is_what_the_plan_counts() -> None:
    config, _ = tiny("llama")
    cache = Cache(config, 10, torch.bfloat16, CPU)
    assert cache.keys.nbytes + cache.values.nbytes == 10 * config.kv_bytes_per_token(2)


def test_a_token_too_many_is_a_fault_of_ours() -> None:
    config, weights = tiny("llama")
    cache = new_cache(config, 5)
    over_cache(config, weights, cache, torch.arange(5))
    with pytest.raises(AssertionError):
        over_cache(config, weights, cache, torch.arange(1))


def test_nothing_is_kept_until_it_is_advanced() -> None:
    """A run that is not followed by `advance`, such as a rejected guess, is overwritten by the
    next."""
    config, weights = tiny("qwen3")
    tokens = torch.arange(12)
    cache = new_cache(config, 12)
    over_cache(config, weights, cache, tokens[:8])
    with torch.no_grad():
        Transformer(config, REFERENCE).forward(
            weights, tokens[None, :4] + 50, torch.arange(8, 12)[None], cache
        )
    assert cache.length == 8
    assert_close(
        over_cache(config, weights, cache, tokens[8:]), at_once(config, weights, tokens)[8:]
    )
