"""The parameters of a model and how each is sharded: the one table from which the shards of every
layout are derived.

From a `ParamSpec`, a `Layout` and a coordinate follow the local shape, the bytes to read from a
file, the boxes of a checkpoint, the place in the flat buffers of ZeRO, the axes over which a
gradient is a partial sum, and the planner's bytes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from shardwise.block import FUSED, BlockParam, block_params, dim_size, is_set, norm_params
from shardwise.config import ModelConfig
from shardwise.layout import DATA_AXES, AxisName, Layout, StateAxes

T = TypeVar("T")
Kind = Literal["embedding", "matrix", "norm", "bias", "head"]
"""Role of a parameter: `embedding` is a lookup table, `matrix` a linear layer within a block,
`head` the output projection."""
Fit = Literal["spread", "pad", "replicate"]
PartialAxis = Literal["tp", "tp if sp", "kv_replica"]


@dataclass(frozen=True)
class Rule:
    """The sharding of one dim of a parameter.

    Attributes:
        cut: the axis that shards the dim; None if every rank holds all of it.
        fit: how to distribute blocks that do not divide evenly over the ranks. `spread`: the
            first ranks hold one block more; `pad`: all ranks allocate equally many; `replicate`:
            with fewer blocks than ranks, neighbors hold the same block.
        whole_heads: whether a block is a head, which is never split; else it is one element.
        partial: axes over which the gradient of each rank is one term of a sum.
    """

    cut: AxisName | None = None
    fit: Fit = "spread"
    whole_heads: bool = False
    partial: tuple[PartialAxis, ...] = ()


RULES = {
    "vocab": Rule(cut="tp", fit="pad"),
    "q_heads": Rule(cut="tp", whole_heads=True),
    "kv_heads": Rule(cut="tp", fit="replicate", whole_heads=True, partial=("kv_replica",)),
    "ffn": Rule(cut="tp"),
    # not sharded, but under sequence parallel each rank sees its own tokens
    "embed": Rule(partial=("tp if sp",)),
    # q/k norm: shared by heads that live on different ranks
    "head_dim": Rule(partial=("tp",)),
    "positions": Rule(),
}


@dataclass(frozen=True)
class Init:
    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True)
class Part:
    """A part of a fused parameter: `size` elements of its fused dim, sharded by the rule of
    `dim`."""

    name: str
    dim: str
    size: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model.

    Attributes:
        name: its name in checkpoints, such as `blocks.3.qkv`.
        shape: its global shape.
        dims: the name of each dim in `RULES`; "fused" for the dim along which `parts` lie.
        init: how it is initialized.
        unit: the unit of state that owns it, such as `embed`, `blocks.3` or `final`.
        kind: what it does.
        layer: the block that it belongs to, or None.
        parts: the parts of a fused parameter, such as q, k and v; empty if it is not fused.
        head_dim: the elements of a head, where a rule keeps heads whole.
        tied_to: the parameter whose storage it shares, or None.
        state_axes: the axes of its unit, the same for all parameters of a unit.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init
    _: KW_ONLY
    unit: str
    kind: Kind = "matrix"
    layer: int | None = None
    parts: tuple[Part, ...] = ()
    head_dim: int = 1
    tied_to: str | None = None
    state_axes: StateAxes = DATA_AXES

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), self
        assert self.dims.count(FUSED) == bool(self.parts), self
        assert sum(part.size for part in self.all_parts) == self.shape[self.part_dim], self
        assert all(dim in RULES for part in self.all_parts for dim in self.part_dims(part)), self

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def short_name(self) -> str:
        """The name within its block: `qkv` for `blocks.3.qkv`."""
        return self.name.rpartition(".")[2]

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts, or the whole parameter as one part."""
        return self.parts or (Part(self.short_name, self.dims[0], self.shape[0]),)

    @property
    def part_dim(self) -> int:
        """The dim along which the parts lie."""
        return self.dims.index(FUSED) if self.parts else 0

    def part(self, name: str) -> Part:
        return next(part for part in self.all_parts if part.name == name)

    def part_dims(self, part: Part) -> tuple[str, ...]:
        """Return the names of the dims of a part."""
        return replaced(self.dims, self.part_dim, part.dim)

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Return the global shape of a part."""
        return replaced(self.shape, self.part_dim, part.size)

    def part_slices(self) -> Iterator[tuple[Part, tuple[slice, ...]]]:
        """Yield every part with its index into the global tensor."""
        start = 0
        for part in self.all_parts:
            yield part, (slice(None),) * self.part_dim + (slice(start, start + part.size),)
            start += part.size

    @property
    def decayed(self) -> bool:
        """True if weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1


def replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def unit_axes(specs: Iterable[ParamSpec]) -> StateAxes:
    """Return the axes of the unit of state that consists of `specs`."""
    (axes,) = {spec.state_axes for spec in specs}
    return axes


# -- the decoder
# ----------------------------------------------------------------------------------------------


def block_unit(layer: int) -> str:
    """Return the name of the unit of state of a block, which prefixes its parameters' names."""
    return f"blocks.{layer}"


@lru_cache(maxsize=64)
def stage_layers(config: ModelConfig, layout: Layout) -> tuple[range, ...]:
    """Return the blocks of each virtual stage, balanced by their work.

    Work is the number of weights used in matmuls: a block's matrices, the head, and one row for the
    embedding lookup. Attention, which grows with the sequence, is left out.
    """
    multiplied = sum(spec.numel for spec in block_specs(config, 0) if spec.kind == "matrix")
    head = config.vocab_size * config.hidden_size
    return layout.stage_layers(
        config.num_layers, config.hidden_size / multiplied, head / multiplied
    )


def rank_layers(config: ModelConfig, layout: Layout, stage: int) -> tuple[int, ...]:
    """Return the blocks of all virtual stages of the pipeline rank `stage`, in order."""
    return tuple(
        layer for layers in stage_layers(config, layout)[stage :: layout.pp] for layer in layers
    )


def stage_units(config: ModelConfig, layout: Layout, stage: int) -> frozenset[str]:
    """Return the units of state that the pipeline rank `stage` holds; a tied embedding is on the
    first and on the last."""
    layers = frozenset(rank_layers(config, layout, stage))
    first = stage == 0
    last = stage == layout.pp - 1

    def holds(spec: ParamSpec) -> bool:
        if spec.layer is not None:
            return spec.layer in layers
        if spec.kind == "embedding":
            return first or (last and config.tied and spec.name == "embed")
        return last

    return frozenset(unit for unit, spec in first_specs(config).items() if holds(spec))


@lru_cache(maxsize=16)
def first_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Return the first parameter of each unit of state; it determines the unit's pipeline stage."""
    return {unit: specs[0] for unit, specs in units(model_specs(config)).items()}


def units(specs: Iterable[ParamSpec]) -> dict[str, tuple[ParamSpec, ...]]:
    """Return the stored parameters by unit of state, in the order of the model."""
    grouped: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        if spec.tied_to is None:
            grouped.setdefault(spec.unit, []).append(spec)
    return {unit: tuple(group) for unit, group in grouped.items()}


def num_params(specs: Iterable[ParamSpec]) -> int:
    return sum(spec.numel for spec in specs if spec.tied_to is None)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the floating-point operations of training on one token, forward and backward,
    recompute not counted.

    6 per parameter except embeddings, whose rows are looked up (a tied head multiplies and counts);
    and causal attention, 12 per element of a query and token that it sees: half of `seq_len` on
    average, or of a sliding window w the mean of min(t, w), which is w - w^2 / (2 seq_len). With a
    `seq_len` of 0, attention is not counted.
    """
    multiplied = sum(spec.numel for spec in model_specs(config) if spec.kind != "embedding")
    windows = (min(seq_len, config.window(n) or seq_len) for n in range(config.num_layers))
    pairs = sum(2 * seq_len * window - window * window for window in windows)  # twice of a sequence
    return 6 * multiplied + 6 * config.q_size * pairs // max(1, seq_len)


@lru_cache(maxsize=16)
def model_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return every parameter of the decoder, in order. The head of a tied model refers to
    `embed`."""
    d = config.hidden_size
    vocab = config.vocab_size
    normal = Init("normal", 0.02)
    specs = [
        ParamSpec("embed", (vocab, d), ("vocab", "embed"), normal, unit="embed", kind="embedding")
    ]
    if config.positions == "learned":
        shape = (config.max_positions, d)
        specs.append(
            ParamSpec(
                "positions",
                shape,
                ("positions", "embed"),
                normal,
                unit="positions",
                kind="embedding",
            )
        )
    for layer in range(config.num_layers):
        specs += block_specs(config, layer)
    final_norm = (param for param in norm_params("norm") if is_set(config, param.flag))
    specs += [table_spec(config, param, "", "final", None) for param in final_norm]
    specs.append(
        ParamSpec(
            "head",
            (vocab, d),
            ("vocab", "embed"),
            normal,
            unit="final",
            kind="head",
            tied_to="embed" if config.tied else None,
        )
    )
    return tuple(specs)


def block_specs(config: ModelConfig, layer: int) -> list[ParamSpec]:
    """Return the parameters of a block, from the table `block.BLOCK`."""
    unit = block_unit(layer)
    return [table_spec(config, param, f"{unit}.", unit, layer) for param in block_params(config)]


def table_spec(
    config: ModelConfig, param: BlockParam, prefix: str, unit: str, layer: int | None
) -> ParamSpec:
    """Return the specification of one row of the table.

    A matrix that writes into the residual is initialized smaller by the square root of 2 x layers,
    as in GPT-2, so that the residual does not grow with depth.
    """
    parts = tuple(
        Part(part.name, part.dim, dim_size(config, part.dim)) for part in param.parts_of(config)
    )
    fused_size = sum(part.size for part in parts)
    shape = tuple(fused_size if dim == FUSED else dim_size(config, dim) for dim in param.dims)
    init = Init("ones" if param.kind == "norm" else "zeros")
    if param.kind == "matrix":
        is_residual = param.dims[0] == "embed"
        init = Init("normal", 0.02 / math.sqrt(2 * config.num_layers) if is_residual else 0.02)
    dims = (*param.dims, *(part.dim for part in parts))
    has_heads = any(dim != FUSED and RULES[dim].whole_heads for dim in dims)
    return ParamSpec(
        prefix + param.name,
        shape,
        param.dims,
        init,
        unit=unit,
        kind=param.kind,
        layer=layer,
        parts=parts,
        head_dim=config.head_dim if has_heads else 1,
    )
