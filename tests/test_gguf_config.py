"""Metadata of GGUF files as configs: every key is read, harmless or refused by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import ModelConfig, RopeScaling
from shardwise.formats.gguf.gguf_config import config_from_gguf
from shardwise.formats.gguf.gguf_file import Gguf, GgufTensor
from shardwise.formats.gguf.gguf_keys import FIELDS

GGUF_KEYS = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.feed_forward_length": 96, "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.head_count": 4, "llama.vocab_size": 100,
}  # fmt: skip


def gguf_config(
    change: dict[str, Any], divisors: np.ndarray | None = None, kind: str = "F32"
) -> ModelConfig:
    tensors = {}
    parts = ()
    if divisors is not None:
        stored = divisors.astype("<f4").view(np.uint8)
        tensors["rope_freqs.weight"] = GgufTensor(
            "rope_freqs.weight", divisors.shape, kind, 0, stored.size
        )
        parts = (stored,)
    return config_from_gguf(
        Gguf(Path("model.gguf"), GGUF_KEYS | change, tensors, parts), "model.gguf"
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "bert", "unknown architecture 'bert'"),
        ("general.architecture", [], "unknown architecture []"),
        ("llama.attention.head_count", 0, "llama.attention.head_count must be a whole number"),
        ("llama.attention.head_count", [4, 4], "llama.attention.head_count must be a whole number"),
        ("llama.attention.head_count", None, "llama.attention.head_count is missing"),
        ("llama.attention.head_count_kv", 3, "3 kv heads do not divide 4 heads"),
        (
            "llama.attention.sliding_window",
            "x",
            "llama.attention.sliding_window must be a whole number",
        ),
        (
            "llama.attention.sliding_window",
            -3,
            "llama.attention.sliding_window must be a whole number",
        ),
        (
            "llama.rope.freq_base",
            "abc",
            "llama.rope.freq_base must be a finite number above 0, not 'abc'",
        ),
        ("llama.rope.freq_base", float("nan"), "llama.rope.freq_base must be a finite number"),
        ("llama.rope.scaling.factor", "2", "llama.rope.scaling.factor must be a finite number"),
        ("llama.rope.scaling.factor", 0.0, "llama.rope.scaling.factor must be a finite number"),
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope'; known are none, linear"),
        ("llama.rope.scaling.type", [], "rope scaling []"),
        ("llama.rope.scaling.attn_factor", 1.5, "attn_factor = 1.5 is supported with the type"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor = 0.5 is not supported; 1 or"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier = 0.1 is not support"),
        ("llama.rope.dimension_sections", [2, 3, 3, 0], "rope.dimension_sections = [2, 3, 3, 0]"),
        ("llama.expert_count", 8, "llama.expert_count = 8 is not supported; 0 works"),
        ("llama.final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0 is not supported"),
        ("llama.attention.causal", False, "llama.attention.causal = false is not supported; true"),
        ("llama.attention.value_length", 8, "value_length is 8, but only values as wide as keys"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            "x",
            "layer_norm_rms_epsilon must be a finite number",
        ),
        ("llama.vocab_size", "x", "vocab_size must be a whole number"),
        ("llama.block_count", 100_000, "block_count is 100000, and at most 1024 is"),
        ("llama.block_count", 2**32 - 1, "block_count is 4294967295, and at most 1024 is"),
        ("llama.context_length", 2**64 - 1, "llama.context_length is 18446744073709551615"),
    ],
)
def test_a_gguf_header_that_describes_no_model_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        gguf_config({key: value})
    assert str(caught.value).startswith("model.gguf") and said in str(caught.value)


def test_a_gguf_window_is_read() -> None:
    config = gguf_config({"llama.attention.sliding_window": 16})
    assert (config.sliding_window, config.windowed_layers) == (16, {0, 1})
    for change in ({}, {"llama.attention.sliding_window": 0}):
        assert (
            gguf_config(change).sliding_window is None and not gguf_config(change).windowed_layers
        )


@pytest.mark.parametrize(
    ("change", "scaling"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"scaling.factor": 4.0}, RopeScaling("linear", 4.0)),  # llama.cpp: linear without a type
        ({"scale_linear": 4.0}, RopeScaling("linear", 4.0)),  # the key of old files
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "linear"}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
            RopeScaling(
                "yarn", 4.0, original_max_positions=32, attention_factor=0.1 * math.log(4) + 1
            ),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.attn_factor": 0.5,
             "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0,
             "scaling.yarn_ext_factor": 1.0, "scaling.finetuned": True},
            RopeScaling("yarn", 2.0, original_max_positions=128, beta_fast=16.0, beta_slow=2.0,
                        attention_factor=0.5 * (0.1 * math.log(2) + 1)),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_attn_factor": 1.25},
            RopeScaling("yarn", 4.0, original_max_positions=128, attention_factor=1.25),
        ),
    ],
)  # fmt: skip
def test_gguf_rope_scaling_is_read(change: dict[str, Any], scaling: RopeScaling | None) -> None:
    keys = {f"llama.rope.{key}": value for key, value in change.items()}
    config = gguf_config(keys | {"llama.rope.dimension_count": 16})
    assert config.rope_scaling == scaling
    is_yarn = scaling is not None and scaling.kind == "yarn"
    assert config.max_positions == (max(128, scaling.scaled_max_positions) if is_yarn else 128)


def test_every_gguf_key_is_in_the_table() -> None:
    """The keys of an architecture that gguf-py lists, but those of whole other kinds of models."""
    from gguf.constants import Keys

    theirs = {
        value.removeprefix("{arch}.")
        for kind in (Keys.LLM, Keys.Attention, Keys.Attention.Indexer, Keys.Rope)
        for name, value in vars(kind).items()
        if name.isupper() and "{dense}" not in value
    }
    assert {"rope.scaling.yarn_beta_fast", "expert_count", "attention.scale"} <= theirs
    assert not theirs - (FIELDS.read | FIELDS.harmless | FIELDS.only.keys())


def test_unknown_gguf_keys_are_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"known and are ignored: llama\.brand_new$"):
        gguf_config({"llama.brand_new": 1, "llama.off": False, "general.anything": 1})


def published_divisors(factor: float, low: float = 1.0) -> np.ndarray:
    """Divisors of transformers for heads of 64 and theta 5e5: unscaled / scaled frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
    return 5e5 ** -(np.arange(0, 64, 2) / 64) / scaled


HEADS_OF_64 = {"llama.attention.key_length": 64, "llama.rope.freq_base": 5e5}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_of_llama_31_are_known(factor: float) -> None:
    scaling = gguf_config(HEADS_OF_64, published_divisors(factor)).rope_scaling
    assert scaling and (scaling.kind, scaling.factor) == ("llama3", pytest.approx(factor, rel=1e-6))


def test_other_rope_divisors_are_refused() -> None:
    good = published_divisors(8.0)
    for divisors in (
        np.linspace(1, 8, 32),
        published_divisors(8.0, low=2.0),
        good[::-1].copy(),
        np.full(32, 8.0),
    ):
        with pytest.raises(
            ValueError, match=r"model\.gguf: this file's RoPE frequencies .* are not Llama 3\.1's"
        ):
            gguf_config(HEADS_OF_64, divisors)
    with pytest.raises(ValueError, match="are not Llama 3"):
        gguf_config(HEADS_OF_64 | {"llama.rope.freq_base": 1e4}, good)
    for divisors, kind in ((good, "F16"), (good[:16].copy(), "F32")):
        with pytest.raises(ValueError, match=r"should be F32 of shape \(32,\)"):
            gguf_config(HEADS_OF_64, divisors, kind)
    with pytest.raises(ValueError, match="must be a finite number"):
        gguf_config(HEADS_OF_64, np.full(32, np.inf))
    with pytest.raises(ValueError, match="both by"):
        gguf_config(HEADS_OF_64 | {"llama.rope.scaling.factor": 2.0}, good)
