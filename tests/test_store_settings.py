"""Settings of how states are reduced and stored: they reach the store, change no number, and what
is not possible is refused in one sentence."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise.train.loop as loop
from ranks import Ranks
from shardwise.commands.train import summarize_outcome
from shardwise.formats.run_checkpoint import Checkpoint, checkpoint_path
from shardwise.layout import Layout
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import make_mesh
from shardwise.parallel.offload import HostMemory, MappedFiles
from shardwise.parallel.zero import Store
from shardwise.train.loop import Outcome
from shardwise.train.metrics import Metrics
from shardwise.train.rank import make_program, train
from shardwise.train.run import start_run
from shardwise.train.settings import Settings
from shardwise.train.validate import validated_run
from tiny_training import build_data, tiny_settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("corpus"))


def store_of(settings: Settings) -> Store:
    mesh = make_mesh(Layout.parse(settings.run.layout), 0, CPU)
    store = make_program(validated_run(settings), mesh, 0).store
    assert isinstance(store, Store)
    return store


def test_settings_reach_the_store(data: Path, tmp_path: Path) -> None:
    plain = store_of(tiny_settings(data, tmp_path / "run", precision="bf16"))
    assert (plain.reduce_dtype, plain.bucket_bytes, plain.overlap, plain.offload) == (
        torch.float32,
        64 << 20,
        True,
        None,
    )
    changes: dict[str, Any] = {
        "reduction": "same",
        "bucket_bytes": 4096,
        "overlap": False,
        "offload": "host",
    }
    other = store_of(tiny_settings(data, tmp_path / "run", precision="bf16", **changes))
    assert (other.reduce_dtype, other.bucket_bytes, other.overlap) == (torch.bfloat16, 4096, False)
    assert isinstance(other.offload, HostMemory)
    mapped = store_of(tiny_settings(data, tmp_path / "run", layout="dp1.z3", offload="file"))
    assert isinstance(mapped.offload, MappedFiles) and (tmp_path / "run" / "offload").is_dir()


def run_on(rank: int, world: int, settings: Settings) -> Outcome:
    return train(Place(rank, world, CPU), validated_run(settings), 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_store_settings_change_no_number(
    ranks: Ranks, data: Path, tmp_path: Path, precision: str
) -> None:
    """Two ranks end bit for bit where they do without, whichever stage, evaluations and a
    checkpoint in between."""
    ends = []
    for number, changes in enumerate(
        (
            {"layout": "dp2.z1"},
            {"layout": "dp2.z1", "offload": "file"},
            {"layout": "dp2.z2", "overlap": False, "bucket_bytes": 4096},
            {"layout": "dp2.z3", "offload": "file", "bucket_bytes": 5000},
            {"layout": "dp2.z3.keep", "overlap": False, "offload": "host"},
        )
    ):
        settings = tiny_settings(data, tmp_path / str(number), precision=precision, **changes)
        (tmp_path / str(number)).mkdir()
        outcomes = ranks.run(2, run_on, settings)
        assert outcomes[0] == outcomes[1]
        checkpoint = Checkpoint(checkpoint_path(tmp_path / str(number), 6))
        entries = sorted(
            (e.name, e.state, e.start, e.file, e.key)
            for found in checkpoint.entries.values()
            for e in found
        )
        values = [checkpoint._files[file].get_tensor(key) for *_, file, key in entries]
        ends.append((outcomes[0], [entry[:3] for entry in entries], values))
    (outcome, places, values), *others = ends
    assert outcome.loss is not None and outcome.step == 6
    for other_outcome, other_places, other_values in others:
        assert (other_outcome, other_places) == (outcome, places)
        assert all(
            torch.equal(local, theirs) for local, theirs in zip(values, other_values, strict=True)
        )


@pytest.mark.parametrize(
    ("key", "value"), [("overlap", False), ("bucket_bytes", 4096), ("offload", "file")]
)
def test_fsdp_refuses_store_settings(data: Path, tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"run\.{key} does not apply to fsdp.*dp2\.z3"):
        validated_run(tiny_settings(data, tmp_path / "run", layout="dp2.fsdp", **{key: value}))
    validated_run(tiny_settings(data, tmp_path / "run", layout="dp2.fsdp"))


def test_a_full_disk_for_offload_is_one_sentence(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked before any rank starts, for all ranks of this machine together."""
    asked: list[int] = []

    def full(_: int, start: int, length: int) -> None:
        asked.append(length)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    settings = tiny_settings(data, tmp_path / "run", layout="dp2.z1", offload="file")
    with pytest.raises(
        ValueError, match=r"cannot hold .* GB of optimizer state: No space left on device"
    ):
        start_run(settings)
    whole = store_of(tiny_settings(data, tmp_path / "other")).held_bytes()["parameters"] // 4
    assert 12 * whole <= asked[0] <= 12 * whole + 24 * 8, "12 bytes an element, and padding"
    monkeypatch.undo()
    assert start_run(settings).step == 6, "with room it starts in the same folder"


def test_a_step_that_cannot_be_saved_ends_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is kept, and named."""
    save = loop.save

    def full(settings: Settings, program: Any, mesh: Any, step: int) -> None:
        if step > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(settings, program, mesh, step)

    monkeypatch.setattr(loop, "save", full)
    settings = tiny_settings(data, tmp_path / "run")
    outcome = start_run(settings)
    assert outcome.step == 6 and outcome.unsaved is not None and "No space left" in outcome.unsaved
    text = summarize_outcome(outcome, str(tmp_path / "run"))
    assert "step 6 was not saved" in text and "step-00000003 with `shardwise train" in text


def test_a_full_disk_between_saves_does_not_end_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that cannot be written is reported once; the run goes on and is saved."""

    class Full:
        name = "metrics.jsonl"

        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    start = Metrics.__init__

    def started(self: Metrics, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self._file.close()
        self._file = Full()  # type: ignore[assignment]

    monkeypatch.setattr(Metrics, "__init__", started)
    assert start_run(tiny_settings(data, tmp_path / "run")).unsaved is None
    assert (
        capsys.readouterr().err.count("metrics.jsonl cannot be written: No space left on device")
        == 1
    )
    assert Checkpoint(checkpoint_path(tmp_path / "run", 6)).step == 6


def test_a_failed_save_leaves_nothing_behind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial checkpoint would fill the disk that the next start needs; what a kill left is
    removed at the next start."""

    def full(path: Path, *_: Any) -> str:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = tiny_settings(data, tmp_path / "run", save_every=0)
    monkeypatch.setattr("shardwise.train.checkpoint.write_safetensors", full)
    assert start_run(settings).unsaved is not None
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "run" / "checkpoints" / ".step-00000003.partial").mkdir()
    assert start_run(settings, resume=True, warn=lambda _: None).step == 6
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006"]
