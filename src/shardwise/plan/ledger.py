"""The ledger: bytes that one rank holds, row by row, counted from the parameter specs that the run
allocates from.

Training holds a weight, a gradient and optimizer states per parameter: in bf16 2 + 2 bytes, and 12
for an fp32 master weight and the two moments of Adam; in fp32 4 + 4 and 8, since the weight is its
own master. ZeRO shards them over the data ranks: stage 1 the optimizer states, stage 2 also the
gradients, stage 3 also the weights (Rajbhandari et al., arXiv 1910.02054, figure 1). Each unit of
state is flat, padded to a multiple of the data ranks, and sharded on its own; FSDP shards each
parameter by rows instead. These rows are held between steps. Within a step, the peaks of what a
micro-batch saves for its backward (`activations` and `logits`, see `activations.py`) and of
temporary buffers (`buffers`, see `buffers.py`) come on top.

Serving holds weights and, for each cached token of each request, keys and values.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.kv_pages import cached_tokens
from shardwise.layout import Coord, Layout, StateAxes
from shardwise.params import ParamSpec, model_specs, rank_layers, stage_units, unit_axes, units
from shardwise.plan.activations import MicroBatchShape, activation_bytes, logits_bytes
from shardwise.plan.buffers import buffer_bytes
from shardwise.precision import GradientPrecision, Precision, accumulates_in_fp32
from shardwise.quant.kv_dtype import KvDtype, vector_bytes
from shardwise.quant.scheme import StorageFormats, weight_bytes
from shardwise.shards import local_shape

Mode = Literal["train", "serve"]

NOT_QUANTIZED: StorageFormats = {}

STATES = ("parameters", "gradients", "optimizer")
NOT_COUNTED: dict[Mode, tuple[str, ...]] = {
    "train": ("slack",),
    "serve": ("activations", "logits", "slack"),
}
"""Rows that are not counted. Slack is the workspace of operations, and what an allocator wastes."""


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per parameter in each row. An element of the KV cache has the bytes of a weight, unless
    it is quantized."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


BYTES_PER_PARAMETER: dict[Precision, ElementBytes] = {
    "bf16": ElementBytes(2, 2, 12),
    "fp32": ElementBytes(4, 4, 8),
}


@dataclass(frozen=True)
class Ledger:
    """Bytes by row on the rank of one pipeline stage that holds most."""

    stage: int
    rows: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.rows.values())

    @property
    def state_bytes(self) -> int:
        """Bytes that training holds between steps."""
        return sum(self.rows[row] for row in STATES)


def element_bytes(
    layout: Layout, precision: Precision, gradients: GradientPrecision = "same"
) -> ElementBytes:
    """Return the bytes per parameter in training. FSDP has gradients in the dtype of the parameters
    that it shards, so for fp32 gradients of bf16 weights it shards the master weights."""
    each = BYTES_PER_PARAMETER[precision]
    if not accumulates_in_fp32(gradients, layout.microbatches):
        return each
    return BYTES_PER_PARAMETER["fp32"] if layout.shard == "fsdp" else replace(each, gradients=4)


def computed_bytes(precision: Precision) -> int:
    """Return the bytes of an element of a weight or activation in compute."""
    return BYTES_PER_PARAMETER[precision].parameters


@dataclass(frozen=True)
class UnitShapes:
    """The parameters of a unit of state on the fullest of the ranks that shard them: local shapes,
    vocabulary padding included, and the axes over which ZeRO shards and replicates the unit."""

    shapes: tuple[tuple[int, ...], ...]
    axes: StateAxes

    @property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def shard_elements(self, layout: Layout) -> int:
        """Return the elements on one of the `shard` ranks, padding included; with FSDP on the
        first."""
        n = layout.size(self.axes.shard)
        if layout.shard != "fsdp":
            return layout.padded(self.num_elements, self.axes) // n
        return sum(math.ceil(rows / n) * math.prod(columns) for rows, *columns in self.shapes)

    def state_bytes(self, layout: Layout, each: ElementBytes) -> dict[str, int]:
        """Return the bytes that a rank holds of the unit from step to step, by row."""
        shard = self.shard_elements(layout)
        whole = shard * layout.size(self.axes.shard)
        return {
            row: (shard if layout.shards(row) else whole) * getattr(each, row) for row in STATES
        }


def unit_shapes(specs: tuple[ParamSpec, ...], layout: Layout) -> UnitShapes:
    """Return the shapes of a unit on the first rank, which is the fullest: what does not divide
    goes to the first ranks."""
    first = layout.coord(0)
    shapes = tuple(local_shape(spec, layout, first) for spec in specs)
    return UnitShapes(shapes, unit_axes(specs))


@lru_cache(maxsize=16)
def model_shapes(config: ModelConfig, tp: int) -> dict[str, UnitShapes]:
    """Return the shapes of each unit of a model, which depend on `tp` alone of a layout."""
    layout = Layout(tp=tp)
    return {unit: unit_shapes(specs, layout) for unit, specs in units(model_specs(config)).items()}


def unit_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Return the elements of each unit of state on a tensor rank, before ZeRO shards it."""
    return {unit: each.num_elements for unit, each in model_shapes(config, layout.tp).items()}


def shard_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Return the elements of each unit on one of the `shard` ranks that it is sharded over."""
    return {
        unit: each.shard_elements(layout) for unit, each in model_shapes(config, layout.tp).items()
    }


@dataclass(frozen=True)
class TrainingMemory:
    """Memory of training with AdamW in one layout.

    Attributes:
        microbatch: without it, the rows that depend on its size are missing
        offload: whether the optimizer states are in host memory
    """

    config: ModelConfig
    layout: Layout
    precision: Precision = "bf16"
    gradients: GradientPrecision = "same"
    microbatch: MicroBatchShape | None = None
    offload: bool = False

    def saved_rows(self, stage: int) -> dict[str, int]:
        """Return the rows of a stage except its buffers, which take longest to compute."""
        each = element_bytes(self.layout, self.precision, self.gradients)
        shapes = model_shapes(self.config, self.layout.tp)
        rows = dict.fromkeys(STATES, 0)
        for unit in stage_units(self.config, self.layout, stage):
            for row, num_bytes in shapes[unit].state_bytes(self.layout, each).items():
                rows[row] += num_bytes
        if self.offload:
            rows["optimizer"] = 0
        if self.microbatch is not None:
            given = (self.config, self.layout, stage, self.microbatch)
            computed = computed_bytes(self.precision)
            rows["activations"] = activation_bytes(*given, computed)
            is_fsdp = self.layout.shard == "fsdp"  # which widens gradients as it sends them
            rows["logits"] = logits_bytes(*given, computed, computed if is_fsdp else each.gradients)
        return rows

    def ledger(self, stage: int) -> Ledger:
        """Return the ledger of a stage: states, and the peaks of a step."""
        layout = self.layout
        shapes = model_shapes(self.config, layout.tp)
        held = stage_units(self.config, layout, stage)
        whole = {unit: shapes[unit].shard_elements(layout) * layout.shard_size for unit in held}
        grad_bytes = element_bytes(layout, self.precision, self.gradients).gradients
        weight_bytes = computed_bytes(self.precision)
        buffers = buffer_bytes(self.config, layout, stage, whole, weight_bytes, grad_bytes)
        return Ledger(stage, self.saved_rows(stage) | {"buffers": buffers, "kv": 0})

    def fits_within(self, limit_bytes: int) -> bool:
        """Return whether no stage holds more than `limit_bytes`."""
        stages = range(self.layout.pp)
        return all(sum(self.saved_rows(stage).values()) <= limit_bytes for stage in stages) and all(
            self.ledger(stage).total_bytes <= limit_bytes for stage in stages
        )


def training_ledgers(
    config: ModelConfig,
    layout: Layout,
    precision: Precision = "bf16",
    gradients: GradientPrecision = "same",
    microbatch: MicroBatchShape | None = None,
    offload: bool = False,
) -> tuple[Ledger, ...]:
    """Return one ledger per pipeline stage for training; see `TrainingMemory`."""
    memory = TrainingMemory(config, layout, precision, gradients, microbatch, offload)
    return tuple(memory.ledger(stage) for stage in range(layout.pp))


def serving_ledgers(
    config: ModelConfig,
    layout: Layout,
    seq_tokens: int,
    precision: Precision = "bf16",
    num_requests: int = 1,
    formats: StorageFormats = NOT_QUANTIZED,
    kv_dtype: KvDtype = "auto",
) -> tuple[Ledger, ...]:
    """Return one ledger per pipeline stage for serving: weights, and the KV cache of `num_requests`
    requests of `seq_tokens` tokens. Data ranks are replicas; `formats` are the storage formats of
    quantized parameters."""
    each = BYTES_PER_PARAMETER[precision].parameters
    sizes = unit_bytes(config, layout.tp, each, formats)
    vector = vector_bytes(kv_dtype, each).of(config.head_dim)
    ledgers = []
    for stage in range(layout.pp):
        held = sizes.keys() & stage_units(config, layout, stage)
        weights = sum(sizes[unit] for unit in held)
        blocks = rank_layers(config, layout, stage)
        cached = len(blocks) * kv_vectors(config, layout, seq_tokens) * num_requests
        rows = {
            "parameters": weights,
            "gradients": 0,
            "optimizer": 0,
            "buffers": 0,
            "kv": cached * vector,
        }
        ledgers.append(Ledger(stage, rows))
    return tuple(ledgers)


def unit_bytes(
    config: ModelConfig, tp: int, element_bytes: int, formats: StorageFormats
) -> dict[str, int]:
    """Return the bytes of the weights of each unit on tensor rank 0, which holds most."""
    layout = Layout(tp=tp)
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    if not formats:
        return {unit: size * element_bytes for unit, size in unit_sizes(config, layout).items()}
    return {
        unit: sum(weight_bytes(spec, layout, first, formats, element_bytes) for spec in specs)
        for unit, specs in units(model_specs(config)).items()
    }


def kv_vectors(config: ModelConfig, layout: Layout, seq_tokens: int) -> int:
    """Return how many vectors, keys and values, a block caches for one sequence. A sliding window
    of all layers limits its tokens, and fewer KV heads than tensor ranks are replicated."""
    tokens = cached_tokens(seq_tokens, config.kv_window)
    heads = math.ceil(config.num_kv_heads / layout.tp)
    return 2 * heads * tokens
