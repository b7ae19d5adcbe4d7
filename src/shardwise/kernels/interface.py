"""Types of the operations that a model calls in training and in serving.

Implementations are in `reference/` (the definitions, in torch), `native/` (C++ for CPUs) and
`triton/` (GPUs). `registry.py` and `training_registry.py` choose one; `serving_interface.py` adds
the operations that only serving needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class RopeTables(NamedTuple):
    """Cosines and sines of the RoPE angles of some tokens, each [..., T, 1, C/2] in the dtype of
    the tensors that they rotate."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class ModelKernels:
    """Operations of a decoder block, in training and in serving.

    Attributes:
        name: The name that a run reports, such as `native avx2`.
        rms_norm: (x [..., D], weight [D], eps) -> [..., D].
        gated: (inner [..., 2F], activation) -> [..., F]: activation(gate) * up.
        apply_rope: (x [..., T, heads, C], cos, sin) -> x rotated by its positions.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated: Callable[[Tensor, str], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor]


ReduceOverRanks = Callable[[Tensor], Tensor]
"""A reduction over the ranks that hold the vocabulary's blocks, in place."""


@dataclass(frozen=True)
class Targets:
    """The targets of R rows of logits, as columns of this rank's block of the vocabulary.

    Attributes:
        columns: [R, 1] int64, the target's column; 0 where the target is not local.
        is_local: [R, 1], true where the target is in this rank's block.
        has_target: [R, 1], false where the row takes no part in the loss.
        num_real: Columns from this one on are padding.
        max_over_ranks: The maximum over the ranks that share the vocabulary.
        sum_over_ranks: The sum over them.
    """

    columns: Tensor
    is_local: Tensor
    has_target: Tensor
    num_real: int
    max_over_ranks: ReduceOverRanks
    sum_over_ranks: ReduceOverRanks


CausalAttention = Callable[[Tensor, Tensor, Tensor, int | None, Tensor | None], Tensor]
"""(q [B, T, H, C], k and v [B, T, K, C], window, documents [B, T]) -> [B, T, H, C]. The definition
is `reference.attention.attention_naive`."""

CrossEntropyGrad = Callable[[Tensor, Targets, bool], Tensor]
"""(logits [R, V], targets, with_gradient) -> the summed loss in fp32. With the flag the logits
become their gradient, in place. The definition is `reference.cross_entropy.cross_entropy_grad_`."""


@dataclass(frozen=True)
class TrainingKernels(ModelKernels):
    """Operations of training. Each saves for its backward what the reference saves, so the
    planner's activation formulas (`plan/activations.py`) hold for all of them."""

    attention: CausalAttention
    cross_entropy_grad: CrossEntropyGrad
