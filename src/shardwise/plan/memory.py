"""What one rank holds, row by row, counted from the same parameter table that the run allocates from.

Training holds, for each element, a weight, a gradient and the optimizer's share: in bf16 2 + 2 bytes and 12 for an fp32
master weight and Adam's two moments; in fp32 4 + 4 and 8, since the weight is its own master. ZeRO cuts them over the
data ranks: stage 1 the optimizer, stage 2 the gradients too, stage 3 the weights too (Rajbhandari et al.,
arXiv 1910.02054, figure 1). Each unit of state is flat, padded to a multiple of the ranks that share it, and cut on
its own.

Serving holds weights and, for each token of each request, keys and values.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.layout import Coord, Layout
from shardwise.params import local_shape, model_specs, stage_units, units

Precision = Literal["bf16", "fp32"]

NOT_COUNTED = ("activations", "logits", "buffers", "slack")  # rows that no ledger has yet


@dataclass(frozen=True)
class ElementBytes:
    """Bytes that one element of a parameter costs in each row; its weight is also what a cached key or value costs."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


PRECISIONS: dict[Precision, ElementBytes] = {"bf16": ElementBytes(2, 2, 12), "fp32": ElementBytes(4, 4, 8)}
CUT_ROWS = {
    "none": frozenset[str](),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "parameters"}),
    "fsdp": frozenset({"optimizer", "gradients", "parameters"}),
}


@dataclass(frozen=True)
class Ledger:
    """Rows of bytes on the fullest rank of one pipeline stage."""

    stage: int
    rows: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.rows.values())


def unit_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Elements of each unit of state after the tensor-parallel cut, vocabulary padding included.

    Those of tensor rank 0, which is the fullest: what does not divide goes to the first ranks.
    """
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    return {
        unit: sum(math.prod(local_shape(spec, layout, first)) for spec in specs)
        for unit, specs in units(model_specs(config)).items()
    }


def training_ledgers(config: ModelConfig, layout: Layout, precision: Precision = "bf16") -> tuple[Ledger, ...]:
    """The states of training with AdamW, a ledger for each pipeline stage."""
    sizes, ranks, cut_rows = unit_sizes(config, layout), layout.shard_size, CUT_ROWS[layout.shard]
    each = PRECISIONS[precision]
    ledgers = []
    for stage in range(layout.pp):
        held = sizes.keys() & stage_units(config, layout, stage)
        cut = sum(math.ceil(sizes[unit] / ranks) for unit in held)
        rows = {
            row: (cut if row in cut_rows else cut * ranks) * getattr(each, row)
            for row in ("parameters", "gradients", "optimizer")
        }
        ledgers.append(Ledger(stage, rows | {"kv": 0}))
    return tuple(ledgers)


def serving_ledgers(
    config: ModelConfig, layout: Layout, seq_tokens: int, precision: Precision = "bf16", num_requests: int = 1
) -> tuple[Ledger, ...]:
    """Weights, and the keys and values of `num_requests` requests of `seq_tokens` tokens; data ranks are replicas."""
    sizes, each = unit_sizes(config, layout), PRECISIONS[precision].parameters
    ledgers = []
    for stage in range(layout.pp):
        held = sizes.keys() & stage_units(config, layout, stage)
        weights = sum(sizes[unit] for unit in held)
        blocks = [int(unit.split(".")[1]) for unit in held if unit.startswith("blocks.")]
        cached = sum(kv_elements(config, layout, block, seq_tokens) for block in blocks) * num_requests
        rows = {"parameters": weights * each, "gradients": 0, "optimizer": 0, "kv": cached * each}
        ledgers.append(Ledger(stage, rows))
    return tuple(ledgers)


def kv_elements(config: ModelConfig, layout: Layout, block: int, seq_tokens: int) -> int:
    """Elements that one block caches for one sequence: a window bounds its tokens, and fewer kv heads than tensor
    ranks are replicated."""
    window = config.sliding_window if block in config.windowed_layers else None
    tokens = min(seq_tokens, window or seq_tokens)
    heads = math.ceil(config.num_kv_heads / layout.tp)
    return 2 * heads * config.head_dim * tokens
