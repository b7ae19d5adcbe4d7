"""The unquantized weights of one rank, from whatever stores a model."""

from collections.abc import Iterable
from contextlib import closing

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import ModelSource
from shardwise.formats.reader import read_param
from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    specs: Iterable[ParamSpec],
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return the shards, by name, of the parameters `specs` on the rank at `coord`; a tied one has
    none."""
    with closing(open_weights(source, config)) as reader:
        stored = [spec for spec in specs if spec.tied_to is None]
        return {
            spec.name: read_param(reader, spec, layout, coord, dtype, device) for spec in stored
        }
