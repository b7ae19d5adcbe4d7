"""Assembly of the program of one rank from a model and a layout.

Only this file fixes the order in which the kinds of sharding are applied.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.reader import Reader, read_box
from shardwise.kernels.interface import CausalAttention, TrainingKernels
from shardwise.kernels.training_registry import training_kernels
from shardwise.layout import Layout
from shardwise.model.batch import MicroBatch
from shardwise.model.init import init_box
from shardwise.model.loss import cross_entropy
from shardwise.model.seams import UNSHARDED, Seams
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.parallel.context import local_part, make_attend
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.offload import Offload
from shardwise.parallel.pipeline.actions import (
    Action,
    Piece,
    lower,
    model_pieces,
    rank_pieces,
    stage_pieces,
)
from shardwise.parallel.pipeline.executor import Context, Pipeline, Run, Work
from shardwise.parallel.pipeline.schedules import rank_actions, step_table
from shardwise.parallel.pipeline.table import Table
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Update
from shardwise.parallel.tensor import TensorSeams
from shardwise.parallel.zero import BUCKET_BYTES, Store
from shardwise.params import ParamSpec, model_specs, stage_units, units


def check_trainable(layout: Layout, config: ModelConfig | None = None) -> None:
    """Raise ValueError with the first problem that prevents training in `layout` (of this
    model)."""
    for problem in layout.problems(config):
        raise ValueError(f"layout {layout}: {problem}")
    if layout.schedule is not None:
        rank_actions(layout, 0)  # zb-auto may find no order within its memory limit


def apply(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    update: Update,
    reduce_dtype: torch.dtype = torch.float32,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    offload: Offload | None = None,
    schedule: Table | None = None,
) -> Program:
    """Build the program of this rank. Its weights are undefined until `draw_weights` or
    `read_weights`.

    `schedule` replaces that of the layout. The other arguments are those of `Store`. Raises
    ValueError if the layout cannot train the model.
    """
    check_trainable(mesh.layout, config)
    assert mesh.axes["kv_replica"].size == mesh.layout.kv_replicas(config.num_kv_heads), (
        "the mesh was built for a different model"
    )
    specs = model_specs(config)
    layout = mesh.layout
    kernels = training_kernels(mesh.device, dtype)
    model = Transformer(config, kernels, seams_of(mesh), layout.recompute == "selective")
    context = functools.partial(make_context, model, mesh, dtype, kernels.attention)
    if layout.shard == "fsdp":  # FSDP has its own buckets and order
        assert offload is None
        from shardwise.parallel.fsdp import make_fsdp

        fsdp = make_fsdp(
            model, kernels, specs, mesh, dtype, grad_dtype, update, context, reduce_dtype
        )
        return Program(config, specs, *fsdp, kernels.name)
    names = stage_units(config, layout, mesh.coord.pp)
    store = Store(
        mesh,
        {name: of_unit for name, of_unit in units(specs).items() if name in names},
        dtype,
        grad_dtype,
        update,
        reduce_dtype,
        bucket_bytes,
        overlap,
        offload,
        tied=frozenset({"embed"} if config.tied else ()),
    )
    if mesh.coord.pp == layout.pp - 1:
        head = store.weights([model.head_name])[model.head_name]
        head.grad_dtype = grad_dtype  # the loss sums its gradient over chunks of tokens
    stages = stage_pieces(config, layout)
    actions = schedule.ranks[mesh.coord.pp] if schedule else None
    table = step_table(config, layout, mesh.coord.pp, overlap=overlap, actions=actions)
    work = rank_work(
        model, kernels, specs, mesh, table, rank_pieces(stages, layout, mesh.coord.pp), context
    )
    forward = [Action("F", stage) for stage in range(mesh.coord.pp, len(stages), layout.pp)]
    return Program(
        config,
        specs,
        store,
        Pipeline(work, store, mesh),
        table,
        lower(forward, stages, layout, overlap),
        kernels.name,
    )


def rank_work(
    model: Transformer,
    kernels: TrainingKernels,
    specs: tuple[ParamSpec, ...],
    mesh: Mesh,
    table: Sequence[Action],
    pieces: Sequence[Piece],
    context: Callable[[MicroBatch], Context],
) -> Work:
    """Return what the executor of this rank needs to run `pieces` by a table."""
    by_unit = units(specs)
    recompute = mesh.layout.recompute
    names = {
        piece.name: tuple(spec.name for unit in piece.units for spec in by_unit[unit])
        for piece in pieces
    }
    splits = any(action.kind == "I" for action in table)

    def stage_buffer(context: Context) -> Tensor:
        tokens = model.seams.local_tokens(context.microbatch.tokens)
        return torch.empty(
            *tokens.shape, model.config.hidden_size, dtype=context.dtype, device=tokens.device
        )

    return Work(
        {piece.name: piece for piece in pieces},
        piece_runs(model, kernels),
        names,
        context,
        stage_buffer,
        pieces[0].name,
        recomputed=frozenset(names) - {"embed", "head"} if recompute == "full" else frozenset(),
        deferred=frozenset(spec.name for spec in specs if splits and is_deferred(spec)),
    )


def is_deferred(spec: ParamSpec) -> bool:
    """Return whether W computes the gradient of a parameter in a split backward: matrices of
    blocks. The gradient of the embedding needs no product, and the loss computes that of the
    head."""
    return spec.kind == "matrix"


def seams_of(mesh: Mesh) -> Seams:
    """Return the TP hooks of a mesh."""
    return TensorSeams(mesh.tp, mesh.layout.sequence_parallel) if mesh.tp.size > 1 else UNSHARDED


def draw_weights(program: Program, seed: int) -> None:
    """Initialize the weights that this rank owns. Nothing else is initialized."""
    for spec, box, view in program.store.owned("master"):
        init_box(view, spec, box, seed)
    program.store.refresh()


def read_weights(program: Program, reader: Reader) -> None:
    """Read the weights that this rank owns. No other part of the model is read."""
    for spec, box, view in program.store.owned("master"):
        read_box(reader, spec, box, view)
    program.store.refresh()


def make_context(
    model: Transformer,
    mesh: Mesh,
    dtype: torch.dtype,
    attention: CausalAttention,
    microbatch: MicroBatch,
) -> Context:
    """Return what the pieces need of a micro-batch of whole sequences: this rank's tokens, their
    RoPE tables, and attention."""
    local = local_part(microbatch, mesh.layout, mesh.cp.rank)
    attend = make_attend(model.config, mesh.layout, mesh.cp, microbatch.documents, attention)
    return Context(local, model.rope_tables(local.positions, dtype), attend, dtype)


def piece_runs(model: Transformer, kernels: TrainingKernels) -> dict[str, Run]:
    """Return the function of each piece of the model, by the names of `model_pieces`."""

    def embed(weights: Mapping[str, Tensor], x: Tensor | None, context: Context) -> Tensor:
        return model.embed(
            weights, context.microbatch.tokens, context.microbatch.positions, sparse_grad=True
        )

    def block(
        layer: int, weights: Mapping[str, Tensor], x: Tensor | None, context: Context
    ) -> Tensor:
        assert x is not None
        return model.block(x, layer, BlockWeights.of(weights, layer), context.rope, context.attend)

    def head(weights: Mapping[str, Tensor], x: Tensor | None, context: Context) -> Tensor:
        assert x is not None
        return cross_entropy(
            model.final(weights, x),
            weights[model.head_name],
            context.microbatch.targets,
            kernels.cross_entropy_grad,
            model.seams,
            model.config.vocab_size,
        )

    first, *blocks, last = (piece.name for piece in model_pieces(model.config))
    runs = {name: functools.partial(block, layer) for layer, name in enumerate(blocks)}
    return {first: embed, **runs, last: head}
