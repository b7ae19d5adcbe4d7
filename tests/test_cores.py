"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from shardwise import environment
from shardwise.parallel.cores import usable_cores


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        (64, "max 100000", 64),
        (2, "max 100000", 2),
        (64, "400000 100000", 4),
        (64, "150000 100000", 2),
        (64, "1000 100000", 1),
        (2, "800000 100000", 2),
        (8, None, 8),
        (8, "nonsense", 8),
    ],
)
def test_affinity_and_quota_bound_the_cores(
    affinity: int, quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path, tmp_path / "none") == cores


def test_quotas_of_version_1_and_of_cgroups_above_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    membership = tmp_path / "membership"
    membership.write_text("5:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n0::/docker/a\n")
    folder = tmp_path / "cpu/docker/a"
    folder.mkdir(parents=True)
    for name, value in (("cpu.cfs_quota_us", -1), ("cpu.cfs_period_us", 100_000)):
        (folder / name).write_text(f"{value}\n")
        (folder.parent / name).write_text(f"{value}\n")
    assert usable_cores(tmp_path, membership) == 64
    (folder / "cpu.cfs_quota_us").write_text("800000\n")
    assert usable_cores(tmp_path, membership) == 8
    (folder.parent / "cpu.cfs_quota_us").write_text("300000\n")
    assert usable_cores(tmp_path, membership) == 3


def test_without_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(tmp_path, tmp_path / "none") == 6


@pytest.mark.parametrize(("value", "is_set"), [(None, False), ("", False), ("3", True)])
def test_threads_of_the_environment_are_obeyed(
    value: str | None, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert environment.sets_threads() == is_set
