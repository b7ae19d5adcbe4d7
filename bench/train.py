"""Training steps of Shardwise and of the alternatives a user has, in one run: `make bench-train`.

Machines differ and drift, so the contenders take turns and only ratios count. Shardwise runs in the
environment of this script, the others in `.peers/`, which is created on the first run (a few GB,
minutes).

    python bench/train.py [--rounds 3] [--steps 5] [--stage z1 ...] [--peers-env DIR] [--json]
    python bench/train.py --profile [--layout dp2.z1 ...] [--json]   # time of a step by part
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from report import (
    DATA_WORK,
    SHARDWISE,
    STAGES,
    Contender,
    Figures,
    Report,
    Stage,
    full_name,
    profile_table,
)
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PEERS_ENV = HERE.parent / ".peers"
RESULTS = HERE / "results"
PEER_PACKAGES = ("transformers==5.24.0", "accelerate==1.15.0", "deepspeed==0.19.8")
THEIR_PACKAGES = ("torch", "transformers", "deepspeed")
PEERS_ENVIRONMENT = os.environ | {"DS_ACCELERATOR": "cpu"}
RUN_LIMIT_S = 900
ERROR = re.compile(
    r"(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Failed)\b.*|shardwise: .*)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if all layouts of Shardwise ran, whether or not the bars are met, else 1."""
    args = read_arguments(argv)
    if args.profile:
        return profile(args.layout or ["dp2.z1", "dp2.z3"], args.json)
    stages = [stage for stage in STAGES if not args.stage or stage.name in args.stage]
    python = make_peers_environment(args.peers_env)
    runs, failed = take_turns(stages, args.rounds, args.steps, python)
    report = Report(stages, runs, failed, machine(python, args))
    write_results(report, args.results)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        print_table(report.to_table())
        for key, reason in failed.items():
            print(f"{key} failed: {reason}")
    return 1 if any(stage.layout in failed for stage in stages) else 0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each contender (default: 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps per turn, after 2 of warm-up (default: 5)"
    )
    parser.add_argument(
        "--stage",
        action="append",
        choices=[stage.name for stage in STAGES],
        help="run only this stage; repeatable",
    )
    parser.add_argument(
        "--peers-env",
        type=Path,
        default=PEERS_ENV,
        metavar="DIR",
        help="environment of the others, created if missing (default: .peers)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder to write to (default: bench/results)",
    )
    parser.add_argument("--profile", action="store_true", help="profile steps of Shardwise instead")
    parser.add_argument(
        "--layout",
        action="append",
        metavar="L",
        help="layout to profile; repeatable (default: dp2.z1 and dp2.z3)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args(argv)


def make_peers_environment(folder: Path) -> Path:
    """Return the Python of the peers' environment, after installing what is missing in it."""
    python = folder / "bin" / "python"
    if python.exists() and imports(python, "transformers, accelerate, deepspeed"):
        return python
    log(f"setting up the peers' environment in {folder}, minutes the first time")
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    torch_version = version("torch").split("+")[0]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # Building deepspeed needs torch.
        for packages in ((f"torch=={torch_version}", *PEER_PACKAGES[:2]), PEER_PACKAGES[2:]):
            subprocess.run(
                [*install, *packages], check=True, env=PEERS_ENVIRONMENT, stdout=sys.stderr
            )
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"cannot create the peers' environment: `{shlex.join(error.cmd)}` exited with "
            f"{error.returncode}"
        )
    return python


def imports(python: Path, modules: str) -> bool:
    command = [str(python), "-c", f"import {modules}"]
    return subprocess.run(command, env=PEERS_ENVIRONMENT, capture_output=True).returncode == 0


def take_turns(
    stages: Sequence[Stage], rounds: int, steps: int, python: Path
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Run every contender once per round, in alternating order, so that drift affects all alike.

    Returns the runs, and the error of each contender that failed, which is not run again.
    """
    contenders = {each.key: (each, stage) for stage in stages for each in stage.contenders}
    runs: dict[str, list[Figures]] = {}
    failed: dict[str, str] = {}
    start = time.monotonic()
    total = rounds * len(contenders)
    for turn in range(rounds):
        for at, (key, (contender, stage)) in enumerate(
            list(contenders.items())[:: 1 if turn % 2 == 0 else -1]
        ):
            if key in failed:
                continue
            done = turn * len(contenders) + at
            left_min = math.ceil((time.monotonic() - start) / max(1, done) * (total - done) / 60)
            left = f", about {left_min} min left" if done else ""
            log(f"run {done + 1} of {total}, {full_name(contender)}{left}")
            outcome = run(contender, stage, steps, python)
            if isinstance(outcome, str):
                failed[key] = outcome
                log(f"  failed: {outcome}")
            else:
                runs.setdefault(key, []).append(outcome)
                log(f"  {outcome.tokens_per_s:,.0f} tokens/s, {outcome.peak_resident_mb:,.0f} MiB")
    return runs, failed


def run(contender: Contender, stage: Stage, steps: int, python: Path) -> Figures | str:
    """Run one contender once; return its figures, or the last line of its error."""
    if contender.maker == SHARDWISE:
        command = [sys.executable, "-m", "shardwise", "bench", "train", *stage.work.words, "--json"]
        command += ["--layout", contender.key, "--steps", str(steps)]
    else:
        command = [str(python), "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2"]
        command += [str(HERE / "train_peers.py"), contender.key, for_peers(stage), str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        end_process(process)
        return f"not done after {RUN_LIMIT_S} s"
    except KeyboardInterrupt:
        end_process(process)
        raise
    return read_figures(out) if process.returncode == 0 else last_error(errors)


def for_peers(stage: Stage) -> str:
    """Return the stage's work, and its pipeline if it has one, as JSON."""
    from shardwise.formats.huggingface.hf_config import to_hugging_face
    from shardwise.layout import Layout
    from shardwise.measure.train_step import LR, MAX_NORM, WARMUP_STEPS
    from shardwise.parallel.pipeline.actions import stage_pieces

    workload = stage.work.workload
    layout = Layout.parse(stage.layout)
    result = {
        "shape": to_hugging_face(workload.config),
        "sequences": workload.sequences,
        "length": workload.length,
    }
    pieces = stage_pieces(workload.config, layout)
    blocks = [sum(piece.name.startswith("blocks.") for piece in of_stage) for of_stage in pieces]
    pipeline = {"microbatches": layout.microbatches, "blocks": blocks}
    return json.dumps(
        result | pipeline | {"warmup_steps": WARMUP_STEPS, "lr": LR, "max_norm": MAX_NORM}
    )


def end_process(process: subprocess.Popen[str]) -> None:
    """Terminate a launcher, which then ends its ranks; kill it only if it does not end_process."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


def read_figures(out: str) -> Figures:
    """Read the last line that is a JSON object: rows of Shardwise, or figures by name of a peer."""
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    if "rows" in result:
        result = {row["name"]: row["value"] for row in result["rows"]}
    return Figures(result["tokens_per_s"], result["peak_resident_mb"])


def last_error(errors: str) -> str:
    """Return the last line that names an error; launchers print much after it."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [
        match[1]
        for line in lines
        if (match := ERROR.fullmatch(line)) and "ChildFailedError" not in line
    ]
    return named[-1] if named else lines[-1] if lines else "no error was printed"


def machine(
    python: Path | None, args: argparse.Namespace, theirs: Sequence[str] = THEIR_PACKAGES
) -> dict[str, str | int]:
    """Describe the machine and the versions; `python` is that of the peers' environment."""
    about: dict[str, str | int] = {"date": date.today().isoformat(), "processor": processor()}
    about |= {
        "cores": os.cpu_count() or 1,
        "rounds": args.rounds,
        "steps": args.steps,
        "torch": version("torch"),
    }
    if python is None:
        return about
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format", "json"], capture_output=True, text=True
    )
    packages = {each["name"]: each["version"] for each in json.loads(listed.stdout or "[]")}
    versions = {f"their {name}": packages.get(name, "?") for name in theirs}
    return about | versions


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def write_results(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(
        json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8"
    )
    (folder / "train.md").write_text(report.to_markdown(), encoding="utf-8")
    (folder / "train.svg").write_text(report.to_svg(), encoding="utf-8")
    log(f"wrote {folder}/train.json, train.md and train.svg")


def profile(texts: Sequence[str], as_json: bool) -> int:
    """Print the time of a step of each layout by part, next to the limits of the machine."""
    from profile_train import Breakdown, profile_layout

    from shardwise.layout import Layout

    breakdowns: list[Breakdown] = []
    for text in texts:
        layout = Layout.parse(text)
        work = next((stage.work for stage in STAGES if stage.layout == str(layout)), DATA_WORK)
        log(f"profiling {layout}, {work.title}")
        breakdowns.append(profile_layout(layout, work.workload))
    if as_json:
        print(json.dumps({"profiles": [asdict(breakdown) for breakdown in breakdowns]}))
        return 0
    for breakdown in breakdowns:
        print_table(profile_table(breakdown))
    return 0


def print_table(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
