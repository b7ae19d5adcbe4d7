"""The table of a step: what is computed in which order, when weights are gathered and given back,
and when each unit's gradient is summed."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import Action, Piece, accumulate, lower, model_pieces
from shardwise.params import model_specs, units

SHAPES = [CATALOGUE["gpt2"], CATALOGUE["llama-2-7b"], CATALOGUE["qwen3-0.6b"]]
STAGES = ["dp2", "dp2.z1", "dp2.z2", "dp2.z3", "dp2.z3.keep", "dp4.z3.s2", "dp1.z3"]
COMPUTE = ("F", "B")


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    return replace(
        draw(st.sampled_from(SHAPES)), num_layers=draw(st.integers(1, 6)), tied=draw(st.booleans())
    )


def layouts(*stages: str) -> st.SearchStrategy[Layout]:
    """A stage with 1 to 4 micro-batches."""
    return st.builds(
        lambda stage, m: replace(Layout.parse(stage), microbatches=m),
        st.sampled_from(stages or STAGES),
        st.integers(1, 4),
    )


def table_of(config: ModelConfig, layout: Layout, overlap: bool) -> list[Action]:
    return lower(accumulate(layout.microbatches), [model_pieces(config)], layout, overlap)


def reads(config: ModelConfig, action: Action) -> tuple[str, ...]:
    """The units whose weights an action reads: the backward of a look-up, of tokens or positions,
    reads none."""
    pieces = {piece.name: piece.units for piece in model_pieces(config)}
    return (
        ()
        if action.kind not in COMPUTE or (action.kind, action.piece) == ("B", "embed")
        else pieces[action.piece]
    )


# -- written out

UNTIED = tuple(
    Piece(*piece)
    for piece in (
        ("embed", ("embed",), True),
        ("blocks.0", ("blocks.0",)),
        ("blocks.1", ("blocks.1",)),
        ("head", ("final",)),
    )
)
TIED = (*UNTIED[:-1], Piece("head", ("final", "embed")))
SHORT = {"blocks.0": "a", "blocks.1": "b", "embed": "e", "head": "h", "final": "f"}
WORDS = {"GATHER": "+", "FREE": "-", "REDUCE": "sum "}


def brief(action: Action) -> str:
    """F0e: forward of micro-batch 0 of the embedding; +a: gather block 0; -a: give it back; sum a:
    its gradient."""
    if action.kind in COMPUTE:
        return f"{action.kind}{action.microbatch}{SHORT[action.piece]}"
    return f"{WORDS[action.kind]}{SHORT[action.unit]}"


def briefly(short: str, pieces: tuple[Piece, ...] = UNTIED, overlap: bool = False) -> str:
    layout = Layout.parse(short)
    return ", ".join(
        brief(action)
        for action in lower(accumulate(layout.microbatches), [pieces], layout, overlap)
    )


WRITTEN_OUT = [
    ("dp2", UNTIED, False, "F0e, F0a, F0b, F0h, B0h, sum f, B0b, sum b, B0a, sum a, B0e, sum e"),
    ("dp2", TIED, True, "F0e, F0a, F0b, F0h, B0h, sum f, B0b, sum b, B0a, sum a, B0e, sum e"),
    ("dp2.m2", UNTIED, True,
     "F0e, F0a, F0b, F0h, B0h, B0b, B0a, B0e, F1e, F1a, F1b, F1h, B1h, sum f, B1b, sum b, B1a, "
     "sum a, B1e, sum e"),
    ("dp2.z1", UNTIED, False,
     "+e, F0e, +a, F0a, +b, F0b, +f, F0h, B0h, sum f, B0b, sum b, B0a, sum a, B0e, sum e"),
    ("dp2.z1", UNTIED, True,
     "+e, +a, F0e, +b, F0a, +f, F0b, F0h, B0h, sum f, B0b, sum b, B0a, sum a, B0e, sum e"),
    ("dp2.z1.m2", TIED, True,
     "+e, +a, F0e, +b, F0a, +f, F0b, F0h, B0h, B0b, B0a, B0e, "
     "F1e, F1a, F1b, F1h, B1h, sum f, B1b, sum b, B1a, sum a, B1e, sum e"),
    ("dp2.z2.m2", UNTIED, True,
     "+e, +a, F0e, +b, F0a, +f, F0b, F0h, B0h, sum f, B0b, sum b, B0a, sum a, B0e, sum e, "
     "F1e, F1a, F1b, F1h, B1h, sum f, B1b, sum b, B1a, sum a, B1e, sum e"),
    ("dp2.z3", UNTIED, False,
     "+e, F0e, -e, +a, F0a, -a, +b, F0b, -b, +f, F0h, B0h, sum f, -f, +b, B0b, sum b, -b, +a, "
     "B0a, sum a, -a, "
     "B0e, sum e"),
    ("dp2.z3", UNTIED, True,
     "+e, +a, F0e, -e, +b, F0a, -a, +f, F0b, -b, F0h, +b, B0h, sum f, -f, +a, B0b, sum b, -b, "
     "B0a, sum a, -a, "
     "B0e, sum e"),
    ("dp2.z3", TIED, True,
     "+e, +a, F0e, -e, +b, F0a, -a, +e, +f, F0b, -b, F0h, +b, B0h, sum f, -e, -f, +a, B0b, sum b, "
     "-b, B0a, sum a, -a, "
     "B0e, sum e"),
    ("dp2.z3.m2", UNTIED, False,
     "+e, F0e, -e, +a, F0a, -a, +b, F0b, -b, +f, F0h, B0h, sum f, -f, +b, B0b, sum b, -b, +a, "
     "B0a, sum a, -a, "
     "B0e, sum e, "
     "+e, F1e, -e, +a, F1a, -a, +b, F1b, -b, +f, F1h, B1h, sum f, -f, +b, B1b, sum b, -b, +a, "
     "B1a, sum a, -a, "
     "B1e, sum e"),
    ("dp2.z3.keep", UNTIED, False,
     "+e, F0e, -e, +a, F0a, +b, F0b, +f, F0h, B0h, sum f, -f, B0b, sum b, -b, B0a, sum a, -a, "
     "B0e, sum e"),
    ("dp2.z3.keep.m2", TIED, True,
     "+e, +a, F0e, +b, F0a, +f, F0b, F0h, B0h, sum f, -e, -f, B0b, sum b, -b, B0a, sum a, -a, +e, "
     "B0e, sum e, "
     "+a, F1e, +b, F1a, +f, F1b, F1h, B1h, sum f, -e, -f, B1b, sum b, -b, B1a, sum a, -a, B1e, "
     "sum e"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("short", "pieces", "overlap", "expected"),
    WRITTEN_OUT,
    ids=[
        f"{short}-{'tied' if pieces is TIED else 'untied'}-{overlap}"
        for short, pieces, overlap, _ in WRITTEN_OUT
    ],
)
def test_whole_tables(short: str, pieces: tuple[Piece, ...], overlap: bool, expected: str) -> None:
    """In stage 3 the head stays from its forward to its backward, since nothing comes between; a
    block only with `keep`. The backward of the embedding reads nothing, so nothing is gathered for
    it."""
    assert briefly(short, pieces, overlap) == expected


def test_actions_as_strings() -> None:
    table = lower(accumulate(1), [UNTIED[:1]], Layout.parse("dp2.z3"), overlap=False)
    assert [str(action) for action in table] == [
        "0GATHERembed",
        "0F0:embed",
        "0FREEembed",
        "0B0:embed",
        "0REDUCEembed",
    ]


# -- for any model


@given(models(), layouts(), st.booleans())
def test_every_piece_runs_once_up_and_down_per_microbatch(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    up = [piece.name for piece in model_pieces(config)]
    assert up == ["embed", *(f"blocks.{i}" for i in range(config.num_layers)), "head"]
    computed = [action for action in table_of(config, layout, overlap) if action.kind in COMPUTE]
    expected = [
        Action(kind, 0, microbatch, piece)
        for microbatch in range(layout.microbatches)
        for kind, pieces in (("F", up), ("B", up[::-1]))
        for piece in pieces
    ]
    assert computed == expected


@given(models(), layouts(), st.booleans())
def test_each_unit_is_reduced_right_after_its_last_gradient(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    """Once a step where gradients are whole, once a micro-batch where they are cut: in the order of
    the backward."""
    table = table_of(config, layout, overlap)
    uses = {piece.name: piece.units for piece in model_pieces(config)}
    each = layout.shards("gradients")
    sums = [(action.microbatch, action.unit) for action in table if action.kind == "REDUCE"]
    microbatches = range(layout.microbatches) if each else [layout.microbatches - 1]
    assert sorted(sums) == sorted(
        (m, unit) for m in microbatches for unit in units(model_specs(config))
    )
    for at, action in enumerate(table):
        if action.kind == "REDUCE":
            contributions = [
                i
                for i, other in enumerate(table)
                if other.kind == "B"
                and action.unit in uses[other.piece]
                and (other.microbatch == action.microbatch or not each)
            ]
            between = table[contributions[-1] + 1 : at]
            assert contributions[-1] < at, f"{action} comes before a contribution"
            assert all(other.kind == "REDUCE" for other in between), f"{action} is late"


@given(models(), layouts(), st.booleans())
def test_a_tied_embedding_is_reduced_last(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    table = table_of(replace(config, tied=True), layout, overlap)
    at = max(
        i for i, action in enumerate(table) if action.kind == "REDUCE" and action.unit == "embed"
    )
    assert all(action.kind == "REDUCE" and action.unit == "positions" for action in table[at + 1 :])


def lifetimes(
    config: ModelConfig, layout: Layout, overlap: bool
) -> Iterator[tuple[str, int, int, list[int]]]:
    """(unit, its GATHER, its FREE or the end, the places of its uses in between)."""
    table = table_of(config, layout, overlap)
    for unit in units(model_specs(config)):
        held = ("GATHER", "FREE")
        turns = [
            (at, action.kind)
            for at, action in enumerate(table)
            if action.unit == unit and action.kind in held
        ]
        used = [at for at, action in enumerate(table) if unit in reads(config, action)]
        starts = [at for at, kind in turns if kind == "GATHER"]
        ends = [at for at, kind in turns if kind == "FREE"] or [len(table)]
        kinds = ["GATHER", "FREE"] * len(starts) if layout.shards("parameters") else ["GATHER"]
        assert [kind for _, kind in turns] == kinds, f"GATHER and FREE of {unit} take turns"
        covered = []
        for start, end in zip(starts, ends, strict=True):
            between = [at for at in used if start < at < end]
            covered += between
            yield unit, start, end, between
        assert covered == used, f"every use of {unit} lies between a GATHER and a FREE"


@given(
    models(),
    layouts("dp2.z1", "dp2.z2", "dp2.z3", "dp2.z3.keep", "dp4.z3.s2", "dp1.z1"),
    st.booleans(),
)
def test_weights_are_gathered_for_every_use_and_no_longer(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    """A FREE follows the last use at once; a GATHER comes right before the first, with overlap just
    one action of compute before that (the very first has none to run beside)."""
    table = table_of(config, layout, overlap)
    for unit, start, end, uses in lifetimes(config, layout, overlap):
        assert uses, f"{unit} is gathered for something"
        computed = sum(action.kind in COMPUTE for action in table[start : uses[0]])
        first_of_all = not any(action.kind in COMPUTE for action in table[:start]) and uses[
            0
        ] == first_compute(table)
        assert computed == (1 if overlap and not first_of_all else 0), (
            f"{unit} is gathered too early or late"
        )
        if layout.shards("parameters"):
            assert not any(action.kind in COMPUTE for action in table[uses[-1] + 1 : end]), (
                f"{unit} is freed late"
            )
        else:
            assert end == len(table)


def first_compute(table: list[Action]) -> int:
    return next(at for at, action in enumerate(table) if action.kind in COMPUTE)


@given(models(), layouts("dp2.z3", "dp4.z3.s2", "dp1.z3"), st.booleans())
def test_stage_3_gathers_again_unless_the_next_action_shares(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    """Within a lifetime each use is neighbour to the next; between two lifetimes some other action
    computes."""
    computed = [action for action in table_of(config, layout, overlap) if action.kind in COMPUTE]
    table = table_of(config, layout, overlap)
    place = {at: sum(action.kind in COMPUTE for action in table[:at]) for at in range(len(table))}
    ended: dict[str, int] = {}
    for unit, _, _, uses in lifetimes(config, layout, overlap):
        places = [place[use] for use in uses]
        assert places == list(range(places[0], places[0] + len(places)))
        assert unit not in ended or places[0] > ended[unit] + 1, (
            f"{unit} is gathered twice for neighbours"
        )
        ended[unit] = places[-1]
    assert len(computed) == place[len(table) - 1] + (table[-1].kind in COMPUTE)


@given(models(), layouts("dp2.z3.keep", "dp4.z3.s2.keep"), st.booleans())
def test_keep_gathers_a_unit_once_per_microbatch(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    """At most: what a micro-batch uses last and the next first stays."""
    table = table_of(config, layout, overlap)
    lives: dict[str, list[set[int]]] = {}
    for unit, _, _, uses in lifetimes(config, layout, overlap):
        lives.setdefault(unit, []).append({table[use].microbatch for use in uses})
    for unit, found in lives.items():
        for microbatch in range(layout.microbatches):
            assert sum(microbatch in microbatches for microbatches in found) == 1, unit


@given(models(), layouts("dp2.z1", "dp2.z2"), st.booleans())
def test_stages_1_and_2_gather_each_unit_once_per_step(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    gathered = [
        action.unit for action in table_of(config, layout, overlap) if action.kind == "GATHER"
    ]
    assert sorted(gathered) == sorted(units(model_specs(config)))


@given(models(), st.integers(1, 4), st.booleans())
def test_nothing_is_gathered_without_sharding(
    config: ModelConfig, microbatches: int, overlap: bool
) -> None:
    table = table_of(config, Layout(dp=2, microbatches=microbatches), overlap)
    assert {action.kind for action in table} == {"F", "B", "REDUCE"}


@given(models(), layouts(), st.booleans())
def test_nothing_stays_gathered_at_the_end_of_stage_3(
    config: ModelConfig, layout: Layout, overlap: bool
) -> None:
    """Nor of its evaluation, a forward alone."""
    for table in (
        table_of(config, layout, overlap),
        lower([Action("F", 0)], [model_pieces(config)], layout, overlap),
    ):
        open_now: set[str] = set()
        for action in table:
            if action.kind == "GATHER":
                assert action.unit not in open_now
                open_now.add(action.unit)
            elif action.kind == "FREE":
                open_now.remove(action.unit)
            elif layout.shard != "none":
                assert set(reads(config, action)) <= open_now, action
        assert not open_now or not layout.shards("parameters")


@given(models())
def test_pieces_name_all_the_weights_they_read(config: ModelConfig) -> None:
    """Every unit is somebody's, and a tied head reads the embedding too."""
    pieces = model_pieces(config)
    assert {unit for piece in pieces for unit in piece.units} == set(units(model_specs(config)))
    assert ("embed" in pieces[-1].units) == config.tied


@pytest.mark.parametrize("module", ["shardwise.parallel.pipeline.actions"])
def test_tables_import_no_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
