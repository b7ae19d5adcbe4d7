"""Where in a block the scales of a matrix's inputs can be taken in without changing what it
computes.

The inputs of qkv and gate_up come out of a norm, whose weights take the scales in. Those of out are
weighted means of v, so the rows of v do; a key-value head that several heads read has one scale for
all of them. Those of down are, in gated MLPs, activation(gate) up, which is linear in up. A plain
MLP has an activation in between, and then no scales.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.config import ModelConfig

Block = dict[str, Tensor]
"""The parameters of a block by their names in it, in fp32."""


@dataclass(frozen=True)
class Fold:
    """One matrix, the scales that can be taken in, and the block in which they are: its columns
    multiplied, and what makes its inputs divided by them."""

    matrix: str
    foldable: Callable[[Block, Tensor], Tensor]
    divide: Callable[[Block, Tensor], Block]

    def apply(self, block: Block, scales: Tensor) -> Block:
        return block | {self.matrix: block[self.matrix] * scales} | self.divide(block, scales)


def folds(config: ModelConfig, dtype: torch.dtype) -> tuple[Fold, ...]:
    """Those of a model whose norms are stored in `dtype`."""
    q = config.q_size
    kv = config.kv_size
    value_rows = slice(q + kv, q + 2 * kv)
    up_rows = slice(config.ffn_size, 2 * config.ffn_size)
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    found = (
        norm_fold("norm1", "qkv", dtype),
        Fold(
            "out",
            lambda block, scales: scales.view(heads).mean(1, keepdim=True).expand(heads).flatten(),
            lambda block, scales: divided_rows(
                block, "qkv", value_rows, scales.view(heads)[:, 0].flatten()
            ),
        ),
        norm_fold("norm2", "gate_up", dtype),
        Fold(
            "down",
            lambda block, scales: scales,
            lambda block, scales: divided_rows(block, "gate_up", up_rows, scales),
        ),
    )
    return found if config.gated else found[:3]


def norm_fold(norm: str, matrix: str, dtype: torch.dtype) -> Fold:
    """The norm's weights are rounded when they are stored, so scales are those that this leaves of
    them."""

    def foldable(block: Block, scales: Tensor) -> Tensor:
        weight = block[norm]
        left = weight / (weight / scales).to(dtype).float()
        return torch.where(left.isfinite() & (left > 0), left, torch.ones_like(left))

    def divide(block: Block, scales: Tensor) -> Block:
        names = (name for name in (norm, f"{norm}_bias") if name in block)
        return {name: (block[name] / scales).to(dtype).float() for name in names}

    return Fold(matrix, foldable, divide)


def divided_rows(block: Block, name: str, rows: slice, scales: Tensor) -> Block:
    """A matrix and its bias with some of its rows divided by scales, one a row."""
    weight = block[name].clone()
    weight[rows] /= scales[:, None]
    found = {name: weight}
    if f"{name}_bias" in block:
        bias = found[f"{name}_bias"] = block[f"{name}_bias"].clone()
        bias[rows] /= scales
    return found
