"""The decoder of every family: GPT-2 and the Llama families differ by flags of their config.

Sharding, quantization, paging and pipelining are outside of it: tensor parallelism is in the hooks
of `Seams`, quantized weights are behind `linear`, the KV cache is behind `attend`. Weights are an
argument, by the names of `params.model_specs`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.activation_functions import ACTIVATIONS
from shardwise.kernels.interface import ModelKernels, RopeTables
from shardwise.model import layers
from shardwise.model.layers import Attend, RecomputedInput, linear, look_up
from shardwise.model.rotary import Rotary
from shardwise.model.seams import UNSHARDED, Seams


@dataclass(frozen=True)
class BlockWeights:
    """The parameters of one block, by their names in `block.BLOCK`. Matrices are [out, in]: the
    rows of qkv are q|k|v, and the rows of gate_up are gate|up."""

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
        """Return the weights of one block. Raises ValueError as `named` does."""
        return cls.named(weights, layer, names_by_layer(weights)[layer])

    @classmethod
    def named(
        cls, weights: Mapping[str, Tensor], layer: int, names: Iterable[str]
    ) -> "BlockWeights":
        """Return the weights with these names in the block. Raises ValueError for a name that is no
        field, and for a field without default that has no name."""
        unknown = [name for name in names if name not in IS_REQUIRED]
        missing = [name for name, required in IS_REQUIRED.items() if required and name not in names]
        if unknown or missing:
            fault = "has unknown weights" if unknown else "lacks weights"
            raise ValueError(f"block {layer} {fault}: {', '.join(unknown or missing)}")
        return cls(**{name: weights[f"blocks.{layer}.{name}"] for name in names})


IS_REQUIRED = {field.name: field.default is MISSING for field in fields(BlockWeights)}


def names_by_layer(weights: Iterable[str]) -> dict[int, list[str]]:
    """Return the local names of the weights of each block, such as `qkv`, by layer."""
    names: dict[int, list[str]] = defaultdict(list)
    for name in weights:
        if name.startswith("blocks."):
            _, layer, local = name.split(".", 2)
            names[int(layer)].append(local)
    return names


@dataclass(frozen=True)
class Transformer:
    """The decoder. `forward` runs all of it; a pipeline runs its pieces `embed`, `block`, `final`.

    Attributes:
        config: shape and flags of the model.
        kernels: implementations of the operations.
        seams: TP hooks.
        recompute_inputs: recompute norms and activations in the backward (selective recompute).
        applies_rope: apply RoPE to q and k before `attend`; False where `attend` does it.
    """

    config: ModelConfig
    kernels: ModelKernels
    seams: Seams = UNSHARDED
    recompute_inputs: bool = False
    applies_rope: bool = True

    def forward(
        self, weights: Mapping[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return the logits [..., V] of tokens [...] at positions [...]."""
        return self.logits(weights, self.hidden(weights, tokens, positions, attend))

    def hidden(
        self, weights: Mapping[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return the hidden states [..., D] after the final norm."""
        x = self.embed(weights, tokens, positions)
        rope = self.rope_tables(positions, x.dtype)
        names = names_by_layer(weights)
        for layer in range(self.config.num_layers):
            block = BlockWeights.named(weights, layer, names[layer])
            x = self.block(x, layer, block, rope, attend)
        return self.final(weights, x)

    def embed(
        self,
        weights: Mapping[str, Tensor],
        tokens: Tensor,
        positions: Tensor,
        sparse_grad: bool = False,
    ) -> Tensor:
        """Return the embeddings [..., D] of tokens [...], with learned positions added if the model
        has them. With `sparse_grad` the gradients of both tables are sparse tensors."""
        x = self.seams.look_up(tokens, weights["embed"], sparse_grad)
        if self.config.positions != "learned":
            return x
        return x + look_up(self.seams.local_tokens(positions), weights["positions"], sparse_grad)

    def block(
        self, x: Tensor, layer: int, w: BlockWeights, rope: RopeTables | None, attend: Attend
    ) -> Tensor:
        """Run attention, then the MLP, and add each to the residual x [..., D]."""
        q, k, v = self.split_heads(
            linear(self.linear_input(self.enter, x, w.norm1, w.norm1_bias), w.qkv, w.qkv_bias)
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
            self.linear_input(self.enter, x, w.norm2, w.norm2_bias), w.gate_up, w.gate_up_bias
        )
        activated = self.linear_input(self.activate, inner)
        return x + self.seams.leave(linear(activated, w.down), w.down_bias)

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the input of a column-parallel linear: x after its norm."""
        return self.seams.enter(self.norm(x, weight, bias))

    def linear_input(
        self, make: Callable[..., Tensor], *inputs: Tensor | None
    ) -> Tensor | RecomputedInput:
        """Return make(*inputs), which the backward recomputes under selective recompute."""
        return RecomputedInput(make, inputs) if self.recompute_inputs else make(*inputs)

    def final(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.norm(x, weights["norm"], weights.get("norm_bias"))

    def logits(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return linear(x, weights[self.head_name])

    @property
    def head_name(self) -> str:
        return "embed" if self.config.tied else "head"

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., q|k|v] into three tensors [..., heads, C]. The number of heads on this rank
        follows from the width of `qkv`."""
        heads = qkv.unflatten(-1, (-1, self.config.head_dim))
        num_local = heads.shape[-2]
        num_kv = self.config.num_kv_heads
        kv = max(1, num_local * num_kv // (self.config.num_heads + 2 * num_kv))
        q, k, v = heads.split((num_local - 2 * kv, kv, kv), -2)
        return q, k, v

    def activate(self, inner: Tensor) -> Tensor:
        """Return the input [..., F] of down, from the output of gate_up."""
        if not self.config.gated:
            return ACTIVATIONS[self.config.activation](inner)
        return self.kernels.gated(inner, self.config.activation)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.config.norm == "layer":
            return layers.layer_norm(x, weight, bias, self.config.norm_eps)
        return self.kernels.rms_norm(x, weight, self.config.norm_eps)

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary.of(self.config)

    def rope_tables(self, positions: Tensor, dtype: torch.dtype) -> RopeTables | None:
        """Return the RoPE tables of `positions`, for all blocks; None if blocks do not apply
        RoPE."""
        if self.config.positions == "learned" or not self.applies_rope:
            return None
        return self.rotary.tables(positions, dtype)
