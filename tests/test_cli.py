"""The frame of the command line: what it imports, what it says, and how it ends."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from quantized_files import gptq, quantize_folder
from shardwise import cli
from shardwise.cli import main
from tiny_models import tiny_model

COMMAND = [sys.executable, "-m", "shardwise"]


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=60, env=os.environ | (env or {})
    )


WITHOUT_TORCH = """
import sys
from shardwise.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "huggingface_hub", "tokenizers"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["plan", "--help"], 0),
        (["plan", "gpt2", "--gpu", "l4", "--json"], 0),
        (["plan", "70B", "--gpu", "l4"], 1),
        (["plan", "nothing", "--gpu", "l4"], 2),
    ],
)
def test_no_torch_for_help_and_plan(args: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr


def test_no_torch_to_plan_what_a_folder_holds(tmp_path: Path) -> None:
    """A quantized one, whose files the plan looks into."""
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "folder", gptq(4, 32, False))
    args = ["plan", str(tmp_path / "folder"), "--gpu", "l4", "--quant", "as-stored", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quant"] == "as-stored"


def test_no_torch_for_core_types_formats_and_settings() -> None:
    modules = (
        "layout config params hardware precision setting plan plan.report cli commands.plan "
        "formats.catalogue formats.gguf.gguf_file formats.hub serve.settings serve.request"
    )
    imports = "; ".join(f"import shardwise.{module}" for module in modules.split())
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_help_is_quick() -> None:
    """Under 0.4 s of its own processor time, so that a busy machine does not fail it."""
    spent = []
    for _ in range(3):
        before = os.times()
        assert run("--help").returncode == 0
        after = os.times()
        spent.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    assert statistics.median(spent) < 0.4


def test_module_and_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"shardwise .+\n", done.stdout)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "choose a command: plan"),
        (["plam", "gpt2"], "unknown command 'plam'; did you mean plan?"),
        (["xyz"], "unknown command 'xyz'; commands are plan"),
        (["-x"], "see `shardwise --help`"),
        (["plan"], "name a MODEL; `shardwise plan --list` prints the known ones"),
        (["plan", "gpt2", "--gqu", "l4"], "plan does not take --gqu; did you mean --gpu?"),
        (["plan", "gpt2", "--gpu", "l4", "--layuot=dp2"], "did you mean --layout?"),
        (["plan", "gpt2", "--gpu", "l4", "--gp", "1"], "plan does not take --gp"),
        (
            ["plan", "gpt2", "--gpu", "l4", "--global-batch", "8"],
            "plan does not take --global-batch",
        ),
        (["plan", "gpt2", "--gpu", "l4", "--gpus", "many"], "invalid int value: 'many'"),
        (["plan", "gpt2", "--gpu", "l4", "--mode", "tran"], "invalid choice: 'tran'"),
        (["plan", "gpt2", "--gpu"], "expected one argument"),
        (["plan", "gpt2", "again", "--gpu", "l4"], "unrecognized arguments: again"),
        (["plan", "nothing", "--gpu", "l4"], "unknown model 'nothing'"),
        (["plan", "gpt2", "--gpu", "l5"], "GPU 'l5' is not known"),
        (["plan", "gpt2", "--gpu", "l4", "--layout", "dp2.q"], "'q' is not a part of a layout"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_mistake_is_one_sentence(
    args: list[str], said: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = args + flags if args[:1] == ["plan"] else args
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"shardwise: [^\n]+\n", captured.err)
    assert said in captured.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nothing", "--gpu", "l4", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("shardwise: unknown model 'nothing'")


def test_a_forbidden_or_missing_file_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(
        tmp_path / "model" / "config.json"
    )  # a loop: cannot be opened
    assert main(["plan", str(tmp_path / "model"), "--gpu", "l4"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"shardwise: [^\n]+\n", err)
    assert str(tmp_path) in err


class Raising:
    """A command that fails in a given way, in the place of the real ones."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add(self, subparsers: object) -> None:
        subparsers.add_parser("fail").set_defaults(run=self.run)  # type: ignore[attr-defined]

    def run(self, args: object) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ValueError("two\nlines"), 2, "shardwise: two lines\n"),
        (
            PermissionError(13, "Permission denied", "a.toml"),
            2,
            "shardwise: a.toml: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 2, "shardwise: No space left on device\n"),
        (
            OSError(5, "Input/output error", "/proc/x"),
            2,
            "shardwise: /proc/x: Input/output error\n",
        ),
    ],
)
def test_how_commands_end(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Raising(error).add,))
    assert main(["fail"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [OSError("ours"), RuntimeError("ours"), AssertionError()])
def test_our_own_faults_are_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Raising(error).add,))
    with pytest.raises(type(error)):
        main(["fail"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("args", "code"), [(["plan", "gpt2", "--gpu", "l4"], 0), (["x"], 2)])
def test_a_full_disk_under_the_log_is_no_fault(args: list[str], code: int) -> None:
    """Nor is a pipe whose reader has left."""
    reader, pipe = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(pipe, "w") as broken:
        for stderr in (full, broken):
            done = subprocess.run(
                [*COMMAND, *args], stdout=subprocess.DEVNULL, stderr=stderr, timeout=60
            )
            assert done.returncode == code


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault(closed: str) -> None:
    """What would go to a closed stream goes nowhere, and nowhere else: stdout stays one JSON
    object."""
    command = f"{shlex.join([*COMMAND, 'config', '--json'])} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert (
        done.stdout == "" if closed.startswith(">") else json.loads(done.stdout)["run"]["steps"] > 0
    )


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_leaves_hears_no_complaint(flags: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "plan", "gpt2", "--gpu", "l4", *flags]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_terminal_without_unicode_gets_its_answer() -> None:
    done = run("plan", "gpt2", "--gpu", "l4", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.2489" in done.stdout


def test_json_is_one_object_and_nothing_else() -> None:
    done = run("plan", "llama-3.1-405b", "--gpu", "h100-80gb", "--gpus", "512", "--json")
    assert json.loads(done.stdout)["gpus"] == 512
    assert done.stderr == ""
