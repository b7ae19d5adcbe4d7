"""Ranks that fail in a run: all of them, and it is the run's fault, or one alone, and they are out
of step."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ranks import RankFailed, Ranks
from shardwise.layout import Layout
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.serve.engine import tensor_ranks
from shardwise.serve.engine.tensor_ranks import (
    DriverRunner,
    broadcast_command,
    failure_axis,
    run_on_all,
    worker_loop,
)


@dataclass
class Breaking:
    """A runner that breaks between two collectives where the token is 0: on all ranks, or on
    one."""

    mesh: Mesh
    alone: int | None

    def embed(self, inputs: Any) -> list[list[float]]:
        self.mesh.tp.sum(1.0)
        if inputs[0][0] == 0 and self.alone in (None, self.mesh.tp.rank):
            raise RuntimeError("it broke")
        return [self.mesh.tp.sum(float(inputs[0][0]))]


def embed_thrice(rank: int, world: int, alone: int | None) -> list[str]:
    """Run as the driver and return its results."""
    tensor_ranks.AGREE_S = 2.0 if alone is not None else 60.0
    runner: Any = Breaking(make_mesh(Layout(tp=world), rank, torch.device("cpu")), alone)
    if rank:
        worker_loop(runner)
        return []
    driver = DriverRunner(runner)
    found = []
    for token in (1, 0, 2):
        try:
            found.append(str(driver.embed([[token]])))
        except RuntimeError as error:
            if alone is not None:
                raise
            found.append(str(error))
    broadcast_command(runner.mesh.tp, None)
    return found


def test_ranks_that_fail_together_go_on(ranks: Ranks) -> None:
    assert ranks.run(3, embed_thrice, None) == [["[[3.0]]", "it broke", "[[6.0]]"], [], []]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_fails_alone_says_so(ranks: Ranks, alone: int) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, embed_thrice, alone)
    assert failed.value.rank == alone
    assert "OutOfStep: a run failed on this rank alone" in str(failed.value)
    assert "RuntimeError: it broke" in str(failed.value)


def test_one_that_has_no_others_fails_by_itself() -> None:
    agreement = failure_axis(make_mesh(Layout(), 0, torch.device("cpu")).tp)
    with pytest.raises(ZeroDivisionError):
        run_on_all(lambda: 1 // 0, agreement)
    assert run_on_all(lambda: 2, agreement) == 2
