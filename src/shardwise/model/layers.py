"""The operations a decoder block is made of. Shapes: B batch, T tokens, D model, H heads, K kv
heads, C head dim; leading dims are free where only the last matter, so that training passes [B, T,
D] and serving a flat [tokens, D]."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import ModelConfig, RopeScaling
from shardwise.kernels.interface import CausalAttention, RopeTables
from shardwise.precision import Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""What a user calls the precision of weights and activations."""


@dataclass(frozen=True)
class Light:
    """What costs little to make, as a norm does, and so is made again in the backward instead of
    being kept."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]


class LightLinear(torch.autograd.Function):
    """A linear of something light. The product itself is never repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[..., Tensor],
        weight: Tensor,
        bias: Tensor | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, *inputs)
        ctx.make = make
        ctx.has_bias = bias is not None
        return F.linear(make(*inputs), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        (dy,) = grads
        x, d_inputs = made_again(ctx.make, inputs, dy @ weight)
        rows = dy.flatten(0, -2)
        d_bias = rows.sum(0) if ctx.has_bias else None
        return None, rows.t() @ x.flatten(0, -2), d_bias, *d_inputs


def made_again(
    make: Callable[..., Tensor], inputs: Sequence[Tensor | None], dx: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """x = make(*inputs), and what its gradient dx means for each of the inputs."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        x = make(*leaves)
    found = iter(torch.autograd.grad(x, [leaf for leaf in leaves if leaf is not None], dx))
    return x.detach(), [None if leaf is None else next(found) for leaf in leaves]


class AppliedWeight(Protocol):
    """What stands in for a weight matrix that is not a plain tensor: quantized, low-rank or
    deferred."""

    def apply(self, x: Tensor | Light) -> Tensor: ...


def linear(x: Tensor | Light, weight: Tensor | AppliedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in], plus bias [out]: the one door for every kind of
    weight."""
    if not isinstance(weight, Tensor):
        y = weight.apply(x)
        return y if bias is None else y + bias
    if isinstance(x, Light):
        z: Tensor = LightLinear.apply(x.make, weight, bias, *x.inputs)
        return z
    return F.linear(x, weight, bias)


class AppliedTable(Protocol):
    """What stands in for an embedding that is not a plain tensor: a quantized one, or one packed
    for its products."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def look_up(self, ids: Tensor) -> Tensor: ...


def look_up(ids: Tensor, weight: Tensor | AppliedTable, sparse_grad: bool = False) -> Tensor:
    """Rows [..., D] of weight [N, D]. With `sparse_grad` its gradient holds those rows alone, not
    all of them."""
    if not isinstance(weight, Tensor):
        return weight.look_up(ids)
    rows: Tensor = LookUp.apply(ids, weight, sparse_grad)
    return rows


class LookUp(torch.autograd.Function):
    """Adds up the gradients of a row in fp32 and rounds them once. A row that is looked up a
    thousand times, as that of a space is, would stop growing in bf16."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        ctx.sparse_grad = sparse_grad
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        ordered, order = ids.flatten().sort(stable=True)
        rows, counts = ordered.unique_consecutive(return_counts=True)
        terms = grads[0].flatten(0, -2)[order].float()
        sums = torch.segment_reduce(terms, "sum", lengths=counts, axis=0, unsafe=True).to(
            grads[0].dtype
        )
        sparse = torch.sparse_coo_tensor(
            rows[None], sums, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return None, sparse if ctx.sparse_grad else sparse.to_dense(), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each pair of elements, [C/2] in fp32 (Su et al. 2021), stretched for
    long contexts."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = (
        scaling.original_max_positions * frequencies / (2 * math.pi)
    )  # of each pair over the original context
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(
        0, 1
    )  # 1: many turns, as it was; 0: less than one, stretched
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> RopeTables:
    """Return cosines and sines of the angles of `positions` [..., T]: [..., T, 1, C/2]."""
    angles = positions[..., None, None].float() * frequencies
    return RopeTables(angles.cos().to(dtype), angles.sin().to(dtype))


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [..., H, C], k [..., K, C], v [..., K, C]) -> [..., H, C]. It alone knows which
tokens see which."""


@dataclass(frozen=True)
class Causal:
    """Attention within the given tokens: each sees itself and what came before it, inside its
    document and window.

    Called with q [B, T, H, C] and k, v [B, T, K, C]. `documents` [B, T] numbers the document of
    each token, so that packed ones do not see each other.
    """

    config: ModelConfig
    attention: CausalAttention
    documents: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, self.config.window(layer), self.documents)
