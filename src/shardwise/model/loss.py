"""Cross entropy of the head without ever holding its logits: they are the largest tensor of a
training step (one row is the vocabulary), so they live a few rows at a time, while the cache still
holds them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.interface import CrossEntropyGrad, Targets
from shardwise.model.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, chunks
from shardwise.model.seams import UNCUT, Seams

IGNORED = -100
"""Target of a token that has none: it takes no part in the loss."""


def cross_entropy_naive(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The definition: the sum of -log softmax(x weight^T)[target] over tokens with a target, in
    fp32."""
    logits = F.linear(x, weight).float()
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cross_entropy_grad: CrossEntropyGrad,
    seams: Seams = UNCUT,
    vocab_size: int | None = None,
) -> Tensor:
    """The same sum over x [..., D], weight [V, D], targets [...], with both gradients worked out on
    the way forward.

    The gradient of the logits, softmax less one at the target, needs nothing that comes later but a
    scale. So each chunk of rows goes through product, softmax and its two gradient products and is
    forgotten (Liger kernels do the same). Holds at most PRODUCT_BYTES of logits in the dtype of x,
    and SOFTMAX_BYTES of them in fp32 if `cross_entropy_grad` needs that.

    With `seams` the weight is this rank's block of the vocabulary, of `vocab_size` rows in all,
    beyond which there is padding. Logits are never gathered: ranks tell each other two numbers a
    token, the softmax's maximum apart.
    """
    x = seams.enter(x)
    if (
        not torch.is_grad_enabled()
    ):  # a Function is told that its inputs require gradients even then
        x = x.detach()
        weight = weight.detach()
    block = Block(seams, weight.shape[0], vocab_size or weight.shape[0])
    total: Tensor = LinearCrossEntropy.apply(
        x.flatten(0, -2), weight, targets.flatten(), block, cross_entropy_grad
    )
    return total


@dataclass(frozen=True)
class Block:
    """Which ids of the vocabulary this rank holds: `size` from `first` on, as far as there are
    `vocab_size`."""

    seams: Seams
    size: int
    vocab_size: int

    @property
    def first(self) -> int:
        return self.seams.rank * self.size

    @property
    def num_real(self) -> int:
        return min(max(self.vocab_size - self.first, 0), self.size)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        block: Block,
        cross_entropy_grad: CrossEntropyGrad,
    ) -> Tensor:
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if wants_dx else None
        dw = (torch.empty_like if len(x) else torch.zeros_like)(weight) if wants_dw else None
        total = x.new_zeros((), dtype=torch.float32)
        vocab = weight.shape[0]
        pieces = list(chunks(len(x), PRODUCT_BYTES // (vocab * x.element_size())))
        space = x.new_empty(
            pieces[0].stop if pieces else 0, vocab
        )  # of the first piece, and no other is longer
        for rows in pieces:
            logits = space[: rows.stop - rows.start]
            for inner in chunks(len(logits), SOFTMAX_BYTES // (vocab * 4)):
                part = logits[inner]
                wanted = targets[rows][inner]
                torch.mm(x[rows][inner], weight.t(), out=part)
                total += cross_entropy_grad(
                    part, local_targets(wanted, block), wants_dx or wants_dw
                )
            if dx is not None:
                torch.mm(logits, weight, out=dx[rows])
            if dw is not None:
                torch.addmm(dw, logits.t(), x[rows], beta=int(rows.start > 0), out=dw)
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(
        ctx: Any, *scales: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, dw = ctx.saved_tensors
        (scale,) = scales
        return (
            None if dx is None else dx.mul_(scale),
            None if dw is None else dw.mul_(scale),
            None,
            None,
            None,
        )


def local_targets(targets: Tensor, block: Block) -> Targets:
    """Return the targets [rows] as columns of this rank."""
    has_target = (targets != IGNORED)[:, None]
    local = targets[:, None] - block.first
    is_here = has_target  # of a whole vocabulary: a target outside it is an error of `gather`
    if block.size < block.vocab_size:
        is_here = has_target & (local >= 0) & (local < block.size)
    return Targets(
        local.where(is_here, 0),
        is_here,
        has_target,
        block.num_real,
        block.seams.highest,
        block.seams.total,
    )
