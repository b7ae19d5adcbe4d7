"""Folding of AWQ scales: what produces the inputs of a matrix is divided by the scales that
multiply its columns, so that a block computes the same.

`block.BLOCK` has the target of each matrix. The inputs of qkv and gate_up come from a norm, whose
weights absorb the scales. Those of out are weighted means of v, so the rows of v do; query heads
that share a KV head share its scales. Those of down are, in a gated MLP, activation(gate) * up,
which is linear in up. An MLP without gate has an activation in between, and no scales.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.block import BLOCK, FoldTarget, is_set, part_rows
from shardwise.config import ModelConfig

Block = dict[str, Tensor]
"""The parameters of a block by their names in it, in fp32."""


@dataclass(frozen=True)
class Fold:
    """The fold of the scales of one matrix.

    Attributes:
        config: the model.
        matrix: the name of the matrix, whose columns are multiplied.
        target: what is divided.
        dtype: the dtype in which norms are stored.
    """

    config: ModelConfig
    matrix: str
    target: FoldTarget
    dtype: torch.dtype

    def foldable(self, block: Block, scales: Tensor) -> Tensor:
        """Return the scales [K] nearest to the given ones that fold without loss.

        Of a norm these are what the rounding of its weights leaves; of v, the mean over the query
        heads that share a KV head.
        """
        if self.rows is None:
            weight = block[self.target.param]
            exact = weight / (weight / scales).to(self.dtype).float()
            return torch.where(exact.isfinite() & (exact > 0), exact, torch.ones_like(exact))
        shared = self.shared(scales, self.rows)
        return shared.mean(1, keepdim=True).expand(shared.shape).flatten()

    def apply(self, block: Block, scales: Tensor) -> Block:
        """Return the block with the columns of the matrix multiplied and the target divided by
        foldable scales."""
        return block | {self.matrix: block[self.matrix] * scales} | self.divided(block, scales)

    def divided(self, block: Block, scales: Tensor) -> Block:
        """Return the target and its bias, divided by the scales."""
        name = self.target.param
        names = [each for each in (name, f"{name}_bias") if each in block]
        if self.rows is None:
            return {each: (block[each] / scales).to(self.dtype).float() for each in names}
        row_scales = self.shared(scales, self.rows)[:, 0].flatten()
        result = {each: block[each].clone() for each in names}
        for weight in result.values():
            weight[self.rows] /= row_scales.view(-1, *[1] * (weight.dim() - 1))
        return result

    @property
    def rows(self) -> slice | None:
        """The rows of the target that are divided; None for a norm."""
        if self.target.part is None:
            return None
        return part_rows(self.config, self.target.param, self.target.part)

    def shared(self, scales: Tensor, rows: slice) -> Tensor:
        """Return scales [K] as [heads of the target, query heads that share them, head dim]."""
        group = len(scales) // (rows.stop - rows.start)
        head_dim = self.config.head_dim if group > 1 else 1
        return scales.view(-1, group, head_dim)


def folds(config: ModelConfig, dtype: torch.dtype) -> tuple[Fold, ...]:
    """Return the folds of a block in the order of the model; norms are stored in `dtype`."""
    targets = ((param.name, param.fold) for param in BLOCK)
    return tuple(
        Fold(config, matrix, target, dtype)
        for matrix, target in targets
        if target is not None and is_set(config, target.flag)
    )
