"""Tiny random models of every family, made by transformers, and what their weights are called
here."""

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 101  # prime, so that every cut of it is padded
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=8)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        ),
    ),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """Return a model with random weights, norms and biases included, so that no two are equal."""
    kind, config = MODELS[name]
    model = kind(kind.config_class.from_dict(config.to_dict() | changes)).eval()
    random = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for weight in model.parameters():
            centre = 1.0 if weight.dim() == 1 else 0.0
            weight.copy_(centre + 0.1 * torch.randn(weight.shape, generator=random))
    return model.to(dtype)


def our_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a transformers model in our names."""
    state = model.state_dict()
    return (
        gpt2_weights(state)
        if model.config.model_type == "gpt2"
        else llama_weights(state, model.config)
    )


def llama_weights(state: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    ours = {"embed": state["model.embed_tokens.weight"], "norm": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        ours["head"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        old = f"model.layers.{i}."
        new = f"blocks.{i}."
        ours[new + "norm1"] = state[old + "input_layernorm.weight"]
        ours[new + "norm2"] = state[old + "post_attention_layernorm.weight"]
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            for name, joined in (
                ("qkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                ("out", ["self_attn.o_proj"]),
                ("gate_up", ["mlp.gate_proj", "mlp.up_proj"]),
                ("down", ["mlp.down_proj"]),
            ):
                found = [
                    state[f"{old}{stem}.{kind}"]
                    for stem in joined
                    if f"{old}{stem}.{kind}" in state
                ]
                if found:
                    ours[new + name + ending] = torch.cat(found)
        for name in ("q_norm", "k_norm"):
            if (weight := state.get(f"{old}self_attn.{name}.weight")) is not None:
                ours[new + name] = weight
    return ours


def gpt2_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {"embed": state["transformer.wte.weight"], "positions": state["transformer.wpe.weight"]}
    ours |= {"norm": state["transformer.ln_f.weight"], "norm_bias": state["transformer.ln_f.bias"]}
    for i in range(2):
        for old, new in (
            ("ln_1", "norm1"),
            ("ln_2", "norm2"),
            ("attn.c_attn", "qkv"),
            ("attn.c_proj", "out"),
            ("mlp.c_fc", "gate_up"),
            ("mlp.c_proj", "down"),
        ):
            weight = state[f"transformer.h.{i}.{old}.weight"]
            ours[f"blocks.{i}.{new}"] = weight.T if weight.dim() == 2 else weight
            ours[f"blocks.{i}.{new}_bias"] = state[f"transformer.h.{i}.{old}.bias"]
    return ours
