"""The decoder against transformers: every family, real weights, gradients, and what a token may
see."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardwise.config import ModelConfig, RopeScaling
from shardwise.formats.huggingface.hf_config import from_hugging_face, to_hugging_face
from shardwise.formats.model_source import read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.kernels.reference.rope import apply_rope
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal, linear
from shardwise.model.loss import cross_entropy
from shardwise.model.rotary import Rotary, rotary_frequencies
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from smollm2 import smollm2_gguf
from tiny_models import VOCAB, our_weights, tiny_model
from whole_weights import load_weights

LOGITS = 1e-4  # of the largest logit, in fp32: the promise
TINY_LOGITS = 5e-6  # of the largest logit, what two layers in fp32 do
GRADIENTS = 1e-5  # of the largest element of each gradient, in fp32

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama-tied", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama 3: grouped queries, large theta": (
        "llama-tied",
        {"tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama 3.1: stretched": ("llama", {}),  # 48 positions, where the original context has 16
    "llama 3.2: stretched, tied": ("llama", {"tie_word_embeddings": True}),
    "linear stretching": ("llama", {"rope_parameters": LINEAR}),
    "qwen2: yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3: yarn, all parameters": (
        "qwen3",
        {"rope_parameters":
            YARN | {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7,
                    "mscale_all_dim": 1.4, "truncate": False}},
    ),
    "one kv head": ("llama-tied", {"num_key_value_heads": 1}),
    "smollm2: 9 heads, 3 kv heads, tied": (
        "llama-tied",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "biases everywhere": ("llama-biases", {}),
    "heads wider than the model": ("llama-tied", {"head_dim": 32}),
    "mistral: window of 8 in 48": ("mistral", {}),
    "mistral: no window": ("mistral", {"sliding_window": None}),
    "mistral: window of 1": ("mistral", {"sliding_window": 1}),
    "qwen2: biases": ("qwen2", {}),
    "qwen2: tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2: windows from layer 1 on": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8,
         "max_window_layers": 1,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "qwen3: q/k norm, tied": ("qwen3", {}),
    "qwen3: heads wider than the model, biases":
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "gpt2": ("gpt2", {}),
    "gpt2: untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2: exact gelu": ("gpt2", {"activation_function": "gelu", "n_inner": 80}),
    "another epsilon": ("llama-tied", {"rms_norm_eps": 0.03}),
}  # fmt: skip


def tiny(case: str) -> tuple[PreTrainedModel, ModelConfig, dict[str, Tensor]]:
    """A random model of transformers, with its config and weights in our names."""
    name, changes = CASES[case]
    model = tiny_model(name, **changes)
    weights = our_weights(model)
    config = from_hugging_face(model.config.to_dict())
    if config.family == "gpt2" and not config.tied:
        weights["head"] = model.state_dict()["lm_head.weight"]
    assert {spec.name: spec.shape for spec in model_specs(config) if not spec.tied_to} == {
        name: weight.shape for name, weight in weights.items()
    }
    return model, config, weights


def drawn_tokens(rows: int, num_tokens: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(
    config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, first: int = 0, **causal: Any
) -> Tensor:
    positions = torch.arange(first, first + tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return Transformer(config, REFERENCE).forward(
            weights, tokens, positions, Causal(config, causal_attention, **causal)
        )


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    model, config, weights = tiny(case)
    tokens = drawn_tokens(2, 48)
    with torch.no_grad():
        theirs = model(tokens).logits
    assert_close(logits_of(config, weights, tokens), theirs, TINY_LOGITS)


@pytest.mark.parametrize("case", CASES)
def test_positions_can_start_anywhere(case: str) -> None:
    model, config, weights = tiny(case)
    tokens = drawn_tokens(2, 20)
    with torch.no_grad():
        theirs = model(tokens, position_ids=torch.arange(44, 64)[None].expand(2, -1)).logits
    assert_close(logits_of(config, weights, tokens, first=44), theirs, TINY_LOGITS)


@pytest.mark.parametrize(
    "case", ["llama 3.1: stretched", "linear stretching", "qwen3: yarn, all parameters"]
)
def test_rope_scaling_changes_the_logits(case: str) -> None:
    """Guard the cases above: without scaling the same weights give other logits."""
    _, config, weights = tiny(case)
    tokens = drawn_tokens(1, 48)
    plain = ModelConfig(**{**vars(config), "rope_scaling": None})
    with_it = logits_of(config, weights, tokens)
    without = logits_of(plain, weights, tokens)
    assert (with_it - without).abs().max() > 100 * LOGITS * with_it.abs().max()


@pytest.mark.parametrize(
    "case",
    [
        "llama 3.1: stretched",
        "qwen3: q/k norm, tied",
        "biases everywhere",
        "qwen2: yarn",
        "gpt2",
        "qwen2: windows from layer 1 on",
        "gpt2: untied",
    ],
)
def test_gradients_are_those_of_transformers(case: str) -> None:
    """Compare the gradient of every parameter for the summed loss of the next token, with q/k
    norms, which change the loss little."""
    model, config, weights = tiny(case)
    tokens = drawn_tokens(2, 40)
    targets = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    loss.backward()
    theirs = our_gradients(model, config)
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    decoder = Transformer(config, REFERENCE)
    positions = torch.arange(40).expand(2, -1)
    hidden = decoder.hidden(weights, tokens, positions, Causal(config, causal_attention))
    ours = cross_entropy(hidden, weights[decoder.head_name], targets, cross_entropy_grad_)
    assert abs(ours.item() - loss.item()) <= 1e-6 * loss.item()
    for name, grad in zip(weights, torch.autograd.grad(ours, list(weights.values())), strict=True):
        assert theirs[name].abs().max() > 0, name
        assert (grad - theirs[name]).abs().max() <= GRADIENTS * theirs[name].abs().max(), name


def our_gradients(model: PreTrainedModel, config: ModelConfig) -> dict[str, Tensor]:
    """The gradients of a transformers model in our names."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model = type(model)(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(grads[name])
    ours = our_weights(model)
    if config.family == "gpt2" and not config.tied:
        ours["head"] = model.state_dict()["lm_head.weight"]
    return ours


# What a token may see

SEEING = [
    "llama 3.1: stretched",
    "mistral: window of 8 in 48",
    "qwen2: windows from layer 1 on",
    "gpt2",
]


@pytest.mark.parametrize("case", SEEING)
def test_batch_rows_are_independent(case: str) -> None:
    _, config, weights = tiny(case)
    tokens = drawn_tokens(3, 30)
    together = logits_of(config, weights, tokens)
    for row in range(3):
        assert_close(
            together[row : row + 1], logits_of(config, weights, tokens[row : row + 1]), TINY_LOGITS
        )


@pytest.mark.parametrize("case", SEEING)
def test_packed_documents_equal_separate_ones(case: str) -> None:
    """Documents of 11, 1, 20 and 8 tokens in one row, each with positions from 0; cut otherwise in
    the second row."""
    _, config, weights = tiny(case)
    tokens = drawn_tokens(2, 40)
    lengths = [[11, 1, 20, 8], [40]]
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in lengths])
    with torch.no_grad():
        packed = Transformer(config, REFERENCE).forward(
            weights, tokens, positions, Causal(config, causal_attention, documents)
        )
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            alone = logits_of(config, weights, tokens[row : row + 1, start : start + size])
            assert_close(packed[row : row + 1, start : start + size], alone, TINY_LOGITS)
            start += size


@pytest.mark.parametrize("case", SEEING)
def test_no_token_attends_to_later_ones(case: str) -> None:
    _, config, weights = tiny(case)
    tokens = drawn_tokens(1, 30)
    other = tokens.clone()
    other[0, 20:] = (other[0, 20:] + 1) % VOCAB
    before = logits_of(config, weights, tokens)
    after = logits_of(config, weights, other)
    assert_close(after[:, :20], before[:, :20], TINY_LOGITS)
    assert (after[:, 20:] - before[:, 20:]).abs().max() > 0.01


def test_windows_of_layers_add_up() -> None:
    """Two layers with a window of 8: token 30 sees back to token 30 - 2 x 7, and no further."""
    _, config, weights = tiny("mistral: window of 8 in 48")
    tokens = drawn_tokens(1, 31)
    logits = logits_of(config, weights, tokens)[0, -1]
    for changed, seen in ((15, False), (16, True)):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB
        assert (not torch.equal(logits, logits_of(config, weights, other)[0, -1])) == seen


# Pieces


def test_rope_preserves_norms() -> None:
    """Scores depend on the distance of two positions alone (Su et al. 2021), to 1e-5 in fp32."""
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    rotary = Rotary(rotary_frequencies(16, 10000.0, None))

    def score(m: int, n: int) -> float:
        at = [rotary.tables(torch.tensor([p]), torch.float32) for p in (m, n)]
        return float((apply_rope(q, *at[0]) * apply_rope(k, *at[1])).sum())

    for m, n in ((5, 2), (13, 10), (103, 100), (3, 0)):
        assert abs(score(m, n) - score(3, 0)) < 1e-5
    assert score(3, 0) != pytest.approx(score(9, 0), abs=0.1)
    turned = apply_rope(q, *rotary.tables(torch.tensor([7]), torch.float32))
    torch.testing.assert_close(turned.norm(), q.norm(), rtol=1e-6, atol=0)


def test_published_rope_scaling_of_llama_3_1() -> None:
    """High frequencies stay, low ones are divided by 8, and in between they keep falling."""
    plain = rotary_frequencies(128, 500000.0, None)
    stretched = rotary_frequencies(128, 500000.0, RopeScaling("llama3", 8.0))
    ratio = plain / stretched
    wavelength = 2 * torch.pi / plain
    torch.testing.assert_close(
        ratio[wavelength < 8192 / 4], torch.ones(int((wavelength < 8192 / 4).sum()))
    )
    torch.testing.assert_close(
        ratio[wavelength > 8192], torch.full((int((wavelength > 8192).sum()),), 8.0)
    )
    between = ratio[(wavelength >= 8192 / 4) & (wavelength <= 8192)]
    assert len(between) > 3 and torch.all(between.diff() > 0)


def test_linear_accepts_an_applied_weight() -> None:
    class Doubled:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def apply(self, x: Tensor) -> Tensor:
            return 2 * x @ self.weight.T

    x = torch.randn(2, 3)
    weight = torch.randn(4, 3)
    bias = torch.randn(4)
    torch.testing.assert_close(linear(x, Doubled(weight)), linear(x, 2 * weight))
    torch.testing.assert_close(linear(x, Doubled(weight), bias), linear(x, 2 * weight, bias))


@pytest.mark.parametrize("case", ["llama 3.1: stretched", "qwen3: q/k norm, tied", "gpt2"])
def test_bf16_stays_near_fp32(case: str) -> None:
    """Logits in bf16 are within 5 % of the largest one."""
    _, config, weights = tiny(case)
    tokens = drawn_tokens(2, 48)
    narrow = logits_of(
        config, {name: weight.bfloat16() for name, weight in weights.items()}, tokens
    )
    assert narrow.dtype == torch.bfloat16
    assert_close(narrow.float(), logits_of(config, weights, tokens), 0.05)


# The real model


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelConfig, dict[str, Tensor]]:
    path = smollm2_gguf()
    config = read_config(path)
    one = Layout()
    return config, load_weights(path, config, model_specs(config), one, one.coord(0), torch.float32)


@pytest.fixture(scope="module")
def theirs(smollm2: tuple[ModelConfig, dict[str, Tensor]]) -> Iterator[LlamaForCausalLM]:
    """The same weights in transformers' model, copied from the parts of our fused ones."""
    config, weights = smollm2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**to_hugging_face(config)), dtype=torch.float32
        )
    q = config.q_size
    kv = config.kv_size
    state = {}
    for i in range(config.num_layers):
        old = f"blocks.{i}."
        new = f"model.layers.{i}."
        fused = zip(("q", "k", "v"), weights[old + "qkv"].split((q, kv, kv)), strict=True)
        state |= {f"{new}self_attn.{part}_proj.weight": weight for part, weight in fused}
        gate, up = weights[old + "gate_up"].chunk(2)
        state |= {
            f"{new}self_attn.o_proj.weight": weights[old + "out"],
            f"{new}mlp.gate_proj.weight": gate,
            f"{new}mlp.up_proj.weight": up,
            f"{new}mlp.down_proj.weight": weights[old + "down"],
            f"{new}input_layernorm.weight": weights[old + "norm1"],
            f"{new}post_attention_layernorm.weight": weights[old + "norm2"],
        }
    state |= {"model.norm.weight": weights["norm"], "model.embed_tokens.weight": weights["embed"]}
    state["lm_head.weight"] = weights["embed"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(
        model.config
    )  # its buffer was on the meta device
    yield model.eval()


TEXT = (
    "The capital of France is Paris, and the capital of Japan is Tokyo. def f(x):\n    return "
    "x + 1\n"
)


def test_the_real_model_computes_what_transformers_does(smollm2, theirs) -> None:
    config, weights = smollm2
    tokens = torch.tensor([load_tokenizer(smollm2_gguf()).encode(TEXT)])
    with torch.no_grad():
        expected = theirs(tokens).logits
        far = theirs(tokens, position_ids=torch.arange(8000, 8000 + tokens.shape[1])[None]).logits
    logits = logits_of(config, weights, tokens)
    assert_close(logits, expected, LOGITS)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert_close(logits_of(config, weights, tokens, first=8000), far, LOGITS)


def test_the_real_model_expects_real_text(smollm2) -> None:
    """The loss is less than 3 nats per token, where a uniform guess has 10.8."""
    config, weights = smollm2
    tokens = torch.tensor([load_tokenizer(smollm2_gguf()).encode(TEXT)])
    decoder = Transformer(config, REFERENCE)
    with torch.no_grad():
        x = decoder.hidden(
            weights,
            tokens[:, :-1],
            torch.arange(tokens.shape[1] - 1)[None],
            Causal(config, causal_attention),
        )
        assert (
            cross_entropy(x, weights["embed"], tokens[:, 1:], cross_entropy_grad_)
            / (tokens.shape[1] - 1)
            < 3
        )
