"""`shardwise train` as its users start, stop and break it: real processes where processes matter,
else in this one."""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import ranks_of
from ranks import Ranks
from shardwise.cli import main
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.run_checkpoint import list_checkpoints
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.layout import Layout
from shardwise.parallel.cores import usable_cores
from shardwise.parallel.launch import Place, RankFailed, Stopped, run_ranks
from shardwise.parallel.mesh import make_mesh
from shardwise.params import model_specs, num_params, units
from shardwise.plan.traffic import comm_bytes
from shardwise.train import metrics as telling
from shardwise.train import rank as training
from shardwise.train.data.corpus_builder import build_corpus
from shardwise.train.metrics import Metrics, StepMetrics
from shardwise.train.rank import train
from shardwise.train.resolve import resized
from shardwise.train.run import locked, start_run
from shardwise.train.settings import ModelSettings, Settings, read_settings, to_toml
from shardwise.train.validate import validated_run
from tiny_training import build_data, tiny_settings, write_source

pytestmark = pytest.mark.usefixtures("default_signals")

DEADLINE_S = 90.0
LOOK_S = 0.05
STEPS = 30
EVAL_EVERY = 20
STRAIGHT: dict[str, Any] = {
    "layout": "dp2",
    "steps": STEPS,
    "eval_every": EVAL_EVERY,
    "save_every": 0,
}
SIZES = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "max_positions")
GIVEN = [word for key in SIZES for word in ("--set", f"model.{key}=0")] + [
    "--set",
    "model.weights=given",
]
TIMED = ("tokens_per_s", "mfu", "peak_bytes", "comm_bytes")
LAUNCHED = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = str(write_source(folder))
    made = folder / "data"
    assert (
        main(["data", "build", source, str(made), "--tokenizer", "bytes", "--held-out", "0.1"]) == 0
    )
    return made


def config_file(folder: Path, data: Path, **changes: Any) -> Path:
    """A settings file for a run in `folder`/run."""
    path = folder / "c.toml"
    path.write_text(to_toml(tiny_settings(data, folder / "run", **changes)))
    return path


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows_of(run)]


def last_state(run: Path) -> bytes:
    return (list_checkpoints(run / "checkpoints")[-1] / "rank-00000.safetensors").read_bytes()


# -- processes


class Training:
    """A command under way in a session of its own, as a terminal has it, ended with the block."""

    def __init__(
        self, *args: str, command: tuple[str, ...] = (sys.executable, "-m", "shardwise", "train")
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=LAUNCHED,
        )

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.session():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def session(self) -> list[int]:
        """Every process of the session that has not ended."""
        alive = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    state, _, _, session = (
                        (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                    )
                except OSError:
                    continue
                if int(session) == self.process.pid and state != "Z":
                    alive.append(int(folder.name))
        return alive

    def ranks(self) -> list[int]:
        return ranks_of(self.process.pid)

    def wait_until(self, true: Callable[[], object], what: str) -> None:
        """Looks now and then, and leaves the cores to the ranks between."""
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_S)
                pytest.fail(
                    f"ended with {self.process.returncode} before {what}: "
                    f"{self.process.communicate()[1]}"
                )
            assert time.monotonic() < deadline, f"never {what}"

    def wait_for_step(self, run: Path, step: int) -> None:
        path = run / "metrics.jsonl"
        self.wait_until(
            lambda: path.exists() and f'"step": {step}, "loss"' in path.read_text(), f"step {step}"
        )

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: every process of the foreground gets it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr, once it has ended and left no process behind."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        for pid in self.session():
            assert ended(pid), "processes outlive the command"
        return self.process.returncode, out, err


def ended(pid: int) -> bool:
    """Whether that process, of others, ends in time."""
    with (
        contextlib.suppress(ProcessLookupError),
        open(os.pidfd_open(pid), "rb", buffering=0) as process,
    ):
        return bool(select.select([process], (), (), DEADLINE_S)[0])
    return True


def told_lines(err: str) -> list[str]:
    """What stderr holds beyond the settings, which kernels run, and the progress."""
    known = re.compile(r"\[\w+\]|\w+ = .*|(model|data|layout|memory|kernels): .*|step +\d+  .*|")
    return [line for line in err.splitlines() if not known.fullmatch(line)]


@pytest.fixture(scope="module")
def straight(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str, str]]:
    """A run on two ranks from its first step to its last: its folder, stdout and stderr."""
    folder = tmp_path_factory.mktemp("straight")
    path = config_file(folder, data, **STRAIGHT)
    with Training(str(path), "--json") as training:
        code, out, err = training.end()
    assert code == 0, err
    yield folder / "run", out, err


def test_two_ranks_train_and_report(straight: tuple[Path, str, str]) -> None:
    run, out, err = straight
    answer = json.loads(out)
    assert answer | {"loss": 0, "held_out_loss": 0} == {
        "run": str(run),
        "step": STEPS,
        "loss": 0,
        "held_out_loss": 0,
        "stopped": None,
        "diverged": None,
        "unsaved": None,
    }
    assert told_lines(err) == [], "nothing stray on stderr"
    assert err.count("kernels: torch operations (native kernels are for bf16)\n") == 1, "told once"
    assert read_settings(run / "config.toml").run.layout == "dp2"
    rows = rows_of(run)
    steps = [row for row in rows if "loss" in row]
    held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert list(held_out) == [0, EVAL_EVERY, STEPS]
    assert answer["loss"] == steps[-1]["loss"] < steps[0]["loss"] - 1.5
    assert answer["held_out_loss"] == held_out[STEPS] < held_out[EVAL_EVERY] < held_out[0] - 1.0
    config = validated_run(read_settings(run / "config.toml")).config
    padded = sum(
        Layout(dp=2).padded(num_params(owned)) for owned in units(model_specs(config)).values()
    )
    sent = 4 * padded  # 2 S (n - 1) / n
    for row in steps:
        assert row.keys() == {field for field in StepMetrics.__dataclass_fields__}
        assert row["tokens"] == row["step"] * 4 * 16
        assert row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1 and row["grad_norm"] > 0
        assert len(row["peak_bytes"]) == 2 and min(row["peak_bytes"]) > 50e6, (
            "resident bytes of two processes"
        )
        assert row["comm_bytes"].keys() == {"dp", "tp", "pp", "cp", "control"}
        assert row["comm_bytes"]["dp"] == sent
    assert steps[0]["lr"] == pytest.approx(0.005) and steps[1]["lr"] == pytest.approx(0.01)


def children(pid: int) -> list[int]:
    """Return the processes that one has started; ranks are those of the fork server."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_stopped_run_resumes_to_the_same_end(
    straight: tuple[Path, str, str], data: Path, tmp_path: Path
) -> None:
    """SIGTERM to the launcher alone saves and stops, though a rank is suspended; the second part
    ends bit for bit where the straight run ended."""
    path = config_file(tmp_path, data, **STRAIGHT)
    run = tmp_path / "run"
    with Training(str(path)) as training:
        training.wait_for_step(run, 2)
        (rank, *_) = (each for child in children(training.process.pid) for each in children(child))
        os.kill(rank, signal.SIGSTOP)
        training.process.terminate()
        code, out, err = training.end()
    assert (code, out) == (143, ""), err
    (line,) = told_lines(err)
    stop = re.fullmatch(
        rf"shardwise: stopped by SIGTERM after step (\d+); {run} is saved, resume with `(.*)`", line
    )
    assert stop, line
    step = int(stop[1])
    again = stop[2].split()
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{step:08d}"
    assert again[:2] == ["shardwise", "train"]
    with Training(*again[2:]) as training:
        code, out, err = training.end()
    assert (code, told_lines(err)) == (0, [])
    assert out.startswith(f"{run}: {STEPS} steps, loss ")
    assert untimed(run) == untimed(straight[0])
    assert last_state(run) == last_state(straight[0])


def test_torchrun_joins_and_computes_the_same(
    straight: tuple[Path, str, str], data: Path, tmp_path: Path
) -> None:
    path = config_file(tmp_path, data, **STRAIGHT)
    run = tmp_path / "run"
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
    )
    with Training("shardwise", "train", str(path), "--json", command=torchrun) as training:
        code, out, err = training.end()
    assert code == 0, err
    assert json.loads(out) == json.loads(straight[1]) | {"run": str(run)}, (
        "the first rank answers, once"
    )
    assert untimed(run) == untimed(straight[0])
    assert last_state(run) == last_state(straight[0])


def test_a_killed_rank_is_named_and_the_run_can_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies before the first checkpoint, so what goes on starts anew, here on one rank."""
    path = config_file(tmp_path, data, layout="dp2", steps=100_000, save_every=0, eval_every=0)
    run = tmp_path / "run"
    with Training(str(path), "--json") as training:
        training.wait_for_step(run, 2)
        victim = training.ranks()[1]
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        code, out, err = training.end()
    assert time.monotonic() - killed_s < 30
    told = json.loads(out)
    assert code == 1 and told["run"] == str(run) and told["failed"] in err
    again = f"`shardwise train {run} --resume`"
    assert told_lines(err) == [
        f"Signal 9 (SIGKILL) received by PID {victim}",
        "rank 1 failed first, with exit code -9",
        f"shardwise: the run failed; nothing was saved; {again} restarts from step 0",
    ]
    assert main(["train", str(path), "--resume", "--layout", "dp1", "--set", "run.steps=3"]) == 0
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]


LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[1])
from shardwise.parallel.launch import Stopped, run_ranks
from deaf_rank import never_stop
try:
    run_ranks(never_stop, 2, sys.argv[2])
except Stopped as stop:
    sys.exit(128 + stop.signal)
"""


def test_a_second_ctrl_c_kills_ranks_that_do_not_stop(tmp_path: Path) -> None:
    command = (sys.executable, "-c", LAUNCHER, str(Path(__file__).parent))
    with Training(str(tmp_path), command=command) as training:
        for event in ("ready", "told"):
            training.wait_until(lambda event=event: len([*tmp_path.glob(f"{event}-*")]) == 2, event)
            training.process.send_signal(signal.SIGINT)
        assert training.end() == (130, "", "")


def test_ranks_that_were_killed_are_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise Stopped(signal.SIGINT)

    path = config_file(tmp_path, data, layout="dp2")
    monkeypatch.setattr("shardwise.train.run.start_run", stop)
    assert main(["train", str(path)]) == 130
    assert capsys.readouterr().err == (
        "shardwise: stopped at once by a second SIGINT; nothing was saved; "
        f"`shardwise train {tmp_path / 'run'} --resume` restarts from step 0\n"
    )


def test_ranks_whose_launcher_is_killed_save_and_stop(data: Path, tmp_path: Path) -> None:
    """They would train on without it, and beside a run that resumes in the same folder."""
    path = config_file(tmp_path, data, layout="dp2", steps=10**6, save_every=0, eval_every=0)
    run = tmp_path / "run"
    with Training(str(path)) as training:
        training.wait_for_step(run, 2)
        ranks = training.ranks()
        assert len(ranks) == 2
        training.process.kill()
        assert all(ended(rank) for rank in ranks)
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    assert checkpoint.name == f"step-{rows_of(run)[-1]['step']:08d}"


def test_a_closed_terminal_saves_and_stops(data: Path, tmp_path: Path) -> None:
    """Its two ranks have nobody left to tell, and a terminal that fails when they write to it."""
    path = config_file(tmp_path, data, layout="dp2", steps=10**6, save_every=0)
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=LAUNCHED,
    )
    os.close(theirs)
    try:
        shown = b""
        while b"tokens/s" not in shown:  # progress, drawn since this is a terminal
            shown += os.read(ours, 1 << 16)
    finally:
        os.close(ours)
    process.wait(DEADLINE_S)
    steps = [row["step"] for row in rows_of(run) if "loss" in row]
    assert [checkpoint.name for checkpoint in list_checkpoints(run / "checkpoints")] == [
        f"step-{steps[-1]:08d}"
    ]


def test_a_signal_while_ranks_start_waits_until_they_can_save(data: Path, tmp_path: Path) -> None:
    """Ctrl-C as soon as the first rank is there, while the others start and all import: no
    traceback, one step, a checkpoint."""
    path = config_file(tmp_path, data, layout="dp2", steps=100_000, save_every=0, eval_every=0)
    run = tmp_path / "run"
    with Training(str(path)) as training:
        training.wait_until(training.ranks, "a rank")
        training.interrupt()
        code, out, err = training.end()
    assert (code, out) == (130, ""), err
    (line,) = told_lines(err)
    assert "stopped by SIGINT after step 1;" in line
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000001"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_one_sentence(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(training, "run_steps", fail)
    assert main(["train", str(config_file(tmp_path, data, layout="dp1"))]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and "out of memory in dp1, for which the plan counts " in err
    assert "rc-full, smaller micro-batches" in err and "nothing was saved" in err


def train_on(rank: int, world: int, settings: Settings) -> None:
    train(Place(rank, world, torch.device("cpu")), validated_run(settings), 0)


@pytest.mark.parametrize(
    ("layout", "kept"), [("dp2.z1", True), ("dp2.z2.m2", True), ("dp2.z3", False)]
)
def test_a_metrics_row_has_the_bytes_of_its_step_or_evaluation(
    ranks: Ranks, data: Path, tmp_path: Path, layout: str, kept: bool
) -> None:
    """Neither counts what a checkpoint sends. The weights that an evaluation gathers stay whole in
    stages 1 and 2, so the step after it gathers none: the two together send what one step does."""
    settings = tiny_settings(data, tmp_path, layout=layout, steps=7, eval_every=3, save_every=2)
    ranks.run(2, train_on, settings)
    config = validated_run(settings).config
    cut = Layout.parse(layout)
    planned = comm_bytes(config, cut, "fp32")["dp"]
    gathered = (
        4 * sum(cut.padded(num_params(owned)) for owned in units(model_specs(config)).values()) // 2
    )
    rows = rows_of(tmp_path)
    steps = {row["step"]: row["comm_bytes"]["dp"] for row in rows if "loss" in row}
    held_out = {row["step"]: row["comm_bytes"]["dp"] for row in rows if "held_out_loss" in row}
    assert list(steps) == [1, 2, 3, 4, 5, 6, 7] and list(held_out) == [0, 3, 6, 7]
    assert set(held_out.values()) == {gathered if kept else 2 * gathered}, (
        "six sequences are two batches"
    )
    for step, sent in steps.items():
        assert sent == planned - (held_out.get(step - 1, 0) if kept else 0), f"step {step}"
    assert len({row["comm_bytes"]["control"] for row in rows if "loss" in row}) == 1, (
        "every step agrees on as much"
    )


# -- the launcher


def fail_on_the_last(place: Place) -> None:
    mesh = make_mesh(Layout(dp=place.world_size), place.rank, place.device)
    if place.rank == place.world_size - 1:
        raise ValueError(
            f"the last rank gives up: {torch.get_num_threads()} threads, "
            f"{os.environ['MASTER_ADDR']}"
        )
    mesh.world.barrier()


def test_the_first_failure_comes_first_and_the_process_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 fails too, since rank 1 does not come to the barrier; it is not the one that is shown.
    Ranks share the cores, and meet without the look-up of a host name, which may not resolve."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_on_the_last, 2)
    first, *_, last = str(caught.value).splitlines()
    assert first == "Traceback (most recent call last):"
    threads = max(1, usable_cores() // 2)
    assert f"ValueError: the last rank gives up: {threads} threads, localhost" in str(caught.value)
    assert last == "rank 1 failed first, with exit code 1"
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


# -- one rank, in this process


def told_to_stop_at(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: signal.Signals) -> None:
    """The process gets signals while it trains: just when a step is told."""
    tell = Metrics.step

    def tell_and_signal(self: Metrics, metrics: StepMetrics) -> None:
        tell(self, metrics)
        if metrics.step == step:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(telling.Metrics, "step", tell_and_signal)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_one_rank_stops_after_the_step_and_resumes(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    path = config_file(tmp_path, data, save_every=0)
    run = tmp_path / "run"
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        told_to_stop_at(patch, 2, number)
        assert main(["train", str(path), "--json"]) == code
    assert signal.getsignal(number) == handler
    assert json.loads(capsys.readouterr().out)["step"] == 3, "the signal came when step 2 was done"
    assert [checkpoint.name for checkpoint in list_checkpoints(run / "checkpoints")] == [
        "step-00000003"
    ]
    assert main(["train", str(path), "--resume"]) == 0
    assert capsys.readouterr().out.startswith(f"{run}: 6 steps, loss ")
    (tmp_path / "other").mkdir()
    assert main(["train", str(config_file(tmp_path / "other", data, save_every=0))]) == 0
    assert untimed(run) == untimed(tmp_path / "other" / "run")
    assert last_state(run) == last_state(tmp_path / "other" / "run")
    capsys.readouterr()
    assert main(["train", str(path), "--resume"]) == 0
    assert (
        capsys.readouterr().out
        == f"{run}: already finished (6 steps); raise run.steps to continue\n"
    )


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, *words: object, code: int = 143) -> None:
    with monkeypatch.context() as patch:
        told_to_stop_at(patch, step, signal.SIGTERM)
        assert main(["train", *map(str, words), "--json"]) == code


def test_a_copied_run_resumes_in_its_own_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may name the folder or its config.toml; the original stays as it is."""
    stop_after(monkeypatch, 2, config_file(tmp_path, data, save_every=0))
    original = files_under(tmp_path / "run")
    for copy, named in (("one", ""), ("two", "config.toml")):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
        assert main(["train", str(tmp_path / copy / named), "--resume"]) == 0
        assert list_checkpoints(tmp_path / copy / "checkpoints")[-1].name == "step-00000006"
        assert files_under(tmp_path / "run") == original
    assert last_state(tmp_path / "one") == last_state(tmp_path / "two")


def test_a_moved_run_resumes_from_any_working_directory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Begun with relative paths. Data that moved is named, and compared by its checksums."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, "data")
    stop_after(monkeypatch, 2, config_file(Path(), Path("data"), save_every=0))
    (tmp_path / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    stop_after(monkeypatch, 4, "moved", "--resume")
    shutil.move(tmp_path / "data", tmp_path / "archive")
    assert main(["train", "moved", "--resume"]) == 2
    assert "is not a data set" in capsys.readouterr().err
    assert main(["train", "moved", "--resume", "--set", f"data.folder={tmp_path}/archive"]) == 0
    assert not (tmp_path / "run").exists()
    assert list_checkpoints(Path("moved/checkpoints"))[-1].name == "step-00000006"


def test_a_run_resumes_without_the_model_that_it_began_with(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    assert main(["train", str(config_file(tmp_path / "base", data, steps=1))]) == 0
    settings = tiny_settings(data, tmp_path / "run", save_every=0)
    given = ModelSettings(name=str(tmp_path / "base" / "run"), weights="given")
    path = tmp_path / "c.toml"
    path.write_text(to_toml(replace(settings, model=given)))
    stop_after(monkeypatch, 2, path)
    shutil.rmtree(tmp_path / "base")
    assert main(["train", f"{tmp_path}/run", "--resume"]) == 0
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000006"


def test_a_second_ctrl_c_interrupts_one_rank_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_to_stop_at(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    assert main(["train", str(config_file(tmp_path, data)), "--json"]) == 130
    assert [row["step"] for row in rows_of(tmp_path / "run") if "loss" in row] == [1, 2]


def test_a_diverging_run_is_reported(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, data, lr=1e30, warmup_steps=0, save_every=1)
    assert main(["train", str(path), "--json"]) == 1
    out, err = capsys.readouterr()
    step = json.loads(out)["diverged"]
    (line,) = told_lines(err)
    assert line == (
        f"shardwise: the gradient or loss of step {step} is not finite, so that step was "
        "discarded (a lower optimizer.lr may help); resume from "
        f"{tmp_path}/run/checkpoints/step-{step - 1:08d} with "
        f"`shardwise train {tmp_path}/run --resume`"
    )
    assert main(
        ["train", f"{tmp_path}/run", "--resume", "--set", "optimizer.lr=1e-3", "--json"]
    ) in (0, 1)
    assert "shardwise: optimizer.lr changed from 1e+30 to 0.001" in capsys.readouterr().err


def test_given_weights(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run goes on from another's weights: it begins with the loss that the other ended with."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert main(["train", str(config_file(tmp_path / "first", data))]) == 0
    settings = tiny_settings(data, tmp_path / "second" / "run", eval_sequences=6)
    plain = ModelSettings(name=str(tmp_path / "first" / "run"), weights="given")
    path = tmp_path / "second" / "c.toml"
    path.write_text(to_toml(Settings(plain, settings.data, settings.optimizer, settings.run)))
    assert main(["train", str(path)]) == 0
    before = rows_of(tmp_path / "first" / "run")[-1]["held_out_loss"]
    assert rows_of(tmp_path / "second" / "run")[0]["held_out_loss"] == pytest.approx(
        before, rel=1e-6
    )


def test_fixed_settings_cannot_change_on_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What may not change is refused; a run that has had its steps stays as it is; its folder says
    its settings."""
    run = tmp_path / "run"
    assert main(["train", str(config_file(tmp_path, data, save_every=0))]) == 0
    kept = (run / "config.toml").read_text()
    capsys.readouterr()
    assert main(["train", str(run), "--resume", "--set", "run.precision=bf16"]) == 2
    assert capsys.readouterr().err == (
        f"shardwise: {run} started with run.precision = 'fp32', not 'bf16'; resume it with the "
        f"same value\n"
    )
    assert main(["train", str(run), "--resume", "--set", "run.steps=2"]) == 0
    assert (
        capsys.readouterr().out
        == f"{run}: already finished (6 steps); raise run.steps to continue\n"
    )
    assert (run / "config.toml").read_text() == kept


def test_the_data_set_cannot_change_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = build_data(tmp_path)
    path = config_file(tmp_path, data, save_every=0)
    run = tmp_path / "run"
    assert main(["train", str(path)]) == 0
    record = json.loads((data / "data.json").read_text())
    record["splits"]["train"]["sha256"] = "0" * 64
    (data / "data.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["train", str(path), "--resume", "--set", "run.steps=9"]) == 2
    assert (
        capsys.readouterr().err
        == f"shardwise: {data} is not the data set that {run} started with; build the same one "
        f"again, or name where it is with --set data.folder=DIR\n"
    )


def test_one_process_trains_in_a_folder_at_a_time(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, data)
    run = tmp_path / "run"
    with locked(run):
        for flags in ([], ["--resume"]):
            assert main(["train", str(path), *flags]) == 2
            said = (
                f"shardwise: {run} is being trained by another process; choose another run.folder\n"
            )
            assert capsys.readouterr().err == said
    assert not run.exists(), "made for the lock alone, it goes with it"
    assert main(["train", str(path)]) == 0


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            ["model.name=gpt2", "model.num_heads=4", "model.num_kv_heads=2"],
            "num_kv_heads of a gpt2 model cannot be 2; 4 works",
        ),
        (["optimizer.eps=0"], "optimizer.eps must be above 0"),
        (["data.global_batch=1000000000000"], "`shardwise plan` with these settings shows"),
    ],
)
def test_models_that_cannot_be_stored_or_run_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: list[str], said: str
) -> None:
    flags = [word for size in sizes for word in ("--set", size)]
    assert main(["train", str(config_file(tmp_path, data)), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_window_on_every_layer_stays_on_every_layer() -> None:
    settings = replace(Settings().model, num_layers=3)
    assert resized(
        CATALOGUE["mistral-7b"], settings, 100, 16, is_count=False
    ).windowed_layers == frozenset(range(3))


def test_a_rank_variable_alone_is_not_torchrun(
    data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    path = config_file(tmp_path, data)
    assert main(["train", str(path)]) == 0
    monkeypatch.setenv("RANK", "3")
    assert main(["train", str(path)]) == 2, "its folder is not overwritten"


def test_a_model_that_does_not_fit_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, data)
    shape = ("--set", "model.vocab_size=16777216", "--set", "model.hidden_size=16384")
    assert main(["train", str(path), *shape, "--layout", "dp2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"shardwise: dp2 \(optimizer [\d,]+ GB, parameters [\d,]+ GB, \.\.\.\) takes [\d,]+ GB per "
        r"rank, [\d,]+ GB for 2 ranks, but there are [\d.,]+ GB; `shardwise plan` with these "
        r"settings shows what fits",
        line,
    ), line
    assert not (tmp_path / "run").exists()


def test_a_run_is_converted_whole(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and tokenizer, so that transformers and `generate` have all they need."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["train", str(config_file(tmp_path, data, save_every=0))]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "folder"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked_logits"] == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "folder").decode(
            AutoTokenizer.from_pretrained(data).encode("a b")
        )
        == "a b"
    )
    ask = [
        "--prompt",
        "a b",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        "--dtype",
        "fp32",
        "--json",
    ]
    answers = []
    for model in ("run", "folder"):
        assert main(["generate", str(tmp_path / model), *ask]) == 0
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1] and theirs.num_parameters() > 0
    assert (tmp_path / "folder" / "model.safetensors").stat().st_mode == (
        tmp_path / "folder" / "config.json"
    ).stat().st_mode


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensorboard_gets_all_metrics(data: Path, tmp_path: Path, precision: str) -> None:
    assert (
        main(["train", str(config_file(tmp_path, data, tensorboard=True, precision=precision))])
        == 0
    )
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))


def test_many_micro_batches_add_up_in_fp32(tmp_path: Path) -> None:
    """The gradient norm in bf16 of 512 equal sequences, one by one, is that of all at once within
    1 %. Sums in bf16 are off by more: one of 256 equal terms no longer grows by one."""
    source = tmp_path / "equal.txt"
    source.write_text("0123456789abcdef" * 1200)
    build_corpus(source, tmp_path / "equal", byte_tokenizer(), held_out=0.0)
    norms = {}
    for name, layout, gradients in (
        ("whole", "dp1", "auto"), ("auto", "dp1.m512", "auto"), ("same", "dp1.m512", "same"),
    ):  # fmt: skip
        settings = tiny_settings(
            tmp_path / "equal", tmp_path / name, global_batch=512, steps=1, eval_every=0,
            precision="bf16", layout=layout, gradients=gradients, save_every=0,
        )  # fmt: skip
        start_run(settings)
        norms[name] = rows_of(tmp_path / name)[-1]["grad_norm"]
    assert norms["auto"] == pytest.approx(norms["whole"], rel=0.01)
    assert abs(norms["same"] - norms["whole"]) > 0.05 * norms["whole"]


def test_tensorboard_shows_each_step_once_after_a_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was interrupted at step 5, with the checkpoint of step 3."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    path = config_file(tmp_path, data, tensorboard=True, save_every=3)
    with monkeypatch.context() as patch:
        told_to_stop_at(patch, 5, signal.SIGINT, signal.SIGINT)
        assert main(["train", str(path), "--json"]) == 130
    assert main(["train", str(path), "--resume"]) == 0
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert "loss" in events.Tags()["scalars"], events.Tags()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


# -- what is refused


def files_under(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--set", "run.layout=dp3"],
            "A global batch of 4 sequences does not divide among 3 data ranks x 1",
        ),
        (["--layout", "dp2.m4"], "does not divide among 2 data ranks x 4 micro-batches; 8 would"),
        (["--layout", "dp1.m8"], "does not divide among 1 data ranks x 8 micro-batches; 8 would"),
        (["--layout", "dp2.pp8"], "8 stages are more than 2 layers; pp2 works"),
        (["--layout", "tp4"], "layout tp4: tp4 does not divide 2 heads"),
        (["--layout", "fsdp.dp2.pp2"], "fsdp with pp is not supported; z3 in its place works"),
        (["--layout", "dp2.q"], "'q' is not a part of a layout"),
        (["--set", "data.seq_len=65"], "data.seq_len 65 exceeds the model's context length of 64"),
        (
            ["--set", "data.seq_len=40", "--set", "model.max_positions=39"],
            "exceeds the model's context length of 39",
        ),
        (["--set", "data.folder=nowhere"], "nowhere is not a data set"),
        (
            ["--set", "model.vocab_size=100"],
            "was tokenized with 257 ids, but the model's vocabulary has 100",
        ),
        (["--set", "model.name=nothing"], "unknown model 'nothing'"),
        (
            [*GIVEN, "--set", "model.num_layers=2"],
            "model.num_layers changes the shape, so the given weights do not",
        ),
        (GIVEN, "'1M' is only a shape, without weights; name a folder, hub id or file"),
        (["--set", "model.hidden_size=15"], "model.hidden_size 15 is not a multiple of 2 heads"),
        (["--set", "run.stps=5"], "run.stps is not a setting; did you mean run.steps?"),
        (["--set", "run.steps=many"], "run.steps must be a whole number, not 'many'"),
        (["--set", "run.folder=/proc/nowhere/run"], "/proc/nowhere/run cannot be written: "),
        (["--resume"], "holds no run to resume; leave out --resume to start one"),
        (["--again"], "train does not take --again"),
    ],
)
def test_an_invalid_run_is_one_sentence_and_leaves_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    path = config_file(tmp_path, data)
    before = files_under(tmp_path)
    assert main(["train", str(path), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"shardwise: [^\n]+\n", err)
    assert said in err
    assert files_under(tmp_path) == before


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: os.truncate(data / "train.bin", 100), "is damaged: it has 100 bytes"),
        (lambda data: os.truncate(data / "train.bin", 0), "is damaged: it has 0 bytes"),
        (lambda data: (data / "held_out.idx").unlink(), "held_out.idx is damaged"),
        (lambda data: (data / "data.json").write_text("{}"), "does not describe a data set"),
        (lambda data: (data / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
def test_data_that_is_damaged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], Any], said: str
) -> None:
    data = build_data(tmp_path)
    spoil(data)
    path = config_file(tmp_path, data)
    assert main(["train", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"shardwise: [^\n]+\n", err) and said in err
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_left_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, data)
    run = tmp_path / "run"
    assert main(["train", str(path)]) == 0
    before = files_under(run)
    for flags, said in (
        ([], "already holds a run; resume it with --resume, or choose another run.folder"),
        (
            ["--resume", "--set", "run.seed=1"],
            "started with run.seed = 0, not 1; resume it with the same",
        ),
        (["--resume", "--set", "data.global_batch=8"], "started with data.global_batch = 4, not 8"),
        (["--resume", "--set", "model.num_layers=3"], "started with model.num_layers = 2, not 3"),
        (
            ["--set", f"run.folder={data}"],
            f"{data} is not empty and not a run; choose another run.folder",
        ),
        (["--set", f"run.folder={path}"], f"{path} is not empty and not a run"),
    ):
        capsys.readouterr()
        assert main(["train", str(path), *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(r"shardwise: [^\n]+\n", err) and said in err
        assert files_under(run) == before
    for checkpoint in list_checkpoints(run / "checkpoints"):
        (checkpoint / "index.json").unlink()
    assert main(["train", str(path), "--resume"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("trying the one before" in line for line in lines[:2])
    assert lines[2] == f"shardwise: {run} has no complete checkpoint"


def test_a_model_file_that_is_damaged_is_refused_before_a_rank_starts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    assert main(["train", str(config_file(tmp_path, data))]) == 0
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes((tmp_path / "run" / "model" / name).read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    settings = tiny_settings(data, tmp_path / "other", layout="dp2")
    plain = ModelSettings(name=str(tmp_path / "model"), weights="given")
    path = tmp_path / "given.toml"
    path.write_text(to_toml(Settings(plain, settings.data, settings.optimizer, settings.run)))
    capsys.readouterr()
    assert main(["train", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"shardwise: [^\n]+\n", err) and "model.safetensors" in err
    assert not (tmp_path / "other").exists()
