"""From a few rows of logits to their loss and, in their place, to their gradient: the softmax, less
one at the target.

Shapes: R rows, V columns: all of the vocabulary, or this rank's block of it.
"""

import math

from torch import Tensor, cat

from shardwise.kernels.interface import Aims


def softmax_less_one_(logits: Tensor, aims: Aims, with_gradient: bool) -> Tensor:
    """Return the summed loss of logits [R, V], in fp32, and, `with_gradient`, turn them in place
    into their gradient. What is in them otherwise means nothing afterwards. Raises as `gather` does
    for a target that no column has."""
    logits[:, aims.num_real :] = -math.inf
    wide = logits.float()
    highest = aims.highest(wide.amax(-1, keepdim=True))
    aimed = (wide.gather(1, aims.at) - highest).where(aims.is_here, 0)
    exponentials = wide.sub_(highest).exp_()
    sums, aimed = aims.total(cat((exponentials.sum(-1, keepdim=True), aimed), 1)).split(1, 1)
    if with_gradient:
        share = aims.has_target / sums
        gradient = exponentials.mul_(share)
        # at the target worked out in fp32: 1 - p of a token that is all but certain is lost in bf16
        at_target = ((aimed.exp() - sums) * share).where(aims.is_here, gradient.gather(1, aims.at))
        gradient.scatter_(1, aims.at, at_target)
        logits.copy_(
            gradient
        )  # the one step that rounds: `out=logits` and scatter_ in bf16 make fp32 copies
    return loss_of(sums, aimed, aims)


def loss_of(sums: Tensor, aimed: Tensor, aims: Aims) -> Tensor:
    """The summed loss of rows, from the sums of their exponentials and the logits they aim at, both
    below the highest logit of the row."""
    return ((sums.log() - aimed) * aims.has_target).sum()
