"""The pool of rank processes: groups of every size, and what a failing rank does to its peers and
to the pool."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, Ranks


def sum_over_ranks(rank: int, world_size: int, scale: torch.Tensor) -> torch.Tensor:
    x = torch.full((3,), float(rank), dtype=scale.dtype) * scale
    dist.all_reduce(x)
    return x


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def leave_without_waiting(rank: int, world_size: int) -> int:
    """Rank 0 has sent its part long before the others have read theirs."""
    x = torch.full((1 << 18,), float(rank))
    dist.broadcast(x, src=0)
    return int(x.sum())


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one gives up")
    dist.all_reduce(torch.ones(1))  # waits for a rank that never comes


def fail_while_others_wait_among_themselves(rank: int, world_size: int) -> None:
    pair = dist.new_group([1, 2])
    if rank == 0:
        raise ValueError("rank zero gives up")
    if rank == 1:
        dist.all_reduce(
            torch.ones(1), group=pair
        )  # rank 2 does not come, and neither talks to rank 0
    if rank == 2:
        signal.pause()


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        sys.exit(2)


def wait_for_a_missing_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        signal.pause()


def return_what_cannot_travel(rank: int, world_size: int) -> object:
    return lambda: rank


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    results = ranks.run(world_size, sum_over_ranks, torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    total = world_size * (world_size - 1) / 2
    expected = torch.tensor(
        [total, 2 * total, 3 * total], dtype=dtype
    )  # small integers: exact in both types
    assert len(results) == world_size
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_processes_are_started_once_and_shared_by_calls(ranks: Ranks) -> None:
    first = ranks.run(4, process_id)
    again = ranks.run(2, process_id)
    assert first[:2] == again
    assert len(set(first)) == 4
    assert os.getpid() not in first


def test_a_rank_that_is_early_waits_for_its_peers(ranks: Ranks) -> None:
    for _ in range(5):
        assert ranks.run(4, leave_without_waiting) == [0, 0, 0, 0]


def test_the_rank_that_failed_first_is_reported_and_its_waiting_peers_live(ranks: Ranks) -> None:
    before = ranks.run(4, process_id)
    started_s = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.run(4, fail_on_rank_1)
    assert caught.value.rank == 1
    first, *others = str(caught.value).split("\nthen rank ")
    assert first.startswith("rank 1 of 4 failed:\nTraceback") and first.endswith(
        "ValueError: rank one gives up"
    )
    assert "in fail_on_rank_1" in first
    assert [other[:2] for other in others] and {other[0] for other in others} == {"0", "2", "3"}
    assert time.monotonic() - started_s < 30, "the peers waited for the group's own timeout"
    assert ranks.run(4, process_id) == before


def test_ranks_that_never_answer_are_ended_and_replaced(ranks: Ranks) -> None:
    before = ranks.run(4, process_id)
    with pytest.raises(RankFailed, match="rank 0 of 3 failed") as caught:
        ranks.run(3, fail_while_others_wait_among_themselves)
    assert "then rank 2: it never answered" in str(caught.value)
    after = ranks.run(4, process_id)
    assert after[0] == before[0] and after[3] == before[3]
    assert after[2] != before[2]


def test_a_collective_that_waits_too_long_fails_with_its_own_traceback(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 0 of 2 failed:\n(?s:.*)in wait_for_a_missing_collective"
    ):
        ranks.run(2, wait_for_a_missing_collective, timeout_s=1.0)
    assert len(ranks.run(2, process_id)) == 2


def test_a_rank_that_dies_is_named_with_its_code(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="the process ended with code -9"):
        ranks.run(2, die_on_rank_1)
    assert len(ranks.run(2, process_id)) == 2


def die_before_a_group_is_formed(rank: int, world_size: int, folder: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group("gloo", meeting, timedelta(seconds=1), world_size, rank)


def test_a_new_rank_joins_one_whose_last_group_was_never_formed(
    ranks: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed):
        ranks.run(2, die_before_a_group_is_formed, tmp_path)
    assert len(ranks.run(2, process_id, timeout_s=20.0)) == 2


def test_sys_exit_and_unpicklable_values_are_failures(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="SystemExit: 2"):
        ranks.run(2, exit_on_rank_0)
    with pytest.raises(RankFailed, match="return_what_cannot_travel"):
        ranks.run(2, return_what_cannot_travel)
    assert len(ranks.run(2, process_id)) == 2


INTERRUPTED_SESSION = """
import os, pathlib, signal

def interrupt_and_hang(rank, world_size, pid_file):
    pathlib.Path(pid_file).write_text(str(os.getpid()))
    os.killpg(os.getpgrp(), signal.SIGINT)  # what a terminal does on Ctrl-C
    signal.pause()

def test_hangs(ranks):
    ranks.run(1, interrupt_and_hang, {pid_file!r})
"""


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_ends_the_ranks_with_pytest(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    pid_file = tmp_path / "pid"
    find_ranks = f"import sys\nsys.path.insert(0, {str(tests)!r})\n"
    (tmp_path / "conftest.py").write_text(find_ranks + (tests / "conftest.py").read_text())
    (tmp_path / "test_interrupted.py").write_text(
        INTERRUPTED_SESSION.format(pid_file=str(pid_file))
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
