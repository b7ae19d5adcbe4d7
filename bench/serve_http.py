"""The cost of HTTP: 32 clients of `shardwise serve`, against the same load without HTTP, in turns.
Part of `make bench-serve`.

The clients share the machine's cores with the server, which they do not in production.

    python bench/serve_http.py [--rounds 3] [--model MODEL] [--results DIR] [--json]
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve import make_parser, print_report, read_arguments, run, write_results
from train import log, machine

CLIENTS = 32
REQUESTS = 64
NEW_TOKENS = 128
BAR = 0.9
IN_PROCESS = "in process"
OVER_HTTP = "over HTTP"
SHARDWISE = (sys.executable, "-m", "shardwise")
READY = re.compile(r"ready at (http://\S+)")


@dataclass
class Report:
    """Output tokens/s of each turn."""

    about: dict[str, str | int]
    runs: dict[str, list[float]] = field(default_factory=lambda: {IN_PROCESS: [], OVER_HTTP: []})

    @property
    def ratio(self) -> float:
        return max(self.runs[OVER_HTTP]) / max(self.runs[IN_PROCESS])

    def lines(self) -> Iterator[tuple[str, ...]]:
        yield "clients", f"{IN_PROCESS}, tokens/s", f"{OVER_HTTP}, tokens/s", "ratio", "wanted", ""
        rates = (f"{max(self.runs[name]):,.0f}" for name in (IN_PROCESS, OVER_HTTP))
        yield (
            str(CLIENTS),
            *rates,
            f"{self.ratio:.2f}",
            f"≥ {BAR}",
            "met" if self.ratio >= BAR else "missed",
        )

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"name": name, "value": max(rates), "unit": "tokens/s"}
            for name, rates in self.runs.items()
        ]
        ratios = {OVER_HTTP: self.ratio}
        bars = {OVER_HTTP: BAR}
        return {
            "rows": rows,
            "ratios": ratios,
            "bars": bars,
            "runs": self.runs,
            "about": self.about,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if everything ran, whether or not the bar is met, else 1."""
    args = read_arguments(make_parser(__doc__, "a folder or .gguf file"), argv)
    args.steps = NEW_TOKENS
    report = Report(machine(None, args))
    try:
        with served(args.model) as url:
            take_turns(report, args.model, url, args.rounds)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    write_results(report, args.results, "serve_http")
    print_report(report, args.json)
    return 0


def loaded(model: Path) -> list[str]:
    """Return the model's arguments; a GGUF file keeps its quantization."""
    return [str(model), *(["--quant", "as-stored"] if model.suffix == ".gguf" else [])]


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Yield the address of a server, which ends with the block."""
    command = [*SHARDWISE, "serve", *loaded(model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        result = []
        for line in server.stderr:
            result.append(line.strip())
            if ready := READY.search(line):
                break
        else:
            raise RuntimeError(
                f"`{' '.join(command)}` failed: {result[-1] if result else 'it printed nothing'}"
            )
        try:
            yield f"{ready[1]}/v1"
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()


def take_turns(report: Report, model: Path, url: str, rounds: int) -> None:
    """Run both in turns, each turn with its own seed, so that no prompt is in the prefix cache."""
    load = [
        "--concurrency",
        str(CLIENTS),
        "--requests",
        str(REQUESTS),
        "--max-tokens",
        str(NEW_TOKENS),
        "--json",
    ]
    for turn in range(rounds):
        targets = {IN_PROCESS: loaded(model), OVER_HTTP: ["--url", url]}
        for name, target in targets.items():
            result = run([*SHARDWISE, "bench", "serve", *target, *load, "--seed", str(turn)])
            rate = {row["name"]: float(row["value"]) for row in result["rows"]}[
                "output_tokens_per_s"
            ]
            report.runs[name].append(rate)
            log(f"round {turn + 1} of {rounds}, {name}: {rate:,.0f} tokens/s")


if __name__ == "__main__":
    sys.exit(main())
