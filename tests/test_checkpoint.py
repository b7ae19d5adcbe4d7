"""Checkpoints: a run goes on bit for bit, at any layout, and a damaged or unfinished one loses
nothing but itself."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import shardwise.train.checkpoint as writing
from memory import forget_peak, process_bytes
from ranks import RankFailed, Ranks
from shardwise.config import ModelConfig
from shardwise.formats.run_checkpoint import (
    STATES,
    Checkpoint,
    checkpoint_path,
    list_checkpoints,
    newest_checkpoint,
)
from shardwise.formats.safetensors import SLICE_BYTES, Shapes, write_safetensors
from shardwise.layout import Layout
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.zero import Store
from shardwise.params import Init, ParamSpec, model_specs, units
from shardwise.shards import boxes
from shardwise.train.checkpoint import load_state, remove_old, save_checkpoint
from shardwise.train.loop import Outcome
from shardwise.train.optim import AdamW
from shardwise.train.rank import make_program, train
from shardwise.train.run import prepare_folder
from shardwise.train.settings import Run, Settings
from shardwise.train.validate import validated_run
from tiny_training import build_data, seeded, tiny_settings, whole
from whole_weights import load_weights

CPU = torch.device("cpu")
State = dict[tuple[str, str], Tensor]
TIMED = ("tokens_per_s", "mfu", "peak_bytes", "comm_bytes")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def train_on(rank: int, world: int, run: Run, resumed: int) -> Outcome:
    return train(Place(rank, world, CPU), run, resumed)


def trained(ranks: Ranks, settings: Settings, resumed: int = 0) -> Outcome:
    """Train from nothing, or go on, on the ranks of the layout; each call builds everything
    anew."""
    run = validated_run(settings)
    Path(settings.run.folder).mkdir(exist_ok=True)
    first: Outcome = ranks.run(run.layout.world_size, train_on, run, resumed)[0]
    return first


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, but for what a clock or the machine decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def whole_state(path: Path, config: ModelConfig) -> State:
    checkpoint = Checkpoint(path)
    one = Layout()
    return {
        (spec.name, state): torch.cat(
            [checkpoint.read(spec, state, box) for box in boxes(spec, one, one.coord(0))]
        )
        for spec in model_specs(config)
        for state in STATES
        if spec.tied_to is None
    }


def cut_off(whole: Path, into: Path, step: int) -> None:
    """The folder as a kill some steps after the checkpoint of `step` leaves it: metrics go further
    than it does."""
    checkpoints = into / "checkpoints"
    shutil.copytree(checkpoint_path(whole, step), checkpoints / checkpoint_path(whole, step).name)
    (into / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text() + '{"step": 7, "lo')


# -- going on


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dp1.m2", "dp2", "dp2.z3"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    ranks: Ranks, data: Path, tmp_path: Path, layout: str, precision: str
) -> None:
    """Six steps at once, or three, an end and three more: the same files and the same numbers."""
    straight = tmp_path / "straight"
    resumed = tmp_path / "resumed"
    whole = trained(ranks, tiny_settings(data, straight, layout=layout, precision=precision))
    cut_off(straight, resumed, 3)
    again = trained(ranks, tiny_settings(data, resumed, layout=layout, precision=precision), 3)
    assert again == whole and whole.step == 6
    assert metric_rows(resumed) == metric_rows(straight)
    assert [row["step"] for row in metric_rows(straight) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    one = checkpoint_path(straight, 6)
    other = checkpoint_path(resumed, 6)
    assert sorted(path.name for path in one.iterdir()) == sorted(
        path.name for path in other.iterdir()
    )
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_a_finished_run_is_not_changed(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    settings = tiny_settings(data, tmp_path / "run")
    trained(ranks, settings)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert trained(ranks, settings, 6) == Outcome(6, None, None)
    assert {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    } == before


def state_on(rank: int, world: int, settings: Settings, config: ModelConfig, step: int) -> State:
    mesh = make_mesh(Layout.parse(settings.run.layout), rank, CPU)
    program = make_program(Run(settings, mesh.layout, config, None), mesh, step)
    store = program.store
    found = {
        (name, kind): x
        for kind in STATES
        for name, x in whole(store, mesh, program.specs, kind).items()
    }
    for name, unit in store.units.items():
        store.gather(name)
        store.need([name])
        for of, weight in store.weights(param.spec.name for param in unit.ranges).items():
            assert torch.equal(weight, found[of, "master"].to(weight.dtype)), (
                f"{of} was not brought in line"
            )
    assert store.num_steps == step
    return found


@pytest.mark.parametrize(
    ("writer", "layout"),
    [
        ("dp2", "dp1"),
        ("dp2", "dp4.z2"),
        ("dp4.z3", "dp2.m2"),
        ("dp2.z1", "dp4.z3.s2"),
        ("dp4.z2.s2", "dp1.z3"),
    ],
)
def test_any_layout_resumes_from_any(
    ranks: Ranks, data: Path, tmp_path: Path, writer: str, layout: str
) -> None:
    """More or fewer ranks load all that some ranks saved, and their next steps are the same to
    1e-5."""
    written = tmp_path / "written"
    other = tmp_path / "other"
    settings = tiny_settings(data, written, layout=writer, precision="fp32")
    config = validated_run(settings).config
    trained(ranks, settings)
    cut_off(written, other, 3)
    elsewhere = tiny_settings(data, other, layout=layout)
    expected = whole_state(checkpoint_path(written, 3), config)
    assert any(state != "master" and bool(values.any()) for (_, state), values in expected.items())
    for found in ranks.run(Layout.parse(layout).world_size, state_on, elsewhere, config, 3):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    trained(ranks, elsewhere, 3)
    for mine, theirs in zip(metric_rows(other), metric_rows(written), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_checkpoint_loads_as_a_model(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    settings = tiny_settings(data, tmp_path / "run", layout="dp2")
    run = validated_run(settings)
    prepare_folder(run, False, pytest.fail)
    trained(ranks, settings)
    one = Layout()
    weights = load_weights(
        tmp_path / "run", run.config, model_specs(run.config), one, one.coord(0), torch.float32
    )
    expected = whole_state(checkpoint_path(tmp_path / "run", 6), run.config)
    assert weights.keys() == {name for name, _ in expected}
    assert all(torch.equal(weights[name], expected[name, "master"]) for name in weights)


# -- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def drop_entry(path: Path) -> None:
    index = json.loads(path.read_text())
    index["entries"].pop()
    path.write_text(json.dumps(index))


WEIGHTS = "rank-00000.safetensors"
INDEX = "index.json"
DAMAGES: list[tuple[Callable[[Path], Any], str, str]] = [
    (truncate, WEIGHTS, "bytes, not "),
    (flip, WEIGHTS, "does not match its checksum"),
    (Path.unlink, WEIGHTS, WEIGHTS),
    (empty, WEIGHTS, "has 0 bytes, not "),
    (Path.unlink, INDEX, INDEX),
    (flip, INDEX, "does not match its checksum"),
    (truncate, INDEX, "does not match its checksum"),
    (empty, INDEX, "does not match its checksum"),
    (drop_entry, INDEX, "does not match its checksum"),
    (Path.unlink, "index.sha256", "index.sha256"),
]


@pytest.fixture(scope="module")
def whole_run(
    data: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = tiny_settings(data, folder, eval_every=0)
    run = validated_run(settings)
    prepare_folder(run, False, pytest.fail)
    trained(ranks, settings)
    return folder, run.config


@pytest.mark.parametrize(("damage", "name", "said"), DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    whole_run: tuple[Path, ModelConfig],
    tmp_path: Path,
    damage: Callable[[Path], Any],
    name: str,
    said: str,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_run[0], folder)
    damage(checkpoint_path(folder, 6) / name)
    warnings: list[str] = []
    assert newest_checkpoint(folder, warnings.append).step == 3
    (warning,) = warnings
    assert (
        "step-00000006 is damaged" in warning
        and said in warning
        and "trying the one before" in warning
    )
    assert "\n" not in warning
    damage(checkpoint_path(folder, 3) / name)
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        newest_checkpoint(folder, warnings.append)
    assert len(warnings) == 3


def test_a_checkpoint_of_another_version_is_named(
    whole_run: tuple[Path, ModelConfig], tmp_path: Path
) -> None:
    path = tmp_path / "step-00000006"
    shutil.copytree(checkpoint_path(whole_run[0], 6), path)
    index = json.loads((path / INDEX).read_text()) | {"format_version": 99}
    (path / INDEX).write_text(json.dumps(index))
    (path / "index.sha256").write_text(writing.checksum(path / INDEX))
    with pytest.raises(
        ValueError, match="has format version 99; this version of shardwise reads 1"
    ):
        Checkpoint(path)


def load_on(rank: int, world: int, path: Path, settings: Settings, config: ModelConfig) -> None:
    mesh = make_mesh(Layout(), rank, CPU)
    program = make_program(Run(settings, mesh.layout, config, None), mesh, 0)
    load_state(Checkpoint(path), program.store, program.specs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, "lacks exp_avg of blocks.2.down: it is of another model"),
        ({"num_layers": 1}, "has unknown exp_avg of blocks.1.down: it is of another model"),
        (
            {"ffn_size": 32},
            r"stores blocks.0.gate_up as \(\d+, \d+\), not \(64, \d+\): it is of another model",
        ),
    ],
)
def test_a_missing_or_odd_tensor_is_named(
    ranks: Ranks,
    data: Path,
    whole_run: tuple[Path, ModelConfig],
    tmp_path: Path,
    changes: dict[str, int],
    said: str,
) -> None:
    settings = tiny_settings(data, tmp_path / "run", **changes)
    path = checkpoint_path(whole_run[0], 6)
    with pytest.raises(RankFailed, match=rf"ValueError: checkpoint .*step-00000006 {said}"):
        ranks.run(1, load_on, path, settings, validated_run(settings).config)


# -- saving that fails


class KilledWhenRenamed:
    """A path whose folder is whole but for its name when the process dies."""

    def __init__(self, publish: Callable[..., None]) -> None:
        self.publish = publish

    def __call__(
        self, aside: Path, target: Path, layout: str, specs: tuple[ParamSpec, ...], step: int
    ) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        self.publish(aside, target, layout, specs, step)


def train_until_killed(rank: int, world: int, settings: Settings, config: ModelConfig) -> None:
    writing.publish = KilledWhenRenamed(writing.publish)
    train_on(rank, world, Run(settings, Layout.parse(settings.run.layout), config, None), 0)


def test_a_kill_while_saving_leaves_the_previous_checkpoint(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """All is written but the name; the run then goes on, ends where it would have, and clears what
    was left."""
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    trained(ranks, tiny_settings(data, straight))
    settings = tiny_settings(data, killed, keep_checkpoints=2)
    run = validated_run(settings)
    prepare_folder(run, False, pytest.fail)
    with pytest.raises(RankFailed, match="ended with code -9"):
        ranks.run(1, train_until_killed, settings, run.config)
    partial = killed / "checkpoints" / ".step-00000006.partial"
    assert (partial / WEIGHTS).is_file()
    assert [path.name for path in list_checkpoints(killed / "checkpoints")] == ["step-00000003"]
    assert prepare_folder(run, True, pytest.fail) == 3
    trained(ranks, settings, 3)
    assert metric_rows(killed) == metric_rows(straight)
    assert not partial.exists()
    one, other = (
        whole_state(checkpoint_path(folder, 6), run.config) for folder in (straight, killed)
    )
    assert all(torch.equal(one[key], other[key]) for key in one)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def real_limit(path: Path, shapes: Shapes, tensors: Iterable[Tensor]) -> str:
    """Write as ever, but the system allows this process no file above 4 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        return write_safetensors(path, shapes, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


BREAKERS = {
    "disk full": ("write_safetensors", full_disk, errno.ENOSPC),
    "file too large": ("write_safetensors", real_limit, errno.EFBIG),
    "no room for the index": ("publish", full_disk, errno.ENOSPC),
}


def save_on(
    rank: int, world: int, folder: Path, settings: Settings, config: ModelConfig, breaker: str
) -> object:
    """Save step 1, then fail to save step 2; what each rank then sees."""
    mesh = make_mesh(Layout.parse(settings.run.layout), rank, CPU)
    program = make_program(Run(settings, mesh.layout, config, None), mesh, 0)

    def save(step: int) -> None:
        save_checkpoint(folder / f"step-{step:08d}", program.store, mesh, program.specs, step)

    save(1)
    name, broken, _ = BREAKERS[breaker]
    working = getattr(writing, name)
    setattr(writing, name, broken)
    try:
        save(2)
    except OSError as error:
        failure = error.errno, str(error)
    finally:
        setattr(writing, name, working)
    kept = [path.name for path in list_checkpoints(folder)]
    mesh.world.barrier()
    save(2)
    return failure, kept, [path.name for path in list_checkpoints(folder)]


@pytest.mark.parametrize("breaker", BREAKERS)
@pytest.mark.parametrize("layout", ["dp1", "dp3"])
def test_a_full_disk_is_an_error_on_every_rank(
    ranks: Ranks, data: Path, tmp_path: Path, layout: str, breaker: str
) -> None:
    """None waits for the one that failed, the checkpoint before is whole, and a later save
    works."""
    settings = tiny_settings(data, tmp_path / "run", layout=layout, global_batch=6)
    config = validated_run(settings).config
    number = BREAKERS[breaker][2]
    answers = ranks.run(
        Layout.parse(layout).world_size, save_on, tmp_path, settings, config, breaker, timeout_s=20
    )
    for rank, ((code, message), kept, later) in enumerate(answers):
        assert code == number
        if rank > 0:
            reason = f"rank 0 could not write its part of the checkpoint: {os.strerror(number)}"
            assert message == f"[Errno {number}] {reason}"
        assert kept == ["step-00000001"]
        assert later == ["step-00000001", "step-00000002"]
    assert Checkpoint(tmp_path / "step-00000001").step == 1
    assert Checkpoint(tmp_path / "step-00000002").step == 2


def save_below_a_file(
    rank: int, world: int, folder: Path, settings: Settings, config: ModelConfig
) -> int | None:
    mesh = make_mesh(Layout.parse(settings.run.layout), rank, CPU)
    program = make_program(Run(settings, mesh.layout, config, None), mesh, 0)
    try:
        save_checkpoint(folder / "step-00000001", program.store, mesh, program.specs, 1)
    except OSError as error:
        return error.errno
    return None


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings = tiny_settings(data, tmp_path / "run", layout="dp2")
    answers = ranks.run(
        2,
        save_below_a_file,
        tmp_path / "file" / "checkpoints",
        settings,
        validated_run(settings).config,
    )
    assert answers == [errno.ENOTDIR, errno.ENOTDIR]


def test_diverging_keeps_the_last_checkpoint_and_takes_no_step(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """A rate that throws the weights out of range: the step after it has no finite gradient, on all
    ranks alike."""
    settings = tiny_settings(
        data, tmp_path / "run", layout="dp2", lr=1e30, warmup_steps=0, save_every=1
    )
    outcome = trained(ranks, settings)
    assert outcome.diverged is not None and outcome.step == outcome.diverged - 1 < 6
    assert outcome.loss is not None and outcome.loss < 1e9
    path = checkpoint_path(tmp_path / "run", outcome.step)
    assert list_checkpoints(path.parent)[-1] == path
    assert all(
        bool(values.isfinite().all())
        for values in whole_state(path, validated_run(settings).config).values()
    )
    assert [row["step"] for row in metric_rows(tmp_path / "run")][-1] == outcome.step
    assert not {"NaN", "Infinity"} & set(
        (tmp_path / "run" / "metrics.jsonl").read_text().replace(",", " ").split()
    )


# -- what is kept


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [1, 2, 3, 4, 5, 6]), (1, [6]), (2, [5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_the_newest_are_kept(
    ranks: Ranks, data: Path, tmp_path: Path, keep: int, left: list[int]
) -> None:
    settings = tiny_settings(
        data, tmp_path / "run", save_every=1, keep_checkpoints=keep, eval_every=0
    )
    trained(ranks, settings)
    assert [
        Checkpoint(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")
    ] == left


@pytest.mark.parametrize(("save_every", "left"), [(0, [6]), (4, [4, 6]), (6, [6]), (100, [6])])
def test_the_last_step_is_saved_too(
    ranks: Ranks, data: Path, tmp_path: Path, save_every: int, left: list[int]
) -> None:
    trained(ranks, tiny_settings(data, tmp_path / "run", save_every=save_every, eval_every=0))
    assert [
        Checkpoint(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")
    ] == left


def test_a_damaged_later_checkpoint_does_not_replace_complete_ones(tmp_path: Path) -> None:
    """The run went on from step 10, since 20 was damaged: what it saves at 15 is kept, and 20 is
    left to be mended."""
    for step in (5, 10, 15, 20):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    remove_old(checkpoint_path(tmp_path, 15), 1)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["notes", "step-00000015", "step-00000020"]


# -- as a stream

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""What is stored, with the integers that have its bits."""


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of any bits, NaN among them; wider dtypes first. Some are empty and some have no
    dims."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6))
    dtypes = sorted(
        draw(st.lists(st.sampled_from(list(DTYPES)), min_size=len(shapes), max_size=len(shapes))),
        key=lambda dtype: -dtype.itemsize,
    )
    names = draw(
        st.lists(st.text(max_size=5), min_size=len(shapes), max_size=len(shapes), unique=True)
    )
    random = seeded(draw(st.integers(0, 99)))
    drawn = [torch.randint(-(2**15), 2**15, shape, generator=random) for shape in shapes]
    return {
        name: (bits.to(DTYPES[dtype]) * (65537 if dtype.itemsize == 4 else 1)).view(dtype)
        for name, dtype, bits in zip(names, dtypes, drawn, strict=True)
        if name != "__metadata__"
    }


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def read_back(path: Path) -> dict[str, Tensor]:
    """The bits that the reference implementation reads from a file."""
    return {name: tensor.view(DTYPES[tensor.dtype]) for name, tensor in load_file(path).items()}


@given(named_tensors(), st.sampled_from([4, 8, SLICE_BYTES]))
def test_safetensors_reads_what_was_streamed(tensors: dict[str, Tensor], slice_bytes: int) -> None:
    """Bit for bit, in slices of any size; the checksum is that of the file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.formats.safetensors.SLICE_BYTES", slice_bytes)
        path = Path(folder, "one.safetensors")
        assert write_safetensors(
            path, shapes_of(tensors), iter(tensors.values())
        ) == writing.checksum(path)
        content = path.read_bytes()
        found = read_back(path)
        assert int.from_bytes(content[:8], "little") % 8 == 0, "the first tensor is aligned"
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor.view(DTYPES[tensor.dtype])), name


def test_tensors_that_differ_from_their_header_are_not_written(tmp_path: Path) -> None:
    one = torch.zeros(3, 4)
    other = torch.zeros(4, 3)
    for given_ in ([other], [one.T], [one.bfloat16()]):
        with pytest.raises(AssertionError, match="one"):
            write_safetensors(tmp_path / "file", shapes_of({"one": one}), given_)
    for wrong in ([], [one, other]):
        with pytest.raises(ValueError, match=r"argument 2 is (shorter|longer)"):
            write_safetensors(tmp_path / "file", shapes_of({"one": one}), wrong)
    mixed = {"one": torch.zeros(3, dtype=torch.bfloat16), "two": one}
    with pytest.raises(AssertionError, match="two is not aligned: wider dtypes come first"):
        write_safetensors(tmp_path / "file", shapes_of(mixed), mixed.values())


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "file", {}, [])
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_saving_takes_a_few_megabytes(tmp_path: Path) -> None:
    """96 MB of state and no second copy of it, not even of one tensor (16 MB): the most that is
    resident grows by less than 12 MB, three slices."""
    script = [sys.executable, __file__, str(tmp_path / "step-00000001")]
    held, grown = map(
        int, subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()
    )
    assert held == 96 << 20
    assert grown < 3 * SLICE_BYTES
    assert sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir()) > held


def save_and_tell(target: Path) -> None:
    """Print the bytes of state, and by how much saving them raised the peak, in a process of its
    own."""
    torch.set_num_threads(1)
    save_matrices(2, target.with_name("step-00000000"))  # what is loaded on first use is there
    held, before = save_matrices(2048, target)
    print(held, process_bytes("VmHWM") - before)


def save_matrices(size: int, target: Path) -> tuple[int, int]:
    """Save two square matrices and their moments; the bytes of them all, and the peak of memory
    before."""
    specs = [
        ParamSpec(
            f"blocks.{i}.m", (size, size), ("ffn", "embed"), Init("normal", 1.0), unit=f"blocks.{i}"
        )
        for i in range(2)
    ]
    mesh = make_mesh(Layout(), 0, CPU)
    store = Store(mesh, units(tuple(specs)), torch.bfloat16, torch.bfloat16, AdamW().update)
    views = [view for *_, view in writing.owned(store, mesh)]
    for view in views:
        view.fill_(1.0)
    forget_peak()
    before = process_bytes("VmHWM")
    save_checkpoint(target, store, mesh, specs, 1)
    return sum(view.nbytes for view in views), before


# -- boxes


def test_boxes_are_assembled_from_overlaps(whole_run: tuple[Path, ModelConfig]) -> None:
    """Any rectangle of any parameter, as a layout with tensor parallel cuts it: fused parts, padded
    and uneven ones."""
    folder, config = whole_run
    checkpoint = Checkpoint(checkpoint_path(folder, 6))
    plan = Layout(tp=2)
    one = Layout()

    def whole(spec: ParamSpec) -> Tensor:
        return torch.cat(
            [checkpoint.read(spec, "exp_avg", box) for box in boxes(spec, one, one.coord(0))]
        )

    for spec in model_specs(config):
        if spec.tied_to is None:
            for rank in range(2):
                for box in boxes(spec, plan, plan.coord(rank)):
                    assert torch.equal(
                        checkpoint.read(spec, "exp_avg", box), whole(spec)[box.slices]
                    ), (spec.name, box)


def test_saving_needs_only_the_mesh(tmp_path: Path, data: Path) -> None:
    """Outside any process group: one rank saves and loads what it holds, exactly."""
    settings = tiny_settings(data, tmp_path / "run")
    config = validated_run(settings).config
    mesh: Mesh = make_mesh(Layout(), 0, CPU)
    program, other = (
        make_program(Run(settings, mesh.layout, config, None), mesh, 0) for _ in range(2)
    )
    for number, (*_, view) in enumerate(writing.owned(program.store, mesh)):
        view.copy_(torch.randn(view.shape, generator=seeded(number)))
    save_checkpoint(tmp_path / "step-00000004", program.store, mesh, program.specs, 4)
    load_state(Checkpoint(tmp_path / "step-00000004"), other.store, other.specs)
    assert other.store.num_steps == 4
    pairs = zip(writing.owned(program.store, mesh), writing.owned(other.store, mesh), strict=True)
    assert all(torch.equal(mine, theirs) for (*_, mine), (*_, theirs) in pairs)


if __name__ == "__main__":
    save_and_tell(Path(sys.argv[1]))
