"""Search for layouts that fit, and for the nearest one where the requested layouts do not.

A `Job` describes what runs on which GPU; `Job.candidate` prices a layout for it: its memory
(states, activations and buffers of training, weights and KV cache of serving) and the bytes that
its ranks send each other.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from shardwise.config import ModelConfig
from shardwise.formats.storage_formats import check_formats
from shardwise.hardware import Device
from shardwise.layout import MAX_SIZE, Layout, Recompute, Shard
from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.ledger import Ledger, Mode, serving_ledgers, training_ledgers
from shardwise.plan.traffic import CommBytes, comm_bytes, unpriced
from shardwise.precision import Precision
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import StorageFormats

GPUS_PER_NODE = 8
"""The largest tensor-parallel size that is tried: it communicates in every layer, so it stays where
links are fastest."""
ZERO_STAGES: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Candidate:
    """One layout, and its memory on the rank of each stage that holds most, against the limit of
    the GPU. `comm_bytes` are the bytes that a rank sends in a training step, by axis."""

    layout: Layout
    limit_bytes: int
    ledger: tuple[Ledger, ...]
    comm_bytes: CommBytes

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
    """A model in training or in serving, on GPUs of one kind.

    Attributes:
        seq_tokens: tokens per sequence in training, per request in serving
        num_sequences: sequences per micro-batch in training
        recompute: recompute of the layouts that training searches
        quant, formats: quantization in serving, by name and as storage formats of the parameters
        kv_dtype: dtype of the KV cache in serving
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
    kv_dtype: KvDtype = "auto"

    def allows(self, layout: Layout) -> bool:
        """Return whether a layout can shard the model, including its quantization groups."""
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
        """Return the memory and traffic of a layout."""
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
            sent = unpriced(layout)  # replicas do not communicate
        return Candidate(layout, self.device.memory_bytes, ledger, sent)

    def replicas(self, num_gpus: int) -> Candidate:
        """Return plain data parallel: the whole model on each GPU."""
        return self.candidate(Layout(dp=num_gpus, recompute=self.recompute))

    @cached_property
    def on_one_gpu(self) -> Candidate:
        return self.replicas(1)

    def candidates(self, num_gpus: int) -> tuple[Candidate, ...]:
        """Return the layouts worth comparing on `num_gpus`: first those that fit, then the others
        by size."""
        if num_gpus > MAX_SIZE:
            raise ValueError(f"the number of GPUs must be at most {MAX_SIZE}, not {num_gpus}")
        layouts = training_layouts if self.mode == "train" else serving_layouts
        found = [
            self.candidate(replace(layout, recompute=self.recompute))
            for layout in layouts(self.config, num_gpus)
            if self.allows(layout)
        ]

        def order(each: Candidate) -> tuple[bool, int]:
            return not each.fits, 0 if each.fits else each.peak_bytes

        return tuple(sorted(found, key=order))

    def nearest_fit(self, layout: Layout) -> Candidate | None:
        """Return the layout that fits with the smallest change: on as many GPUs as `layout` if one
        does, otherwise on the fewest that do."""
        changes = training_changes if self.mode == "train" else serving_changes
        for change in filter(self.allows, changes(self.config, layout)):
            found = self.candidate(change)
            if found.fits:
                return found
        return self.fewest_sharded(layout) if self.mode == "train" else None

    def fewest_sharded(self, layout: Layout) -> Candidate | None:
        """Return ZeRO-3 over the fewest data ranks on which `layout` fits, with the least recompute
        that this number needs."""
        one = replace(layout, dp=1, shard="zero3", shard_group=None)
        found = [self.fewest_ranks(replace(one, recompute=each)) for each in recomputed(layout)]
        return min((each for each in found if each), key=lambda each: each.layout.dp, default=None)

    def fewest_ranks(self, layout: Layout) -> Candidate | None:
        """Return `layout` with the fewest data ranks that fit."""
        most = MAX_SIZE // layout.world_size

        def fits(dp: int) -> bool:
            return self.candidate(replace(layout, dp=dp)).fits

        stages = self.candidate(layout).ledger
        available = [  # for states
            self.device.memory_bytes - stage.rows["activations"] - stage.rows["logits"]
            for stage in stages
        ]
        if min(available) <= 0:
            return None
        ranks = (
            stage.state_bytes // num_bytes
            for stage, num_bytes in zip(stages, available, strict=True)
        )
        low = high = max(1, *ranks)  # on fewer ranks the states alone do not fit
        if low > most:
            return None
        while not fits(high):
            if high == most:
                return None
            low = high + 1
            high = min(2 * high + 1, most)
        sizes = range(low, high + 1)
        return self.candidate(replace(layout, dp=sizes[bisect_left(sizes, True, key=fits)]))

    def longest_seq_tokens(self, layout: Layout) -> int:
        """Return the longest request that fits on `layout` in serving; 0 where the weights alone do
        not fit."""

        def exceeds(seq_tokens: int) -> bool:
            return not replace(self, seq_tokens=seq_tokens).candidate(layout).fits

        return bisect_left(range(1, self.seq_tokens + 1), True, key=exceeds)


def tensor_sizes(config: ModelConfig, num_gpus: int, most: int) -> list[int]:
    """Return the tensor-parallel sizes that divide `num_gpus` and that the model's heads allow."""
    sizes = range(1, min(num_gpus, most) + 1)
    return [tp for tp in sizes if num_gpus % tp == 0 and not Layout(tp=tp).problems(config)]


def training_layouts(config: ModelConfig, num_gpus: int) -> list[Layout]:
    """Return data parallel with each ZeRO stage, simplest first, and the largest tensor parallel
    size of a node."""
    if num_gpus == 1:
        return [Layout()]
    layouts = [Layout(dp=num_gpus, shard=shard) for shard in ZERO_STAGES]
    tp = max(tensor_sizes(config, num_gpus, GPUS_PER_NODE))
    shards: tuple[Shard, ...] = ("zero1", "zero3") if tp < num_gpus else ("none",)
    return layouts + (
        [Layout(dp=num_gpus // tp, tp=tp, shard=shard) for shard in shards] if tp > 1 else []
    )


def serving_layouts(config: ModelConfig, num_gpus: int) -> list[Layout]:
    """Return replicas of one GPU each, then of more and more GPUs of a node."""
    return [
        Layout(dp=num_gpus // tp, tp=tp) for tp in tensor_sizes(config, num_gpus, GPUS_PER_NODE)
    ]


def recomputed(layout: Layout) -> tuple[Recompute, ...]:
    """Return the recompute of `layout`, then those that recompute more."""
    return RECOMPUTES[RECOMPUTES.index(layout.recompute) :]


def training_changes(config: ModelConfig, layout: Layout) -> list[Layout]:
    """Return changes on the same GPUs: later ZeRO stages, then the same with more recompute, then
    ZeRO-3 over all GPUs."""
    later: tuple[Shard, ...] = ()
    if layout.shard in ZERO_STAGES and layout.data_size > 1:
        later = ZERO_STAGES[ZERO_STAGES.index(layout.shard) + 1 :]
    near = [replace(layout, shard=shard, shard_group=None) for shard in later]
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
    """Return larger tensor-parallel sizes on the same GPUs, then on more of them."""
    sizes = tensor_sizes(config, layout.world_size, config.num_heads)
    same = [Layout(dp=layout.world_size // tp, tp=tp) for tp in sizes if tp > layout.tp]
    more = [Layout(tp=tp) for tp in range(layout.world_size + 1, config.num_heads + 1)]
    return same + [each for each in more if not each.problems(config)]
