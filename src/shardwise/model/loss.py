"""Cross entropy of the output projection that never holds all logits.

Logits are the largest tensor of a training step (each row has the size of the vocabulary), so they
are computed and consumed a few rows at a time, while they are still in the cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, chunks
from shardwise.kernels.interface import CrossEntropyGrad, Targets
from shardwise.model.seams import UNSHARDED, Seams

IGNORE_INDEX = -100
"""The target of a token that does not count in the loss."""


def cross_entropy_naive(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the definition: the sum of -log softmax(x weight^T)[target] over the tokens that have
    a target, in fp32."""
    logits = F.linear(x, weight).float()
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cross_entropy_grad: CrossEntropyGrad,
    seams: Seams = UNSHARDED,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the same sum for x [..., D], weight [V, D] and targets [...], with both gradients
    computed in the forward.

    The gradient of the logits is softmax minus one at the target, times a scale, which is the only
    part that the backward adds. So each chunk of rows goes through the matmul, the softmax and the
    two matmuls of the gradients, and is then dropped, as in the Liger kernels. At most
    PRODUCT_BYTES of logits exist at once in the dtype of x, and SOFTMAX_BYTES in fp32 if
    `cross_entropy_grad` needs them. The gradient of the weight is summed over chunks in the
    weight's `grad_dtype`, and returned in it.

    With `seams`, `weight` is this rank's shard of a vocabulary of `vocab_size` rows, followed by
    padding. Logits are never gathered: ranks exchange the maximum and two sums per token.
    """
    x = seams.enter(x)
    if not torch.is_grad_enabled():
        # needs_input_grad of a Function does not depend on no_grad
        x = x.detach()
        weight = weight.detach()
    shard = VocabShard(seams, weight.shape[0], vocab_size or weight.shape[0])
    grad_dtype = (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
    total: Tensor = LinearCrossEntropy.apply(
        x.flatten(0, -2), weight, targets.flatten(), shard, cross_entropy_grad, grad_dtype
    )
    return total


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary on this rank: `size` rows from `first` on. Rows beyond
    `vocab_size` are padding."""

    seams: Seams
    size: int
    vocab_size: int

    @property
    def first(self) -> int:
        return self.seams.vocab_rank * self.size

    @property
    def num_real(self) -> int:
        """The number of rows that are not padding."""
        return min(max(self.vocab_size - self.first, 0), self.size)


class LinearCrossEntropy(torch.autograd.Function):
    """The output projection and its cross entropy, with the gradients of x and of the weight
    computed in the forward and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        cross_entropy_grad: CrossEntropyGrad,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_dx else None
        new = torch.empty_like if len(x) else torch.zeros_like
        dw = new(weight, dtype=grad_dtype) if needs_dw else None
        total = x.new_zeros((), dtype=torch.float32)
        vocab = weight.shape[0]
        row_chunks = list(chunks(len(x), PRODUCT_BYTES // (vocab * x.element_size())))
        longest = row_chunks[0].stop if row_chunks else 0  # the first
        buffer = x.new_empty(longest, vocab)
        for rows in row_chunks:
            logits = buffer[: rows.stop - rows.start]
            for inner in chunks(len(logits), SOFTMAX_BYTES // (vocab * 4)):
                part = logits[inner]
                torch.mm(x[rows][inner], weight.t(), out=part)
                part_targets = local_targets(targets[rows][inner], shard)
                total += cross_entropy_grad(part, part_targets, needs_dx or needs_dw)
            if dx is not None:
                torch.mm(logits, weight, out=dx[rows])
            if dw is not None:
                add_product(dw, logits, x[rows], is_first=rows.start == 0)
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(
        ctx: Any, *scales: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        dx, dw = ctx.saved_tensors
        (scale,) = scales
        dx = None if dx is None else dx.mul_(scale)
        dw = None if dw is None else dw.mul_(scale)
        return dx, dw, None, None, None, None


def add_product(dw: Tensor, dlogits: Tensor, x: Tensor, is_first: bool) -> None:
    """Add dlogits^T x, of dlogits [rows, V] and x [rows, D], to dw [V, D], which the first product
    overwrites.

    For a wider dw than the factors, CPUs multiply in its dtype, a few columns of dlogits at a time.
    GPUs, whose fp32 products are many times slower, round each product before they add it.
    """
    beta = int(not is_first)
    if dw.dtype == x.dtype:
        torch.addmm(dw, dlogits.t(), x, beta=beta, out=dw)
        return
    on_cpu = dw.device.type == "cpu"
    factor = x.to(dw.dtype) if on_cpu else x
    for columns in chunks(len(dw), SOFTMAX_BYTES // (len(x) * dw.element_size())):
        part = dlogits[:, columns].t()
        if on_cpu:
            torch.addmm(dw[columns], part.to(dw.dtype), factor, beta=beta, out=dw[columns])
        elif is_first:
            dw[columns].copy_(part @ factor)
        else:
            dw[columns].add_(part @ factor)


def local_targets(targets: Tensor, shard: VocabShard) -> Targets:
    """Return `targets` [rows] as columns of this rank's shard of the logits."""
    has_target = (targets != IGNORE_INDEX)[:, None]
    local = targets[:, None] - shard.first
    is_here = has_target  # with the whole vocabulary, `gather` raises for a target outside it
    if shard.size < shard.vocab_size:
        is_here = has_target & (local >= 0) & (local < shard.size)
    column = local.where(is_here, 0)
    return Targets(column, is_here, has_target, shard.num_real, shard.seams.max, shard.seams.sum)
