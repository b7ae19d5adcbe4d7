"""The table of a step: what is computed in which order, and when each unit's gradient is summed."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.catalogue import CATALOGUE
from shardwise.config import ModelConfig
from shardwise.parallel.schedule import Action, Piece, accumulate, lower, model_pieces
from shardwise.params import model_specs, units

SHAPES = [CATALOGUE["gpt2"], CATALOGUE["llama-2-7b"], CATALOGUE["qwen3-0.6b"]]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    return replace(draw(st.sampled_from(SHAPES)), num_layers=draw(st.integers(1, 6)), tied=draw(st.booleans()))


def table_of(config: ModelConfig, microbatches: int) -> list[Action]:
    return lower(accumulate(microbatches), model_pieces(config))


def test_a_whole_table_written_out() -> None:
    pieces = (Piece("embed", ("embed",)), Piece("blocks.0", ("blocks.0",)), Piece("head", ("final", "embed")))
    assert [str(action) for action in lower(accumulate(2), pieces)] == [
        *("0F0:embed", "0F0:blocks.0", "0F0:head", "0B0:head", "0B0:blocks.0", "0B0:embed"),
        *("0F1:embed", "0F1:blocks.0", "0F1:head"),
        *("0B1:head", "0REDUCEfinal", "0B1:blocks.0", "0REDUCEblocks.0", "0B1:embed", "0REDUCEembed"),
    ]


@given(models(), st.integers(1, 5))
def test_every_piece_goes_up_and_down_once_a_microbatch(config: ModelConfig, microbatches: int) -> None:
    up = [piece.name for piece in model_pieces(config)]
    assert up == ["embed", *(f"blocks.{i}" for i in range(config.num_layers)), "head"]
    computed = [action for action in table_of(config, microbatches) if action.kind != "REDUCE"]
    expected = [
        Action(kind, 0, microbatch, piece)
        for microbatch in range(microbatches)
        for kind, pieces in (("F", up), ("B", up[::-1]))
        for piece in pieces
    ]
    assert computed == expected


@given(models(), st.integers(1, 5))
def test_each_unit_is_summed_once_right_after_its_last_gradient(config: ModelConfig, microbatches: int) -> None:
    table = table_of(config, microbatches)
    uses = {piece.name: piece.units for piece in model_pieces(config)}
    summed = [action.unit for action in table if action.kind == "REDUCE"]
    assert sorted(summed) == sorted(units(model_specs(config))), "each unit of state, exactly once"
    for at, action in enumerate(table):
        if action.kind == "REDUCE":
            last = max(i for i, other in enumerate(table) if other.kind == "B" and action.unit in uses[other.piece])
            between = table[last + 1 : at]
            assert last < at and all(other.kind == "REDUCE" for other in between), f"{action} is late or early"


@given(models(), st.integers(1, 5))
def test_a_tied_embedding_is_summed_at_the_very_end(config: ModelConfig, microbatches: int) -> None:
    table = table_of(replace(config, tied=True), microbatches)
    at = next(i for i, action in enumerate(table) if action.kind == "REDUCE" and action.unit == "embed")
    assert all(action.kind == "REDUCE" and action.unit == "positions" for action in table[at + 1 :])


@given(models())
def test_pieces_name_all_the_weights_they_read(config: ModelConfig) -> None:
    """Every unit is somebody's, and a tied head reads the embedding too."""
    pieces = model_pieces(config)
    assert {unit for piece in pieces for unit in piece.units} == set(units(model_specs(config)))
    assert ("embed" in pieces[-1].units) == config.tied


@pytest.mark.parametrize("module", ["shardwise.parallel.schedule"])
def test_tables_need_no_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
