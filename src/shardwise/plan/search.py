"""The layouts that a plan compares, and the memory and traffic of each.

A `Job` describes what runs on which GPU. `Job.candidate` computes for a layout its memory (states,
activations and buffers of training, weights and KV cache of serving) and the bytes that its ranks
send each other. `proposal.py` searches for what to change where nothing fits.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from shardwise.config import ModelConfig
from shardwise.formats.storage_formats import check_formats
from shardwise.hardware import GPUS_PER_NODE, MARGIN, Device
from shardwise.layout import MAX_SIZE, Layout, Recompute, Shard
from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.ledger import Ledger, Mode, TrainingMemory, serving_ledgers
from shardwise.plan.traffic import CommBytes, comm_bytes, unpriced
from shardwise.precision import GradientPrecision, Precision
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import StorageFormats

ZERO_STAGES: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Candidate:
    """One layout, and its memory on the rank of each stage that holds most, against the limit of
    the GPU.

    Attributes:
        comm_bytes: the bytes that a rank sends in a training step, by axis
        replicas: servers of this layout, each with its own copy of the model
    """

    layout: Layout
    limit_bytes: int
    ledger: tuple[Ledger, ...]
    comm_bytes: CommBytes
    replicas: int = 1

    @property
    def peak_bytes(self) -> int:
        return max(stage.total_bytes for stage in self.ledger)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def max_concurrency(self, limit_bytes: int) -> int:
        """Return how many of the planned requests a replica holds within `limit_bytes`, at least
        one if it fits at all."""
        (rank,) = self.ledger
        per_request = rank.rows["kv"]
        left = limit_bytes - (rank.total_bytes - per_request)
        return max(int(self.fits), left // per_request)

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "replicas": self.replicas,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "ledger": [{"stage": stage.stage, "rows": stage.rows} for stage in self.ledger],
            "comm_bytes": self.comm_bytes,
        }


@dataclass(frozen=True)
class Job:
    """A model in training or in serving, on GPUs of one kind.

    Attributes:
        seq_tokens: tokens per sequence in training, per request in serving
        num_sequences: sequences per micro-batch in training
        recompute: recompute of the layouts that training searches
        quant, formats: quantization in serving, by name and as storage formats of the parameters
        stored: storage formats in the files of the model
        kv_dtype: dtype of the KV cache in serving
        gradients: dtype of the gradients in training
        offload: whether training keeps optimizer states in host memory
        margin: share of the GPU's memory that proposals leave free
        global_batch: sequences of a training step, if they are given
    """

    mode: Mode
    name: str
    config: ModelConfig
    device: Device
    precision: Precision
    seq_tokens: int
    num_sequences: int = 1
    recompute: Recompute = "none"
    quant: str | None = None
    formats: StorageFormats = field(default_factory=dict)
    stored: StorageFormats = field(default_factory=dict)
    kv_dtype: KvDtype = "auto"
    gradients: GradientPrecision = "auto"
    offload: bool = False
    margin: float = MARGIN
    gpus_per_node: int = GPUS_PER_NODE
    global_batch: int | None = None

    def allows(self, layout: Layout) -> bool:
        """Return whether a layout can shard the model, including its quantization groups, and the
        global batch."""
        if layout.problems(self.config):
            return False
        if self.global_batch and self.global_batch % (layout.dp * layout.microbatches):
            return False
        try:
            check_formats(self.config, self.formats, layout)
        except ValueError:
            return False
        return True

    @property
    def limit_bytes(self) -> int:
        """The most that a proposal may hold on a GPU."""
        return self.device.limit_bytes(self.margin)

    @property
    def microbatch(self) -> MicroBatchShape:
        return MicroBatchShape(self.num_sequences, self.seq_tokens)

    def training_memory(self, layout: Layout) -> TrainingMemory:
        return TrainingMemory(
            self.config, layout, self.precision, self.gradients, self.microbatch, self.offload
        )

    def ledgers(self, layout: Layout) -> tuple[Ledger, ...]:
        """Return the memory of a layout, by pipeline stage."""
        if self.mode == "train":
            memory = self.training_memory(layout)
            return tuple(memory.ledger(stage) for stage in range(layout.pp))
        return serving_ledgers(
            self.config,
            layout,
            self.seq_tokens,
            self.precision,
            formats=self.formats,
            kv_dtype=self.kv_dtype,
        )

    def fits_within(self, layout: Layout, limit_bytes: int) -> bool:
        """Return whether no stage of a layout holds more than `limit_bytes`."""
        if self.mode == "train":
            return self.training_memory(layout).fits_within(limit_bytes)
        return all(stage.total_bytes <= limit_bytes for stage in self.ledgers(layout))

    def candidate(self, layout: Layout, replicas: int = 1) -> Candidate:
        """Return the memory and traffic of a layout."""
        if self.mode == "train":
            sent = comm_bytes(self.config, layout, self.precision, self.gradients, self.microbatch)
        else:
            sent = unpriced(layout)  # servers do not communicate
        limit = self.device.memory_bytes
        return Candidate(layout, limit, self.ledgers(layout), sent, replicas)

    @cached_property
    def on_one_gpu(self) -> Candidate:
        return self.candidate(Layout(recompute=self.recompute))

    def common_layouts(self, num_gpus: int) -> list[Candidate]:
        """Return the common layouts on `num_gpus`, simplest first."""
        if num_gpus > MAX_SIZE:
            raise ValueError(f"the number of GPUs must be at most {MAX_SIZE}, not {num_gpus}")
        layouts = training_layouts if self.mode == "train" else serving_layouts
        return [
            self.candidate(replace(layout, recompute=self.recompute), num_gpus // layout.world_size)
            for layout in layouts(self.config, num_gpus, self.gpus_per_node)
            if self.allows(layout)
        ]

    def longest_seq_tokens(self, layout: Layout) -> int:
        """Return the longest request that fits within the margin on `layout` in serving; 0 where
        the weights alone do not fit."""

        def exceeds(seq_tokens: int) -> bool:
            longer = replace(self, seq_tokens=seq_tokens)
            return not longer.fits_within(layout, self.limit_bytes)

        return bisect_left(range(1, self.seq_tokens + 1), True, key=exceeds)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def tensor_sizes(config: ModelConfig, num_gpus: int, most: int) -> list[int]:
    """Return the tensor-parallel sizes that divide `num_gpus` and that the model's heads allow."""
    sizes = range(1, min(num_gpus, most) + 1)
    return [tp for tp in sizes if num_gpus % tp == 0 and not Layout(tp=tp).problems(config)]


def training_layouts(config: ModelConfig, num_gpus: int, node: int) -> list[Layout]:
    """Return data parallel with each ZeRO stage, simplest first, and the largest tensor parallel
    size of a node."""
    if num_gpus == 1:
        return [Layout()]
    layouts = [Layout(dp=num_gpus, shard=shard) for shard in ZERO_STAGES]
    tp = max(tensor_sizes(config, num_gpus, node))
    shards: tuple[Shard, ...] = ("zero1", "zero3") if tp < num_gpus else ("none",)
    return layouts + (
        [Layout(dp=num_gpus // tp, tp=tp, shard=shard, sequence_parallel=True) for shard in shards]
        if tp > 1
        else []
    )


def serving_layouts(config: ModelConfig, num_gpus: int, node: int) -> list[Layout]:
    """Return servers of one GPU each, then of more and more GPUs of a node."""
    return [Layout(tp=tp) for tp in tensor_sizes(config, num_gpus, node)]
