"""A `Layout` describes how one model is sharded over many devices: the same value is planned,
trained, checkpointed, tested and served.

Ranks are numbered with tensor parallel fastest, then context, data, and pipeline parallel slowest,
so that the ranks that communicate most share the fastest links.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, get_args

if TYPE_CHECKING:
    from shardwise.config import ModelConfig

Shard = Literal["none", "zero1", "zero2", "zero3", "fsdp"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto"]
Recompute = Literal["none", "selective", "full"]
AxisName = str
"""The name of a way to group ranks: one of `Layout.AXES`."""

SHARD_WORDS: dict[str, Shard] = {"z1": "zero1", "z2": "zero2", "z3": "zero3", "fsdp": "fsdp"}
PART = re.compile(
    r"(?P<size>dp|tp|pp|cp|s|v|m)(?P<number>\d+)|(?P<shard>z1|z2|z3|fsdp)"
    rf"|(?P<schedule>{'|'.join(sorted(get_args(Schedule), reverse=True))})"
    r"(@(?P<limit>\d+(\.\d+)?(e[+-]?\d+)?))?"
    r"|l(?P<layers>\d+(-\d+)*)|(?P<flag>sp|a2a|keep)|rc-(?P<recompute>selective|full)"
)
SIZES = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "s": "shard_group",
    "v": "chunks",
    "m": "microbatches",
}
MAX_SIZE = 10**7  # far above any cluster, so that no typing error is computed for hours
SHARDED_STATES: dict[Shard, frozenset[str]] = {
    "none": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "parameters"}),
    "fsdp": frozenset({"optimizer", "gradients", "parameters"}),
}
"""The states that each stage of ZeRO shards (Rajbhandari et al. 2020, figure 1); every rank holds
the others in full."""
FLAGS = {"sp": "sequence_parallel", "a2a": "all_to_all", "keep": "keep"}


class Coord(NamedTuple):
    """The position of a rank along each of the four axes whose product is the world."""

    dp: int
    tp: int
    pp: int
    cp: int


class StateAxes(NamedTuple):
    """The axes of a unit of state: its flat buffer is sharded over `shard`, and every shard is
    replicated over `replicate`. Together they are the ranks that sum the unit's gradient."""

    shard: AxisName
    replicate: AxisName


DATA_AXES = StateAxes("shard", "replicate")
"""The axes of a unit that all data ranks share."""


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes, the states that are sharded over data ranks, and the schedule of a
    step.

    Raises ValueError for a value that is never valid. `problems` reports what is invalid for a
    model, or in combination with the rest of the layout.

    Attributes:
        dp, tp, pp, cp: ranks along the data, tensor, pipeline and context parallel axes.
        shard: the stage of ZeRO, or FSDP.
        shard_group: hybrid sharding: states are sharded within groups of that many data ranks and
            replicated across groups; None: one group of all data ranks.
        schedule: the pipeline schedule; 1f1b if pp is above 1 and none is given.
        memory_limit: the memory limit of zb-auto, in forwards per stage.
        chunks: virtual stages per rank, for the interleaved schedule.
        layers: the blocks of each virtual stage; None: balanced.
        microbatches: micro-batches per step and data rank.
        sequence_parallel: tensor parallel with norms and residuals sharded by tokens.
        all_to_all: context parallel by all-to-all; else by a ring.
        keep: ZeRO-3 and FSDP keep gathered parameters from forward to backward.
        recompute: the activations that the backward recomputes.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    shard: Shard = "none"
    shard_group: int | None = None
    schedule: Schedule | None = None
    memory_limit: float | None = None
    chunks: int = 1
    layers: tuple[int, ...] | None = None
    microbatches: int = 1
    sequence_parallel: bool = False
    all_to_all: bool = False
    keep: bool = False
    recompute: Recompute = "none"

    AXES: ClassVar[tuple[AxisName, ...]] = (
        "dp",
        "tp",
        "pp",
        "pp_down",
        "cp",
        "data",
        "shard",
        "replicate",
        "world",
        "kv_replica",
        "tied",
    )
    """Every axis, in the order in which a mesh creates its process groups."""

    def __post_init__(self) -> None:
        for name in SIZES.values():
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(
                    f"layout: {name} must be a whole number of at least 1, not {size!r}"
                )
            if size is not None and size > MAX_SIZE:
                raise ValueError(f"layout: {name} must be at most {MAX_SIZE}, not {size}")
        if self.world_size > MAX_SIZE:
            raise ValueError(
                f"layout: {self.world_size} ranks are too many; at most {MAX_SIZE} work"
            )
        if self.memory_limit is not None and not 0 < self.memory_limit < math.inf:
            raise ValueError(f"layout: memory_limit must be above 0, not {self.memory_limit}")
        if self.layers is not None and not all(1 <= number <= MAX_SIZE for number in self.layers):
            raise ValueError(
                f"layout: every stage needs at least 1 layer, not {joined(self.layers)}"
            )
        for name, known in (("shard", Shard), ("schedule", Schedule), ("recompute", Recompute)):
            word = getattr(self, name)
            if word is not None and word not in get_args(known):
                raise ValueError(
                    f"layout: {name} must be one of {', '.join(get_args(known))}, not {word!r}"
                )
        if self.pp > 1 and self.schedule is None:
            object.__setattr__(self, "schedule", "1f1b")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the short form, whose parts may have any order: `dp2.tp2.pp2.z1.1f1b.m8`. Raises
        ValueError if it is malformed."""
        values: dict[str, object] = {}
        for name, value in parse_parts(text):
            if name in values:
                raise ValueError(f"layout {text!r} sets {name} twice; set it once")
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = [f"{axis}{size}" for axis in Coord._fields if (size := getattr(self, axis)) > 1]
        words = words or ["dp1"]
        words += [word for word, shard in SHARD_WORDS.items() if shard == self.shard]
        words += [f"s{self.shard_group}"] if self.shard_group else []
        limit = ""
        if self.memory_limit is not None:
            limit = f"@{float(self.memory_limit)!r}".removesuffix(".0")
        words += [f"{self.schedule}{limit}"] if self.schedule else []
        words += [f"v{self.chunks}"] if self.chunks > 1 else []
        words += [f"l{joined(self.layers)}"] if self.layers else []
        words += [f"m{self.microbatches}"] if self.microbatches > 1 else []
        words += [word for word, name in FLAGS.items() if getattr(self, name)]
        words += [f"rc-{self.recompute}"] if self.recompute != "none" else []
        return ".".join(words)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_size(self) -> int:
        """The number of ranks that see different tokens, over which ZeRO shards."""
        return self.dp * self.cp

    @property
    def shard_size(self) -> int:
        """The number of ranks over which a unit of state is sharded. Without ZeRO it is 1."""
        return 1 if self.shard == "none" else (self.shard_group or self.data_size)

    def padded(self, num_elements: int, axes: StateAxes = DATA_AXES) -> int:
        """Return the size of the flat buffer of a unit of state: a multiple of its ranks, which
        take equal parts of it."""
        ranks = self.size(axes.shard) * self.size(axes.replicate)
        return -(-num_elements // ranks) * ranks

    def padded_tokens(self, num_tokens: int) -> int:
        """Return the length to which a sequence is padded, so that all ranks take equal parts."""
        multiple = math.lcm(
            self.sequence_chunks, self.cp * self.tp if self.sequence_parallel else 1
        )
        return -(-num_tokens // multiple) * multiple

    @property
    def sequence_chunks(self) -> int:
        """The number of equal chunks into which context parallel splits a sequence; in a ring each
        rank takes two."""
        return self.cp if self.all_to_all or self.cp == 1 else 2 * self.cp

    def shards(self, state: str) -> bool:
        """Return whether `parameters`, `gradients` or `optimizer` states are sharded over data
        ranks."""
        return state in SHARDED_STATES[self.shard]

    def coord(self, rank: int) -> Coord:
        """Return the coordinate of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coord(dp, tp, pp, cp)

    def rank(self, coord: Coord) -> int:
        """Return the global rank of a coordinate."""
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def size(self, axis: AxisName) -> int:
        """Return the number of ranks along an axis over which parameters or states are sharded."""
        if axis in ("dp", "tp", "pp", "cp"):
            return int(getattr(self, axis))
        return {
            "data": self.data_size,
            "shard": self.shard_size,
            "replicate": self.data_size // self.shard_size,
        }[axis]

    def index(self, axis: AxisName, coord: Coord) -> int:
        """Return the position of `coord` along an axis that has a `size`."""
        if axis in ("dp", "tp", "pp", "cp"):
            return int(getattr(coord, axis))
        data = coord.dp * self.cp + coord.cp
        group, within = divmod(data, self.shard_size)
        return {"data": data, "shard": within, "replicate": group}[axis]

    def kv_replicas(self, num_kv_heads: int) -> int:
        """Return how many tensor ranks, neighbors of each other, hold the same kv head: 1 if there
        are heads for all."""
        return max(1, self.tp // num_kv_heads)

    def ranks(
        self, axis: AxisName, coord: Coord, num_kv_heads: int | None = None
    ) -> tuple[int, ...]:
        """Return the global ranks along `axis` through `coord`, in order, its own among them.

        `num_kv_heads` decides which ranks share a kv head; None: each rank has its own.
        """
        if axis == "kv_replica":
            size = self.kv_replicas(num_kv_heads or self.tp)
            first = coord.tp - coord.tp % size
            return tuple(self.rank(coord._replace(tp=first + i)) for i in range(size))
        if axis == "world":
            return tuple(range(self.world_size))
        if axis == "tied":
            ends = dict.fromkeys((0, self.pp - 1)) if coord.pp in (0, self.pp - 1) else (coord.pp,)
            return tuple(self.rank(coord._replace(pp=stage)) for stage in ends)
        if axis == "pp_down":
            axis = "pp"
        if axis in ("dp", "tp", "pp", "cp"):
            return tuple(self.rank(coord._replace(**{axis: i})) for i in range(getattr(self, axis)))
        data = [
            self.rank(coord._replace(dp=d, cp=c)) for d in range(self.dp) for c in range(self.cp)
        ]
        size = self.shard_size
        if axis == "shard":
            first = self.index("replicate", coord) * size
            return tuple(data[first : first + size])
        if axis == "replicate":
            return tuple(data[self.index("shard", coord) :: size])
        assert axis == "data", f"unknown axis {axis!r}"
        return tuple(data)

    def stage_layers(
        self, num_layers: int, first: float = 0.0, last: float = 0.0
    ) -> tuple[range, ...]:
        """Return the blocks of each virtual stage, in order: as set by `layers`, or balanced so
        that the rank with most work has as little as possible.

        `first` and `last` are the work of embedding and head, in blocks. Of equal stages the later
        takes more, since it keeps fewer micro-batches in flight.
        """
        numbers = self.layers or self._balanced(num_layers, first, last)
        return tuple(range(a, b) for a, b in pairwise(accumulate(numbers, initial=0)))

    def _balanced(self, num_layers: int, first: float, last: float) -> list[int]:
        """Assign each block to the rank with the least work, and there to the stage with the
        least."""
        stages = self.pp * self.chunks
        assert num_layers >= stages
        work = [1.0] * stages
        work[0] += first
        work[-1] += last
        numbers = [1] * stages
        rank_work = [sum(work[rank :: self.pp]) for rank in range(self.pp)]
        for _ in range(num_layers - stages):
            stage = min(
                range(stages), key=lambda each: (rank_work[each % self.pp], work[each], -each)
            )
            numbers[stage] += 1
            work[stage] += 1
            rank_work[stage % self.pp] += 1
        return numbers

    def problems(self, model: "ModelConfig | None" = None) -> list[str]:
        """Return every reason why this layout cannot work (for `model`): sentences that name the
        nearest layout that does."""
        return [*self._own_problems(), *(self._model_problems(model) if model else [])]

    def _own_problems(self) -> Iterator[str]:
        yield from self._pipeline_problems()
        if self.shard == "fsdp" and self.pp > 1:
            yield "fsdp with pp is not supported; z3 in its place works"
        elif self.shard == "fsdp" and self.shard_size == 1:
            yield "fsdp shards over at least 2 data ranks; z3 in its place works"
        if self.shard_group and self.shard == "none":
            yield f"s{self.shard_group} needs states to shard; add z1, z2 or z3, or leave it out"
        if self.shard_group and self.data_size % self.shard_group:
            divides = nearest_divisor(self.data_size, self.shard_group)
            yield (
                f"groups of s{self.shard_group} do not divide {self.data_size} data ranks; "
                f"s{divides} works"
            )
        if self.sequence_parallel and self.tp == 1:
            yield "sp shards the sequence over tp; add tp2, or leave sp out"
        if self.all_to_all and self.cp == 1:
            yield "a2a is a method of context parallel; add cp2, or leave a2a out"
        if self.keep and self.shard not in ("zero3", "fsdp"):
            yield "keep needs gathered parameters; add z3, or leave keep out"

    def _pipeline_problems(self) -> Iterator[str]:
        p = self.pp
        m = self.microbatches
        v = self.chunks
        if p == 1 and self.schedule:
            yield f"schedule {self.schedule} needs pp of at least 2; leave it out, or add pp2"
        if self.memory_limit is not None and self.schedule != "zb-auto":
            yield "a memory limit (@X) belongs to zb-auto; leave it out, or choose zb-auto@X"
        if (v > 1) != (self.schedule == "interleaved"):
            both = f"interleaved.v{max(v, 2)}"
            yield f"interleaved and chunks need each other; write {both}, or leave both out"
        if self.layers is not None:
            counts = f"l{joined(self.layers)}"
            if p == 1:
                yield f"{counts} divides layers among stages; leave it out, or add pp2"
            elif len(self.layers) != p * v:
                yield (
                    f"{counts} is for {len(self.layers)} stages, not {p * v}; "
                    f"leave it out, or name {p * v}"
                )
        works = nearest_microbatches(self.schedule, p, m)
        if self.schedule == "interleaved" and m != works:
            yield f"interleaved needs micro-batches divisible by pp{p}, not m{m}; m{works} works"
        if self.schedule == "zb-h2" and m != works:
            yield f"zb-h2 needs at least 2p - 1 micro-batches, not m{m}; m{works} works, or zb-h1"

    def _model_problems(self, model: "ModelConfig") -> Iterator[str]:
        heads = model.num_heads
        kv_heads = model.num_kv_heads
        works = [
            t
            for t in range(1, heads + 1)
            if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
        ]
        if self.tp not in works:
            best = min(works, key=lambda t: (abs(t - self.tp), t))
            yield (
                f"tp{self.tp} does not divide {heads} heads with {kv_heads} kv heads evenly; "
                f"tp{best} works ({', '.join(map(str, works))} do)"
            )
        head_ranks = self.tp * self.cp
        if self.all_to_all and (heads % head_ranks or kv_heads % head_ranks):
            yield (
                f"a2a shards heads over tp x cp = {head_ranks}, which {kv_heads} kv heads do not "
                "allow; the ring (no a2a) works"
            )
        if self.shard == "fsdp" and self.tp > model.ffn_size:
            yield (
                f"fsdp cannot shard empty tensors, and tp{self.tp} leaves some for an ffn of "
                f"{model.ffn_size}; z3 in its place works"
            )
        yield from self._stage_problems(model.num_layers)

    def _stage_problems(self, num_layers: int) -> Iterator[str]:
        stages = self.pp * self.chunks
        if stages > num_layers:
            best_v = num_layers // self.pp
            change = f"v{best_v}" if best_v > 1 else f"pp{min(self.pp, num_layers)}"
            if best_v <= 1 and self.chunks > 1:
                change += " without chunks"
            yield f"{stages} stages are more than {num_layers} layers; {change} works"
        elif self.layers is None or len(self.layers) != stages:
            return
        elif sum(self.layers) != num_layers:
            balanced = joined(self._balanced(num_layers, 0.0, 0.0))
            yield (
                f"l{joined(self.layers)} makes {sum(self.layers)} layers, not {num_layers}; "
                f"l{balanced} works"
            )


def layout_hint(text: str) -> str:
    """Return what a text that is not a short form probably means, or else the parts of layouts."""
    if near := likely_form(text):
        return f"did you mean {near}?"
    schedules = " ".join(get_args(Schedule))
    return (
        f"parts are dpN tpN ppN cpN, z1 z2 z3 fsdp, sN, {schedules}@X, vN, lN-N, mN, sp, a2a, "
        "keep, rc-selective, rc-full, joined by dots as in dp2.tp2.z1"
    )


def likely_form(text: str) -> str | None:
    """Return the short form that a text with wrong separators or common names probably means."""
    form = re.sub(r"[,;+* _]+|(?<=\d)[-x](?=[a-z])", ".", text.strip().lower())
    form = re.sub(r"\b(fsdp)\d\b", r"\1", form)
    form = re.sub(r"\b(?:zero|stage)\.?(?=[123]\b)", "z", form)
    form = re.sub(r"\b([dtpc])(?=\d)", r"\1p", form)
    try:
        return form if form != text and Layout.parse(form) else None
    except ValueError:
        return None


def parse_parts(text: str) -> Iterator[tuple[str, object]]:
    """Yield the fields that a short form sets, with their values. A dot within a memory limit
    (`zb-auto@1.5`) does not separate parts."""
    start = 0
    while True:
        match = PART.match(text, start)
        end = match.end() if match else start
        if match is None or (end < len(text) and text[end] != "."):
            word = text[start:].split(".")[0]
            raise ValueError(
                f"layout {text!r}: {word!r} is not a part of a layout; {layout_hint(text)}"
            )
        if match["size"]:
            yield SIZES[match["size"]], int(match["number"])
        elif match["shard"]:
            yield "shard", SHARD_WORDS[match["shard"]]
        elif match["schedule"]:
            yield "schedule", match["schedule"]
            if match["limit"]:
                yield "memory_limit", float(match["limit"])
        elif match["layers"]:
            yield "layers", tuple(map(int, match["layers"].split("-")))
        elif match["flag"]:
            yield FLAGS[match["flag"]], True
        else:
            yield "recompute", match["recompute"]
        if end == len(text):
            return
        start = end + 1


def ring_bytes(num_bytes: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends when `num_bytes` pass around a ring once."""
    return num_bytes * (size - 1) // size


def joined(layers: Sequence[int]) -> str:
    """Return the short form of the layers of each stage."""
    return "-".join(map(str, layers))


def nearest_microbatches(schedule: str | None, stages: int, microbatches: int) -> int:
    """Return the number of micro-batches that a schedule supports, nearest to `microbatches`."""
    if schedule == "interleaved":
        return nearest_multiple(microbatches, stages)
    return max(microbatches, 2 * stages - 1) if schedule == "zb-h2" else microbatches


def nearest_multiple(number: int, of: int) -> int:
    """Return the positive multiple of `of` nearest to `number`."""
    return max(of, round(number / of) * of)


def nearest_divisor(of: int, number: int) -> int:
    """Return the divisor of `of` nearest to `number`."""
    below = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    return min((d for low in below for d in (low, of // low)), key=lambda d: (abs(d - number), d))


assert {*SIZES.values(), *FLAGS.values()} <= {field.name for field in fields(Layout)}
