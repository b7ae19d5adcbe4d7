"""The optimizer's state in host memory or in files: the same numbers bit for bit, room for more
than memory holds."""

import errno
import gc
import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memory import forget_peak, process_bytes
from ranks import Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import Checkpoint
from shardwise.layout import Layout
from shardwise.parallel import unit as units_of_state
from shardwise.parallel.apply import apply, draw_weights
from shardwise.parallel.mesh import make_mesh
from shardwise.parallel.offload import (
    STATE_BYTES,
    MappedFiles,
    Offload,
    Where,
    check_space,
    make_offload,
)
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned
from shardwise.parallel.zero import Store
from shardwise.params import model_specs, num_params
from shardwise.train.checkpoint import load_state, save_checkpoint
from shardwise.train.loop import take_step
from tiny_training import FAMILIES, LLAMA, OPTIMIZER, RATE, digest, global_batch, part_of

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KINDS: tuple[Owned, ...] = ("master", "exp_avg", "exp_avg_sq", "gradient")
WHERE: tuple[Where, ...] = ("none", "host", "file")
MAX_NORM = 0.5


def make(
    config: ModelConfig, layout: str, rank: int, dtype: torch.dtype, offload: Offload | None
) -> Program:
    """The program of a rank with its state where `offload` has it."""
    mesh = make_mesh(Layout.parse(layout), rank, CPU)
    return apply(config, mesh, dtype, dtype, OPTIMIZER.update, offload=offload)


def step(program: Program, number: int) -> tuple[float, float]:
    mesh = program.store.mesh
    batch = part_of(*global_batch(number), mesh.layout, mesh.data.rank)
    return take_step(program, mesh, batch, RATE.at(number), MAX_NORM)


# -- the same numbers


def steps_on(
    rank: int, world: int, family: str, layout: str, precision: str, folder: Path
) -> list[object]:
    """Losses, norms, and the digest of states and gradients after three steps, for each place of
    the state."""
    reports: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            units_of_state, "STEP_ELEMENTS", 500
        )  # slices that begin and end within pages
        for where in WHERE:
            program = make(
                FAMILIES[family], layout, rank, DTYPES[precision], make_offload(where, folder)
            )
            draw_weights(program, 3)
            reports.append(([step(program, number) for number in range(3)], digest(program.store)))
    return reports


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp1"),
        ("gpt2", "dp1.z3.m2"),
        ("llama", "dp2.z1"),
        ("llama-tied", "dp3.z3"),
        ("llama", "dp4.z2.s2"),
    ],
)
def test_offload_changes_nothing(
    ranks: Ranks, tmp_path: Path, family: str, layout: str, precision: str
) -> None:
    """Losses, norms, states and gradients of three clipped steps, bit for bit."""
    for beside, *elsewhere in ranks.run(
        Layout.parse(layout).world_size, steps_on, family, layout, precision, tmp_path
    ):
        assert elsewhere == [beside, beside]
        assert len(set(beside[0])) == 3
    assert not any(tmp_path.iterdir()), "files have no names"


def states(store: Store) -> dict[tuple[str, Owned, tuple[int, ...]], Tensor]:
    return {
        (spec.name, kind, box.start): view.clone()
        for kind in KINDS[:3]
        for spec, box, view in store.owned(kind)
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("first", "then"), [("file", "none"), ("none", "file"), ("file", "file"), ("host", "file")]
)
def test_a_run_goes_on_wherever_its_state_was(
    tmp_path: Path, precision: str, first: Where, then: Where
) -> None:
    """Saved after two steps, loaded elsewhere, one more: as three steps at once without offload."""
    programs = [
        make(LLAMA, "dp1", 0, DTYPES[precision], make_offload(where, tmp_path))
        for where in ("none", first)
    ]
    for program in programs:
        draw_weights(program, 3)
    reports = [[step(program, number) for number in range(2)] for program in programs]
    assert reports[0] == reports[1]
    target = tmp_path / "step-00000002"
    straight = programs[0]
    save_checkpoint(target, programs[1].store, programs[1].store.mesh, programs[1].specs, 2)
    resumed = make(LLAMA, "dp1", 0, DTYPES[precision], make_offload(then, tmp_path))
    load_state(Checkpoint(target), resumed.store, resumed.specs)
    assert step(resumed, 2) == step(straight, 2)
    local = states(resumed.store)
    other = states(straight.store)
    assert local.keys() == other.keys()
    assert all(torch.equal(values, other[key]) for key, values in local.items())


@pytest.mark.parametrize(("precision", "without"), [("bf16", 12), ("fp32", 8)])
def test_held_bytes_tells_them_apart(tmp_path: Path, precision: str, without: int) -> None:
    size = num_params(model_specs(LLAMA))
    for where in WHERE:
        held = make(
            LLAMA, "dp1", 0, DTYPES[precision], make_offload(where, tmp_path)
        ).store.held_bytes()
        assert held["optimizer"] == (without * size if where == "none" else 0)
        assert held.get("offloaded", 0) == (0 if where == "none" else STATE_BYTES * size)
        assert held["parameters"] == held["gradients"] == DTYPES[precision].itemsize * size


# -- the files


def test_what_is_released_keeps_what_it_holds(tmp_path: Path) -> None:
    """Any part, also one that shares a page with another; memory is given back, and the file is the
    size asked for."""
    files = MappedFiles(tmp_path)
    size = (32 << 20) // 4
    flat = files.allocate(size)
    other = files.allocate(3)
    assert not flat.any() and not other.any()
    flat.copy_(torch.arange(size))
    other.fill_(7.0)
    before = process_bytes("VmRSS")
    files.release(flat[100 : size - 5000])
    assert before - process_bytes("VmRSS") > 30 << 20
    files.release(other[1:2])
    files.release(flat[5:5])
    assert torch.equal(flat, torch.arange(size).float()) and other.tolist() == [7.0] * 3


def test_nothing_is_left_open_or_on_the_disk(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    files = MappedFiles(tmp_path / "new" / "offload")
    flat = files.allocate(1000)
    held = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert len(held) == 1 and held[0].endswith("(deleted)")
    assert not any((tmp_path / "new" / "offload").iterdir())
    del flat, files
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


class FullDisk:
    """A disk with room for one shard."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, file: int, start: int, num_bytes: int) -> None:
        self.num_calls += 1
        if self.num_calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_a_sentence_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", FullDisk())
    files = MappedFiles(tmp_path)
    monkeypatch.setattr(
        mmap, "mmap", lambda file, size: bytearray(size)
    )  # the file that was not made has no room
    files.allocate(250_000_000 // 1000)
    with pytest.raises(ValueError) as refused:
        files.allocate(250_000_000 // 1000)
    assert str(refused.value) == (
        f"{tmp_path} cannot hold 0.002 GB of optimizer state: No space left on device; "
        "free space there or link the folder to another disk"
    )


def test_room_is_asked_for_before_the_start(tmp_path: Path) -> None:
    """A real refusal: the system allows this process no file of more than a megabyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        check_space(tmp_path, 1 << 20)
        with pytest.raises(
            ValueError,
            match=r"cannot hold 0.00105 GB of optimizer state: File too large; free space",
        ):
            check_space(tmp_path, (1 << 20) + 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        ValueError,
        match=r"file/offload cannot hold .*: Not a directory; free space there or link the folder",
    ):
        check_space(tmp_path / "file" / "offload", 4)

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(ValueError, match=r"cannot hold .*: Permission denied; free space"):
        check_space(tmp_path, 4)


# -- more than memory holds

WIDE = ModelConfig("llama", 6, 512, 1536, 8, 8, 64, 97, 32)
LAYER = sum(spec.numel for spec in model_specs(WIDE) if spec.unit == "blocks.0")
SIZE = num_params(model_specs(WIDE))
SLACK_BYTES = 96 << 20
"""For gradients on their way, what the products need, and the threads of the process."""


def start(where: Where, limited: bool, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, where, str(limited), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_model_larger_than_memory_takes_a_step(tmp_path: Path) -> None:
    """20 million parameters, whose states take 16 bytes each, where the system allows 4 each and 96
    MB: a step, a checkpoint and another step. Without offload it cannot begin. Resident memory
    stays below weights, gradients, the slack and the optimizer's state of one unit."""
    runs = [
        start(where, limited, tmp_path / f"{where}-{limited}")
        for where, limited in (("none", False), ("none", True), ("file", True))
    ]
    (whole, _), (_, refused), (reports, trace) = (run.communicate(timeout=120) for run in runs)
    assert [run.returncode for run in runs] == [0, 1, 0], trace
    assert "can't allocate memory" in refused
    expected = json.loads(whole)
    found = json.loads(reports)
    assert found["digests"] == expected["digests"]
    assert 4 * SIZE < found["grown_bytes"] < 4 * SIZE + STATE_BYTES * LAYER + SLACK_BYTES
    assert expected["grown_bytes"] > 16 * SIZE


def train_and_tell(where: Where, limited: bool, folder: Path) -> None:
    """Print, in a process of its own, digests of the weights, and by how much the resident peak
    grew."""
    torch.set_num_threads(1)
    step(make(LLAMA, "dp1", 0, torch.bfloat16, None), 0)  # what torch loads on first use is there
    forget_peak()
    before = process_bytes("VmHWM")
    if limited:
        allowed = process_bytes("VmData") + 4 * SIZE + SLACK_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    program = make(WIDE, "dp1", 0, torch.bfloat16, make_offload(where, folder))
    draw_weights(program, 3)
    digests = []
    for number in range(2):
        batch = part_of(*global_batch(number, 4), Layout(), 0)
        take_step(program, program.store.mesh, batch, 1e-3, MAX_NORM)
        if limited and number == 0:
            save_checkpoint(
                folder / "step-00000001", program.store, program.store.mesh, program.specs, 1
            )
        digests.append(weights_digest(program.store))
    print(json.dumps({"digests": digests, "grown_bytes": process_bytes("VmHWM") - before}))


def weights_digest(store: Store) -> str:
    found = hashlib.sha256()
    for unit in store.units.values():
        found.update(unit.weights.view(torch.uint8).numpy())
    return found.hexdigest()


if __name__ == "__main__":
    train_and_tell(sys.argv[1], sys.argv[2] == "True", Path(sys.argv[3]))  # type: ignore[arg-type]
