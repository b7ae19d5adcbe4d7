"""The table of one step as the planner counts on it: that of the run, for any pipeline rank."""

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import (
    Action,
    accumulate,
    lower,
    model_pieces,
    stage_pieces,
)
from shardwise.parallel.pipeline.schedules import rank_actions


def step_table(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    num_microbatches: int | None = None,
    overlap: bool = True,
) -> list[Action]:
    """A step of a rank. Without a pipeline `num_microbatches` may ask for the first of them, as if
    there were no more: what the others add repeats itself."""
    if layout.pp > 1:
        return lower(rank_actions(layout, stage), stage_pieces(config, layout), layout, overlap)
    return lower(
        accumulate(num_microbatches or layout.microbatches), [model_pieces(config)], layout, overlap
    )
