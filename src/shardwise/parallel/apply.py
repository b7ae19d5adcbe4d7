"""From a model and a layout to what one rank runs: the only place that knows the order in which cuts are applied."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.model.init import init_weights
from shardwise.model.layers import Causal
from shardwise.model.loss import cross_entropy
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Context, MicroBatch, Pipeline, Run, Stage
from shardwise.parallel.schedule import Action, accumulate, lower, model_pieces
from shardwise.parallel.zero import Store, Update
from shardwise.params import ParamSpec, model_specs, units


@dataclass(frozen=True)
class Program:
    """What this rank runs: a store of states, the executor of its stage, and the table of one step."""

    config: ModelConfig
    specs: tuple[ParamSpec, ...]
    store: Store
    pipeline: Pipeline
    table: list[Action]


def check_trainable(layout: Layout, config: ModelConfig | None = None) -> None:
    """Raise ValueError with the first reason why `layout` cannot train (this model)."""
    for problem in layout.problems(config):
        raise ValueError(f"layout {layout}: {problem}")
    plain = Layout(dp=layout.dp, microbatches=layout.microbatches)
    if layout != plain:
        raise ValueError(f"layout {layout} can be planned but not trained yet; data parallel can: {plain}")


def apply(config: ModelConfig, mesh: Mesh, dtype: torch.dtype, grad_dtype: torch.dtype, update: Update) -> Program:
    """Build the program of this rank. Its weights are zero until `draw_weights` or a reader sets them."""
    check_trainable(mesh.layout, config)
    specs = model_specs(config)
    owned, pieces = units(specs), model_pieces(config)
    store = Store(mesh, owned, dtype, grad_dtype, update)
    names = {piece.name: tuple(spec.name for unit in piece.units for spec in owned[unit]) for piece in pieces}
    stage = Stage(piece_runs(Transformer(config)), names, functools.partial(make_context, Transformer(config), dtype))
    return Program(config, specs, store, Pipeline(stage, store), lower(accumulate(mesh.layout.microbatches), pieces))


def draw_weights(program: Program, mesh: Mesh, seed: int) -> None:
    for spec in program.specs:
        if spec.tied_to is None:
            program.store.set_weights(spec.name, init_weights(spec, mesh.layout, mesh.coord, seed, torch.float32))


def make_context(model: Transformer, dtype: torch.dtype, microbatch: MicroBatch) -> Context:
    turned = model.rotation(microbatch.positions, dtype)
    return Context(microbatch, turned, Causal(model.config, microbatch.documents))


def piece_runs(model: Transformer) -> dict[str, Run]:
    """The model as pieces that a table can name, by the names of `model_pieces`."""

    def embed(weights: Mapping[str, Tensor], x: Tensor | None, context: Context) -> Tensor:
        return model.embed(weights, context.microbatch.tokens, context.microbatch.positions)

    def block(layer: int, weights: Mapping[str, Tensor], x: Tensor | None, context: Context) -> Tensor:
        assert x is not None
        return model.block(x, layer, BlockWeights.of(weights, layer), context.turned, context.attend)

    def head(weights: Mapping[str, Tensor], x: Tensor | None, context: Context) -> Tensor:
        assert x is not None
        return cross_entropy(model.final(weights, x), weights[model.head_name], context.microbatch.targets)

    blocks = {f"blocks.{layer}": functools.partial(block, layer) for layer in range(model.config.num_layers)}
    return {"embed": embed, **blocks, "head": head}
