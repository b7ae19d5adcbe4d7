"""Scaling of RoPE against transformers: frequencies, the factor of cosines and sines, logits beyond
the original context in training and serving, and config.json and GGUF files that state it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise import LLM, SamplingParams
from shardwise.formats.huggingface.hf_config import from_hugging_face, to_hugging_face
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal
from shardwise.model.rotary import Rotary
from shardwise.model.transformer import Transformer
from tiny_models import our_weights, tiny_model

LENGTH = 128
"""The context length before `dynamic` and after `yarn`."""
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 8,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": LENGTH,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@st.composite
def scalings(draw: st.DrawFn) -> dict[str, Any]:
    """Any `rope_scaling` that is supported, with optional fields left out, null or given."""
    kind = draw(st.sampled_from(["linear", "dynamic", "llama3", "yarn"]))
    rope: dict[str, Any] = {
        draw(st.sampled_from(["rope_type", "type"])): kind,
        "factor": draw(st.floats(1, 64)),
    }
    optional: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        optional["original_max_position_embeddings"] = st.integers(2, LENGTH)
    if kind == "llama3":
        rope["low_freq_factor"] = draw(st.floats(0.5, 2))
        rope["high_freq_factor"] = draw(st.floats(3, 8))
    if kind == "yarn":
        optional |= {
            "beta_fast": st.none() | st.floats(4, 64),
            "beta_slow": st.none() | st.floats(0.5, 3),
            "attention_factor": st.none() | st.floats(0.5, 2),
            "mscale": st.floats(0.1, 2),
            "mscale_all_dim": st.floats(0.1, 2),
            "truncate": st.booleans(),
        }
    for name, values in optional.items():
        if draw(st.booleans()):
            rope[name] = draw(values)
    return rope


@given(scalings(), st.sampled_from([16, 64, 128]), st.sampled_from([1e4, 1e6]))
def test_frequencies_are_those_of_transformers(
    rope: dict[str, Any], head_dim: int, theta: float
) -> None:
    """Equal to 5e-6 of each frequency. For `dynamic`, transformers is given the length of the
    scaled context, where vLLM takes its one table."""
    raw = LLAMA | {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": rope}
    config = from_hugging_face(raw)
    theirs = LlamaConfig.from_dict({**raw, "rope_scaling": dict(rope)})
    kind = theirs.rope_parameters["rope_type"]
    length = {"seq_len": LENGTH * rope["factor"]} if kind == "dynamic" else {}
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", **length)
    rotary = Rotary.of(config)
    torch.testing.assert_close(rotary.frequencies, expected, rtol=5e-6, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude, rel=1e-12)
    assert from_hugging_face(to_hugging_face(config)) == config


def test_tables_are_multiplied_by_the_attention_factor() -> None:
    config = from_hugging_face(LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.5}})
    tables = Rotary.of(config).tables(torch.arange(9), torch.float32)
    norms = (tables.cos**2 + tables.sin**2).sqrt()
    torch.testing.assert_close(norms, torch.full_like(norms, 1.5))


@pytest.mark.parametrize(
    ("stated", "rope", "context"),
    [
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (40960, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32768}, 131072),
        (4096, {"type": "yarn", "factor": 1.5}, 6144),
        (4096, {"type": "dynamic", "factor": 2.0}, 8192),
        (16384, {"type": "linear", "factor": 4.0}, 16384),
        (
            131072,
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 8192},
            131072,
        ),
    ],
)  # fmt: skip
def test_the_context_is_the_scaled_one(stated: int, rope: dict[str, Any], context: int) -> None:
    """Qwen2.5 and Qwen3 document YaRN with the original context in config.json."""
    raw = LLAMA | {"max_position_embeddings": stated, "rope_scaling": rope}
    assert from_hugging_face(raw).max_positions == context


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rope_type": "longrope", "long_factor": [1], "short_factor": [1]},
            "'longrope': LongRoPE",
        ),
        ({"rope_type": "mrope"}, "'mrope': multimodal"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section = [2, 3, 3] is not"),
        ({"full_attention": {"rope_theta": 1e6}}, "rope_scaling.full_attention = {"),
        ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor = 0.5 is not support"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast must be above beta_slow 2.0, not 1.0"),
        ({"attention_factor": -1}, "attention_factor must be a finite number above 0, not -1"),
        ({"truncate": "no"}, "truncate must be true or false"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings must be"),
        ({"rope_theta": 1.0}, "yarn rope scaling needs a rope_theta above 1"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, "rope_scaling.alpha = 1000.0 is not supported"),
        ({"rope_type": "dynamic", "factor": 0.5}, "dynamic needs a factor of at least 1, not 0.5"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_hugging_face(LLAMA | {"rope_scaling": YARN | change})
    assert said in str(caught.value)


def test_two_spellings_that_contradict_each_other_are_refused() -> None:
    new = {"rope_parameters": YARN | {"rope_theta": 5e5}}
    both = from_hugging_face(LLAMA | new | {"rope_scaling": YARN | {"rope_theta": 5e5}})
    assert both == from_hugging_face(LLAMA | new)
    for old in (YARN, YARN | {"rope_theta": 5e5, "factor": 2.0}, {"type": "default"}):
        with pytest.raises(ValueError, match="rope_parameters and rope_scaling contradict"):
            from_hugging_face(LLAMA | new | {"rope_scaling": old})


def test_an_original_context_outside_of_rope_scaling_wins() -> None:
    """Some configs state it there, and transformers reads it."""
    raw = LLAMA | {"rope_scaling": YARN, "original_max_position_embeddings": 16}
    theirs = LlamaConfig.from_dict({**raw, "rope_scaling": dict(YARN)})
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(Rotary.of(from_hugging_face(raw)).frequencies, expected)


# Whole models beyond the original context

WHOLE = {
    "yarn": ("qwen2", YARN | {"rope_theta": 1e4}, LENGTH),
    "yarn with its own factors": (
        "qwen3",
        YARN | {"rope_theta": 1e4, "attention_factor": 1.4, "beta_fast": 8.0, "truncate": False},
        LENGTH,
    ),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 32),
}
"""Family, `rope_parameters` and the context length that config.json states."""
LOGITS = 5e-6  # of the largest logit, what two layers in fp32 do


def whole(case: str) -> Any:
    name, rope, length = WHOLE[case]
    return tiny_model(name, vocab_size=264, max_position_embeddings=length, rope_parameters=rope)


def text_ids() -> list[int]:
    return torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


def their_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits of one forward over the whole context, where the length-dependent frequencies of
    `dynamic` in transformers are those of our one table."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits
    return logits


@pytest.mark.parametrize("case", WHOLE)
def test_the_trained_model_computes_logits_of_transformers(case: str) -> None:
    model = whole(case)
    config = from_hugging_face(model.config.to_dict())
    assert config.max_positions == LENGTH
    ids = text_ids()
    expected = their_logits(model, ids)
    with torch.no_grad():
        logits = Transformer(config, REFERENCE).forward(
            our_weights(model),
            torch.tensor([ids]),
            torch.arange(LENGTH)[None],
            Causal(config, causal_attention),
        )
    assert (logits - expected).abs().max() <= LOGITS * expected.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
@pytest.mark.parametrize("case", WHOLE)
def test_the_server_computes_logprobs_of_transformers(
    case: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """fp32 runs the reference kernels, bf16 the native ones; tokens come in chunks and from the KV
    cache. Without the factor of cosines and sines they are off by 0.14 and 1.5."""
    model = whole(case)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    ids = text_ids()[:-1]
    llm = LLM(str(tmp_path), dtype=dtype, kv_bytes=1 << 20, max_batch_tokens=48, max_running=4)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
    logprobs = torch.tensor([each.logprob for each in output.prompt_logprobs if each is not None])
    expected = their_logits(model, text_ids())[0].log_softmax(-1)
    expected = expected[:-2].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (logprobs - expected).abs().max() <= tolerance
