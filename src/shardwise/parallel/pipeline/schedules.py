"""Pipeline schedules: the order of forwards and backwards on each rank. Pure functions of sizes and
costs, which docs/schedules.md describes with pictures. Imports no torch.

p ranks, m micro-batches, v chunks. Virtual stage s is on rank s % p, so each rank has v of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import assert_never, get_args

from shardwise.config import ModelConfig
from shardwise.layout import Layout, Schedule, nearest_microbatches
from shardwise.parallel.pipeline.actions import Action, Kind, accumulate, lower, stage_pieces
from shardwise.parallel.pipeline.table import EQUAL, NO_LIMIT, Costs, Memory, Table
from shardwise.parallel.pipeline.zero_bubble import zb_auto, zb_h1, zb_h2

MOST_ACTIONS = 4_000_000
DEFAULT_LIMIT = 1.0


def pipeline_table(
    name: Schedule,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs = EQUAL,
    memory: Memory = NO_LIMIT,
) -> Table:
    """Return the table of a schedule, which a run executes, the planner prices and `shardwise
    schedule` draws.

    `costs` and `memory` affect only zb-auto, whose default limit is the memory of 1f1b. Raises
    ValueError for sizes that the schedule does not support.
    """
    check_sizes(name, stages, microbatches, chunks)
    p = stages
    m = microbatches
    v = chunks
    if name == "zb-auto":
        ranks = zb_auto(p, m, costs, (memory.limit or DEFAULT_LIMIT) * p, memory.mem_w)
    elif name == "zb-h2":
        ranks = [zb_h2(rank, p, m) for rank in range(p)]
    elif name == "zb-h1":
        ranks = [zb_h1(rank, p, m) for rank in range(p)]
    elif name == "interleaved":
        ranks = [interleaved(rank, p, m, v) for rank in range(p)]
    elif name == "gpipe":
        ranks = [gpipe(rank, m) for rank in range(p)]
    elif name == "1f1b":
        ranks = [one_f_one_b(rank, p, m) for rank in range(p)]
    else:
        assert_never(name)
    return Table(tuple(map(tuple, ranks)), tuple(stage % p for stage in range(p * v)), m)


def step_table(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    num_microbatches: int | None = None,
    overlap: bool = True,
    actions: Sequence[Action] | None = None,
) -> list[Action]:
    """Return the lowered table of one training step of pipeline rank `rank`. The run executes this
    table and the planner prices it.

    `actions` replace the schedule of the layout. Without a pipeline, `num_microbatches` limits the
    table to that many micro-batches: all that follow add the same.
    """
    if actions is None:
        actions = rank_actions(layout, rank, num_microbatches)
    return lower(actions, stage_pieces(config, layout), layout, overlap)


def rank_actions(
    layout: Layout, rank: int, num_microbatches: int | None = None
) -> tuple[Action, ...]:
    """Return the actions of a pipeline rank in one step, in order. A layout without a pipeline runs
    one micro-batch after another, `num_microbatches` of them if given."""
    if layout.schedule is None:
        return tuple(accumulate(num_microbatches or layout.microbatches))
    table = cached_table(
        layout.schedule, layout.pp, layout.microbatches, layout.chunks, layout.memory_limit
    )
    return table.ranks[rank]


@lru_cache(maxsize=8)
def cached_table(
    name: Schedule, stages: int, microbatches: int, chunks: int, memory_limit: float | None
) -> Table:
    """Return the table of a layout. Cached, since a plan needs it for every rank and zb-auto
    searches."""
    return pipeline_table(name, stages, microbatches, chunks, memory=Memory(memory_limit))


def check_sizes(name: str, p: int, m: int, v: int) -> None:
    """Raise ValueError if a schedule does not exist, or does not support these sizes."""
    if name not in get_args(Schedule):
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(get_args(Schedule))}")
    for what, number in (("stages", p), ("micro-batches", m), ("chunks", v)):
        if number < 1:
            raise ValueError(f"{what} must be at least 1, not {number}")
    if (num_actions := p * m * v * (3 if name.startswith("zb") else 2)) > MOST_ACTIONS:
        raise ValueError(
            f"{num_actions:,} actions are too many; up to {MOST_ACTIONS:,} work, so use fewer "
            "micro-batches"
        )
    if (v > 1) != (name == "interleaved"):
        other = "1f1b has one chunk" if name == "interleaved" else "interleaved has several"
        works = "2 or more work" if name == "interleaved" else "1 works"
        raise ValueError(
            f"{name} cannot have {v} chunk{'s' * (v > 1)} per rank; {works}, and {other}"
        )
    supported = nearest_microbatches(name, p, m)
    if name == "interleaved" and m != supported:
        raise ValueError(
            f"interleaved needs a multiple of its {p} stages as micro-batches, not {m}; "
            f"{supported} works"
        )
    if name == "zb-h2" and m != supported:
        raise ValueError(
            f"zb-h2 needs at least 2p - 1 micro-batches, not {m}; {supported} works, or use zb-h1"
        )


def gpipe(stage: int, m: int) -> list[Action]:
    """Return all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965)."""
    return [*all_of("F", stage, m), *all_of("B", stage, m)]


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """Return the forwards until the first reaches the last stage, then one backward after each
    forward (Narayanan et al. 2019, arXiv 1806.03377, where PipeDream runs it without a flush at the
    end of a step)."""
    return alternate(all_of("F", stage, m), all_of("B", stage, m), warmup=p - 1 - stage)


def interleaved(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Return 1F1B over v chunks per rank: p micro-batches pass through a chunk before the next
    chunk begins, and backwards take the chunks in reverse (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2.2, in Megatron's order)."""
    turns = [(chunk, first + i) for first in range(0, m, p) for chunk in range(v) for i in range(p)]
    forwards = [Action("F", chunk * p + rank, microbatch) for chunk, microbatch in turns]
    backwards = [Action("B", (v - 1 - chunk) * p + rank, microbatch) for chunk, microbatch in turns]
    return alternate(forwards, backwards, warmup=2 * (p - 1 - rank) + (v - 1) * p)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then a forward and a backward in turn, then the remaining
    backwards."""
    warmup = min(warmup, len(forwards))
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def all_of(kind: Kind, stage: int, m: int) -> list[Action]:
    """Return the actions of one kind for all micro-batches of a stage."""
    return [Action(kind, stage, microbatch) for microbatch in range(m)]
