"""Cross entropy of a few rows of logits, and its gradient in their place: the softmax, minus one at
the target.

Shapes: R rows, V columns: the whole vocabulary, or this rank's block of it.
"""

import math

from torch import Tensor, cat

from shardwise.kernels.interface import Targets


def cross_entropy_grad_(logits: Tensor, targets: Targets, with_gradient: bool) -> Tensor:
    """Return the summed loss of logits [R, V], in fp32, and overwrite them.

    `with_gradient` they become their gradient; otherwise their contents are undefined. Raises the
    error of `gather` for a target that no column has.
    """
    logits[:, targets.num_real :] = -math.inf
    logits_fp32 = logits.float()
    row_max = targets.max_over_ranks(logits_fp32.amax(-1, keepdim=True))
    target_logit = (logits_fp32.gather(1, targets.columns) - row_max).where(targets.is_local, 0)
    exponentials = logits_fp32.sub_(row_max).exp_()
    local = cat((exponentials.sum(-1, keepdim=True), target_logit), 1)
    sums, target_logit = targets.sum_over_ranks(local).split(1, 1)
    if with_gradient:
        scale = targets.has_target / sums
        gradient = exponentials.mul_(scale)
        # Computed in fp32 at the target: bf16 loses 1 - p of a token that is almost certain.
        at_target = (target_logit.exp() - sums) * scale
        at_target = at_target.where(targets.is_local, gradient.gather(1, targets.columns))
        gradient.scatter_(1, targets.columns, at_target)
        # The only rounding. `out=logits` and scatter_ in bf16 would make fp32 copies.
        logits.copy_(gradient)
    return summed_loss(sums, target_logit, targets)


def summed_loss(sums: Tensor, target_logit: Tensor, targets: Targets) -> Tensor:
    """Return the loss over all rows, from each row's sum of exponentials and target logit, both
    relative to its largest logit."""
    return ((sums.log() - target_logit) * targets.has_target).sum()
