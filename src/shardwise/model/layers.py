"""The operations of a decoder block.

Shapes: B batch, T tokens, D model, H heads, K KV heads, C head dim. Where only the last dims matter
the leading ones are free: training passes [B, T, D], serving a flat [tokens, D].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import CausalAttention
from shardwise.precision import Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Names of the dtypes of weights and activations in flags and settings."""


@dataclass(frozen=True)
class RecomputedInput:
    """An input of a linear layer that is cheap to compute, such as a norm: the backward recomputes
    make(*inputs) instead of saving it."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]


class RecomputeLinear(torch.autograd.Function):
    """A linear layer that recomputes its input in the backward. The matmul itself is never
    repeated."""

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
        x, d_inputs = recompute_input(ctx.make, inputs, dy @ weight)
        rows = dy.flatten(0, -2)
        d_bias = rows.sum(0) if ctx.has_bias else None
        return None, rows.t() @ x.flatten(0, -2), d_bias, *d_inputs


def recompute_input(
    make: Callable[..., Tensor], inputs: Sequence[Tensor | None], dx: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return x = make(*inputs) and the gradient of each input, given the gradient dx of x."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        x = make(*leaves)
    grads = iter(torch.autograd.grad(x, [leaf for leaf in leaves if leaf is not None], dx))
    return x.detach(), [None if leaf is None else next(grads) for leaf in leaves]


class AppliedWeight(Protocol):
    """A weight matrix that is not a tensor: quantized, low-rank, or with a deferred gradient."""

    def apply(self, x: Tensor | RecomputedInput) -> Tensor: ...


def linear(
    x: Tensor | RecomputedInput, weight: Tensor | AppliedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return x [..., in] @ weight [out, in]^T + bias [out], for every type of weight."""
    if not isinstance(weight, Tensor):
        y = weight.apply(x)
        return y if bias is None else y + bias
    if isinstance(x, RecomputedInput):
        z: Tensor = RecomputeLinear.apply(x.make, weight, bias, *x.inputs)
        return z
    return F.linear(x, weight, bias)


class AppliedTable(Protocol):
    """An embedding that is not a tensor: quantized, or packed for the matmul of the logits."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def look_up(self, ids: Tensor) -> Tensor: ...


def look_up(ids: Tensor, weight: Tensor | AppliedTable, sparse_grad: bool = False) -> Tensor:
    """Return rows [..., D] of weight [N, D]. With `sparse_grad` the gradient of the weight is a
    sparse tensor of the rows that were looked up."""
    if not isinstance(weight, Tensor):
        return weight.look_up(ids)
    rows: Tensor = EmbeddingLookup.apply(ids, weight, sparse_grad)
    return rows


class EmbeddingLookup(torch.autograd.Function):
    """An embedding lookup whose backward sums the gradients of a row in fp32 and rounds once.

    In bf16 the sum of a frequent token, such as a space that occurs a thousand times, would stop
    growing.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        ctx.sparse_grad = sparse_grad
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        (dy,) = grads
        sorted_ids, order = ids.flatten().sort(stable=True)
        rows, counts = sorted_ids.unique_consecutive(return_counts=True)
        terms = dy.flatten(0, -2)[order].float()
        sums = torch.segment_reduce(terms, "sum", lengths=counts, axis=0, unsafe=True)
        sparse = torch.sparse_coo_tensor(
            rows[None], sums.to(dy.dtype), ctx.shape, is_coalesced=True, check_invariants=False
        )
        return None, sparse if ctx.sparse_grad else sparse.to_dense(), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [..., H, C], k [..., K, C], v [..., K, C]) -> [..., H, C]. It masks as the batch
requires."""


@dataclass(frozen=True)
class Causal:
    """Causal attention within a batch: a token attends to itself and to earlier tokens of its
    document, inside the sliding window of the layer.

    Called with q [B, T, H, C] and k, v [B, T, K, C]. `documents` [B, T] numbers the document of
    each token; None: each sequence is one document.
    """

    config: ModelConfig
    attention: CausalAttention
    documents: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, self.config.window(layer), self.documents)
