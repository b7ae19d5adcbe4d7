"""The table of block parameters. The modules below derive from it:

- `params.block_specs`: their shapes, shards and initialization
- `model.transformer.BlockWeights`: its fields have these names
- `plan.activations`: the tensors that a block saves for its backward
- `quantize`: the matrices that are quantized, and where AWQ folds their scales
- `kernels`: the matrices that are packed

To add an operation to a block, add a row here, a field of `BlockWeights` and an operation in
`model.transformer.Transformer.block`; `tests/test_block.py` checks that the names match. Imports no
torch.
"""

from dataclasses import dataclass
from typing import Literal

from shardwise.config import ModelConfig

FUSED = "fused"
"""The name of the dim along which the parts of a fused parameter lie."""


@dataclass(frozen=True)
class BlockPart:
    """A part of a fused parameter: its name, the dim that shards it, and the `ModelConfig` flag
    that enables it (None: always)."""

    name: str
    dim: str
    flag: str | None = None


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward saves for the backward.

    Attributes:
        name: its name in reports.
        tensor: the input or the output of the parameter's operation, or the statistics of a norm.
        recomputed: selective recompute drops it.
        flag: the flag of models whose blocks save it; None: all.
    """

    name: str
    tensor: Literal["input", "output", "statistics"]
    recomputed: bool = False
    flag: str | None = None


@dataclass(frozen=True)
class FoldTarget:
    """The producer of a matrix's inputs: a norm, or one part of another matrix. AWQ
    divides it by the scales that multiply the columns of the matrix."""

    param: str
    part: str | None = None
    flag: str | None = None


@dataclass(frozen=True)
class BlockParam:
    """One parameter of a block.

    Attributes:
        name: its name within the block.
        kind: matrices are quantized, packed and decayed; norms and biases are not.
        dims: names of its dims, keys of `params.RULES`; FUSED for the dim of the parts.
        parts: the parts along the fused dim.
        flag: the flag of models that have it; None: all.
        normalized: for a norm, the dim whose rows it normalizes: each token, or each head of q or
            k.
        saved: the tensors that are saved for the backward of its operation.
        fold: where scales of the columns of a matrix can be folded.
    """

    name: str
    kind: Literal["matrix", "norm", "bias"]
    dims: tuple[str, ...]
    parts: tuple[BlockPart, ...] = ()
    flag: str | None = None
    normalized: str | None = None
    saved: tuple[SavedTensor, ...] = ()
    fold: FoldTarget | None = None

    def parts_of(self, config: ModelConfig) -> tuple[BlockPart, ...]:
        """Return the parts in a model."""
        return tuple(part for part in self.parts if is_set(config, part.flag))

    def output_dims(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the dims that the outputs of a matrix consist of."""
        return tuple(part.dim for part in self.parts_of(config)) or self.dims[:1]


QKV = (BlockPart("q", "q_heads"), BlockPart("k", "kv_heads"), BlockPart("v", "kv_heads"))
GATE_UP = (BlockPart("gate", "ffn", "gated"), BlockPart("up", "ffn"))


def norm_params(name: str, saved: tuple[SavedTensor, ...] = ()) -> tuple[BlockParam, BlockParam]:
    """Return the rows of a norm over the hidden dim: its weight, and the bias of a LayerNorm."""
    weight = BlockParam(name, "norm", ("embed",), normalized="embed", saved=saved)
    return weight, BlockParam(f"{name}_bias", "bias", ("embed",), flag="norm_bias")


BLOCK: tuple[BlockParam, ...] = (
    *norm_params(
        "norm1",
        (
            SavedTensor("block input", "input"),
            SavedTensor("norm1 statistics", "statistics", recomputed=True),
        ),
    ),
    BlockParam(
        "qkv",
        "matrix",
        (FUSED, "embed"),
        QKV,
        saved=(
            SavedTensor("qkv input", "input", recomputed=True),
            SavedTensor("q, k, v before norms", "output", flag="qk_norm"),
            SavedTensor("q, k, v", "output"),
        ),
        fold=FoldTarget("norm1"),
    ),
    BlockParam("qkv_bias", "bias", (FUSED,), QKV, flag="qkv_bias"),
    BlockParam(
        "q_norm",
        "norm",
        ("head_dim",),
        flag="qk_norm",
        normalized="q_heads",
        saved=(SavedTensor("q norm statistics", "statistics"),),
    ),
    BlockParam(
        "k_norm",
        "norm",
        ("head_dim",),
        flag="qk_norm",
        normalized="kv_heads",
        saved=(SavedTensor("k norm statistics", "statistics"),),
    ),
    BlockParam(
        "out",
        "matrix",
        ("embed", "q_heads"),
        saved=(SavedTensor("attention output", "input"),),
        fold=FoldTarget("qkv", "v"),
    ),
    BlockParam("out_bias", "bias", ("embed",), flag="out_bias"),
    *norm_params(
        "norm2",
        (
            SavedTensor("norm2 input", "input"),
            SavedTensor("norm2 statistics", "statistics", recomputed=True),
        ),
    ),
    BlockParam(
        "gate_up",
        "matrix",
        (FUSED, "embed"),
        GATE_UP,
        saved=(
            SavedTensor("gate_up input", "input", recomputed=True),
            SavedTensor("gate_up output", "output"),
        ),
        fold=FoldTarget("norm2"),
    ),
    BlockParam("gate_up_bias", "bias", (FUSED,), GATE_UP, flag="mlp_bias"),
    BlockParam(
        "down",
        "matrix",
        ("embed", "ffn"),
        saved=(SavedTensor("down input", "input", recomputed=True),),
        fold=FoldTarget("gate_up", "up", flag="gated"),
    ),
    BlockParam("down_bias", "bias", ("embed",), flag="mlp_bias"),
)
"""Every parameter that a block can have, in the order of the model. Matrices are [out, in]."""

MATRICES = tuple(param.name for param in BLOCK if param.kind == "matrix")


def is_set(config: ModelConfig, flag: str | None) -> bool:
    """Return whether a model has a flag; None stands for one that all models have."""
    return flag is None or bool(getattr(config, flag))


def block_params(config: ModelConfig) -> tuple[BlockParam, ...]:
    """Return the parameters of a block of a model."""
    return tuple(param for param in BLOCK if is_set(config, param.flag))


def is_block_matrix(name: str) -> bool:
    """Return whether the parameter `name` of a model, such as `blocks.3.qkv`, is a matrix of a
    block."""
    unit, _, local = name.rpartition(".")
    return unit.startswith("blocks.") and local in MATRICES


def part_rows(config: ModelConfig, name: str, part: str) -> slice:
    """Return the rows of a part of the parameter `name`."""
    (param,) = (param for param in BLOCK if param.name == name)
    start = 0
    for each in param.parts_of(config):
        size = dim_size(config, each.dim)
        if each.name == part:
            return slice(start, start + size)
        start += size
    raise KeyError(f"{name} has no part {part}")


def dim_size(config: ModelConfig, dim: str) -> int:
    """Return the elements of a dim of a block's parameters."""
    return {
        "embed": config.hidden_size,
        "q_heads": config.q_size,
        "kv_heads": config.kv_size,
        "head_dim": config.head_dim,
        "ffn": config.ffn_size,
    }[dim]
