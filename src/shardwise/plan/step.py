"""The step that is priced: the very table that a run executes, of one pipeline stage.

Tables of pipelines do not exist yet. Until they do a stage is priced as if its micro-batches came one after another.
"""

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.parallel.schedule import Action, Piece, accumulate, lower, model_pieces
from shardwise.params import stage_units


def stage_pieces(config: ModelConfig, layout: Layout, stage: int) -> tuple[Piece, ...]:
    """What the pipeline rank `stage` computes of the model."""
    first, *blocks, last = model_pieces(config)
    held = stage_units(config, layout, stage)
    mine = [block for block in blocks if block.name in held]
    return (*([first] if stage == 0 else []), *mine, *([last] if stage == layout.pp - 1 else []))


def step_table(
    config: ModelConfig, layout: Layout, stage: int, num_microbatches: int, overlap: bool = True
) -> list[Action]:
    """The first `num_microbatches` of a step, as if there were no more. What the others add repeats itself."""
    return lower(accumulate(num_microbatches), stage_pieces(config, layout, stage), layout, overlap)
