"""Which layouts fit, and the nearest one that does where those asked for do not.

One `Job` says what is to run on which GPU; `Job.candidate` prices a layout of it. So far priced are
memory (states, activations and buffers of training, weights and KV cache of serving) and what data,
tensor and context ranks send each other.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from shardwise.config import ModelConfig
from shardwise.formats.storage import check_formats
from shardwise.hardware import Device
from shardwise.layout import MAX_SIZE, Layout, Recompute, Shard
from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.ledger import Ledger, Mode, serving_ledgers, training_ledgers
from shardwise.plan.traffic import CommBytes, comm_bytes, unpriced
from shardwise.precision import Precision
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import StorageFormats

GPUS_OF_A_NODE = (
    8  # tensor parallelism talks within every layer, so by itself it stays where links are fastest
)
ZERO_STAGES: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Candidate:
    """One layout and what it holds on the fullest rank of each stage, against what the GPU can
    hold."""

    layout: Layout
    limit_bytes: int
    ledger: tuple[Ledger, ...]
    comm_bytes: CommBytes
    """What a rank sends in a step of training, by axis; None where that is not counted yet."""

    @property
    def peak_bytes(self) -> int:
        return max(stage.total_bytes for stage in self.ledger)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "ledger": [{"stage": stage.stage, "rows": stage.rows} for stage in self.ledger],
            "comm_bytes": self.comm_bytes,
        }


@dataclass(frozen=True)
class Job:
    """What is to run on GPUs of one kind: a model, trained (in micro-batches of `num_sequences` of
    `seq_tokens`, with `recompute` where no layout was asked for) or served (in requests of
    `seq_tokens`)."""

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
    """Of serving: how weights are quantized, in a word and matrix by matrix."""
    kv_dtype: KvDtype = "auto"
    """Of serving: what keys and values are kept in."""

    def allows(self, layout: Layout) -> bool:
        """Whether the heads of the model, and the groups of its weights, can be cut so."""
        if layout.problems(self.config):
            return False
        try:
            check_formats(self.config, self.formats, layout)
        except ValueError:
            return False
        return True

    @property
    def microbatch(self) -> MicroBatchShape:
        return MicroBatchShape(self.num_sequences, self.seq_tokens)

    def candidate(self, layout: Layout) -> Candidate:
        if self.mode == "train":
            ledger = training_ledgers(
                self.config, layout, self.precision, microbatch=self.microbatch
            )
            sent = comm_bytes(self.config, layout, self.precision, microbatch=self.microbatch)
        else:
            ledger = serving_ledgers(
                self.config,
                layout,
                self.seq_tokens,
                self.precision,
                formats=self.formats,
                kv_dtype=self.kv_dtype,
            )
            sent = unpriced(layout)  # replicas have nothing to tell each other
        return Candidate(layout, self.device.memory_bytes, ledger, sent)

    def copies(self, num_gpus: int) -> Candidate:
        """The whole model on each of them."""
        return self.candidate(Layout(dp=num_gpus, recompute=self.recompute))

    @cached_property
    def on_one_gpu(self) -> Candidate:
        return self.copies(1)

    def candidates(self, num_gpus: int) -> tuple[Candidate, ...]:
        """The layouts worth comparing on `num_gpus`: those that fit first, then the nearest to
        fitting."""
        if num_gpus > MAX_SIZE:
            raise ValueError(f"the number of GPUs must be at most {MAX_SIZE}, not {num_gpus}")
        layouts = training_layouts if self.mode == "train" else serving_layouts
        kept = [layout for layout in layouts(self.config, num_gpus) if self.allows(layout)]
        found = [self.candidate(replace(layout, recompute=self.recompute)) for layout in kept]
        return tuple(
            sorted(found, key=lambda each: (not each.fits, 0 if each.fits else each.peak_bytes))
        )

    def nearest_fit(self, layout: Layout) -> Candidate | None:
        """The layout that fits and changes least: on as many GPUs as `layout` if any does, else on
        the fewest more."""
        changes = training_changes if self.mode == "train" else serving_changes
        for change in filter(self.allows, changes(self.config, layout)):
            found = self.candidate(change)
            if found.fits:
                return found
        return self.smallest_cut(layout) if self.mode == "train" else None

    def smallest_cut(self, layout: Layout) -> Candidate | None:
        """The fewest data ranks over which stage 3 cuts the states of `layout` until they fit,
        recomputing no more than that takes."""
        whole = replace(layout, dp=1, shard="zero3", shard_group=None)
        found = [self.fewest_ranks(replace(whole, recompute=each)) for each in recomputed(layout)]
        return min((each for each in found if each), key=lambda each: each.layout.dp, default=None)

    def fewest_ranks(self, layout: Layout) -> Candidate | None:
        """The fewest data ranks with which `layout` fits."""
        most = MAX_SIZE // layout.world_size

        def fits(dp: int) -> bool:
            return self.candidate(replace(layout, dp=dp)).fits

        stages = self.candidate(layout).ledger
        rooms = [
            self.device.memory_bytes - stage.rows["activations"] - stage.rows["logits"]
            for stage in stages
        ]
        if min(rooms) <= 0:
            return None
        low = high = max(
            1, *(stage.state_bytes // room for stage, room in zip(stages, rooms, strict=True))
        )
        if low > most:  # and on fewer ranks the states alone do not fit
            return None
        while not fits(high):
            if high == most:
                return None
            low = high + 1
            high = min(2 * high + 1, most)
        sizes = range(low, high + 1)
        return self.candidate(replace(layout, dp=sizes[bisect_left(sizes, True, key=fits)]))

    def longest_seq_tokens(self, layout: Layout) -> int:
        """The longest request that fits on `layout` in serving; 0 where the weights alone do not
        fit."""
        lengths = range(1, self.seq_tokens + 1)
        return bisect_left(
            lengths, True, key=lambda n: not replace(self, seq_tokens=n).candidate(layout).fits
        )


def tensor_sizes(config: ModelConfig, num_gpus: int, most: int) -> list[int]:
    """The tensor-parallel sizes that divide `num_gpus` and that the model's heads allow."""
    sizes = range(1, min(num_gpus, most) + 1)
    return [tp for tp in sizes if num_gpus % tp == 0 and not Layout(tp=tp).problems(config)]


def training_layouts(config: ModelConfig, num_gpus: int) -> list[Layout]:
    """The data-parallel family, simplest first, and the widest tensor parallelism of a node."""
    if num_gpus == 1:
        return [Layout()]
    layouts = [Layout(dp=num_gpus, shard=shard) for shard in ZERO_STAGES]
    tp = max(tensor_sizes(config, num_gpus, GPUS_OF_A_NODE))
    shards: tuple[Shard, ...] = ("zero1", "zero3") if tp < num_gpus else ("none",)
    return layouts + (
        [Layout(dp=num_gpus // tp, tp=tp, shard=shard) for shard in shards] if tp > 1 else []
    )


def serving_layouts(config: ModelConfig, num_gpus: int) -> list[Layout]:
    """Replicas of one GPU each, then of more and more of a node."""
    return [
        Layout(dp=num_gpus // tp, tp=tp) for tp in tensor_sizes(config, num_gpus, GPUS_OF_A_NODE)
    ]


def recomputed(layout: Layout) -> tuple[Recompute, ...]:
    """What `layout` recomputes, then more of it."""
    return RECOMPUTES[RECOMPUTES.index(layout.recompute) :]


def training_changes(config: ModelConfig, layout: Layout) -> list[Layout]:
    """On the same GPUs: the later stages of ZeRO, then the same with more recompute; then all of it
    in stage 3."""
    later = (
        ZERO_STAGES[ZERO_STAGES.index(layout.shard) + 1 :] if layout.shard in ZERO_STAGES else ()
    )
    near = [
        replace(layout, shard=shard, shard_group=None) for shard in later if layout.data_size > 1
    ]
    near += [replace(layout, shard_group=None)] if layout.shard_group else []
    far = [Layout(dp=layout.world_size, shard="zero3")] if layout.world_size > 1 else []
    changes = [
        replace(change, recompute=recompute)
        for found in ([layout, *near], far)
        for recompute in recomputed(layout)
        for change in found
    ]
    return [change for change in changes if change != layout and not change.problems(config)]


def serving_changes(config: ModelConfig, layout: Layout) -> list[Layout]:
    """Wider tensor parallelism on the same GPUs, then on more of them."""
    same = [
        tp for tp in tensor_sizes(config, layout.world_size, config.num_heads) if tp > layout.tp
    ]
    more = [
        tp
        for tp in range(layout.world_size + 1, config.num_heads + 1)
        if not Layout(tp=tp).problems(config)
    ]
    return [Layout(dp=layout.world_size // tp, tp=tp) for tp in same] + [
        Layout(tp=tp) for tp in more
    ]
