"""One decoder for every family: GPT-2 and the Llama line differ by flags of its config.

How it is cut, quantized, paged or pipelined stands outside: cuts enter through `Seams`, other
weights through `linear`, the cache through `attend`. The weights are an argument, by the names of
`params.model_specs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.activations import ACTIVATIONS
from shardwise.kernels.interface import ModelKernels, RopeTables
from shardwise.model import layers
from shardwise.model.layers import Attend, Light, linear, look_up
from shardwise.model.seams import UNCUT, Seams


@dataclass(frozen=True)
class BlockWeights:
    """The parameters of one block: [out, in] matrices; qkv holds q|k|v, gate_up holds gate|up by
    rows."""

    norm1: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    norm1_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out_bias: Tensor | None = None
    norm2_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], layer: int) -> "BlockWeights":
        found = ((field.name, weights.get(f"blocks.{layer}.{field.name}")) for field in fields(cls))
        return cls(**{name: weight for name, weight in found if weight is not None})


@dataclass(frozen=True)
class Transformer:
    """The decoder. `forward` is the whole of it; its pieces (`embed`, `block`, `final`) are what a
    pipeline runs."""

    config: ModelConfig
    kernels: ModelKernels
    seams: Seams = UNCUT
    selective: bool = False
    """Whether the backward makes norms and activations again (selective recompute)."""
    applies_rope: bool = True
    """True if the model applies RoPE to q and k; False if `attend` does."""

    def forward(
        self, weights: Mapping[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Logits [..., V] of tokens [...] at positions [...]."""
        return self.logits(weights, self.hidden(weights, tokens, positions, attend))

    def hidden(
        self, weights: Mapping[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """The normalised last hidden state [..., D]."""
        x = self.embed(weights, tokens, positions)
        rope = self.rope_tables(positions, x.dtype)
        for layer in range(self.config.num_layers):
            x = self.block(x, layer, BlockWeights.of(weights, layer), rope, attend)
        return self.final(weights, x)

    def embed(
        self,
        weights: Mapping[str, Tensor],
        tokens: Tensor,
        positions: Tensor,
        sparse_grad: bool = False,
    ) -> Tensor:
        """Rows of the embedding. With `sparse_grad` its gradient holds those rows alone, not the
        whole vocabulary."""
        x = self.seams.look_up(tokens, weights["embed"], sparse_grad)
        if self.config.positions != "learned":
            return x
        return x + look_up(self.seams.part(positions), weights["positions"], sparse_grad)

    def block(
        self, x: Tensor, layer: int, w: BlockWeights, rope: RopeTables | None, attend: Attend
    ) -> Tensor:
        """Attention, then MLP, each added to the residual x [..., D]."""
        q, k, v = self.split_heads(
            linear(self.light(self.entering, x, w.norm1, w.norm1_bias), w.qkv, w.qkv_bias)
        )
        if w.q_norm is not None and w.k_norm is not None:
            q = self.norm(q, w.q_norm)
            k = self.norm(k, w.k_norm)
        if rope is not None:
            q = self.kernels.apply_rope(q, *rope)
            k = self.kernels.apply_rope(k, *rope)
        attended = attend(layer, q, k, v).flatten(-2)
        x = x + self.seams.leave(linear(attended, w.out), w.out_bias)
        inner = linear(
            self.light(self.entering, x, w.norm2, w.norm2_bias), w.gate_up, w.gate_up_bias
        )
        return x + self.seams.leave(linear(self.light(self.activate, inner), w.down), w.down_bias)

    def entering(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.seams.enter(self.norm(x, weight, bias))

    def light(self, make: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor | Light:
        """What goes into a product: kept for the backward or, with selective recompute, made again
        there."""
        return Light(make, inputs) if self.selective else make(*inputs)

    def final(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.norm(x, weights["norm"], weights.get("norm_bias"))

    def logits(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return linear(x, weights[self.head_name])

    @property
    def head_name(self) -> str:
        return "embed" if self.config.tied else "head"

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., q|k|v] -> [..., heads, C] each. A rank's share of heads follows from the width it
        sees."""
        config = self.config
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        kv = max(
            1, heads.shape[-2] * config.num_kv_heads // (config.num_heads + 2 * config.num_kv_heads)
        )
        q, k, v = heads.split((heads.shape[-2] - 2 * kv, kv, kv), -2)
        return q, k, v

    def activate(self, inner: Tensor) -> Tensor:
        if not self.config.gated:
            return ACTIVATIONS[self.config.activation](inner)
        return self.kernels.gated(inner, self.config.activation)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.config.norm == "layer":
            return layers.layer_norm(x, weight, bias, self.config.norm_eps)
        return self.kernels.rms_norm(x, weight, self.config.norm_eps)

    @cached_property
    def frequencies(self) -> Tensor:
        return layers.rotary_frequencies(
            self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )

    def rope_tables(self, positions: Tensor, dtype: torch.dtype) -> RopeTables | None:
        """Return the RoPE tables of `positions`, which all blocks share; None where the model
        applies no RoPE."""
        if self.config.positions == "learned" or not self.applies_rope:
            return None
        return layers.rope_tables(positions, self.frequencies.to(positions.device), dtype)
