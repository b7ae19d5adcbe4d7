"""Shardwise against llama.cpp (prefill, decode) and OpenVINO GenAI (whole requests) on the same
GGUF file, in one run. Part of `make bench-serve`.

Contenders take turns, the best run of each counts, and only ratios are compared. Shardwise serves
the file as stored; the others also serve it requantized to the formats that they are fastest with.
The limit of the machine is next to each row: the weights read once per step at the measured memory
bandwidth, and the operations at twice the rate of a large bf16 product, because 8-bit instructions
do twice as many.

    python bench/serve_rows.py [--rounds 3] [--model FILE.gguf] [--peers-env DIR] [--results DIR]
        [--json]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plot import Bar, Panel, draw
from profile_decode import stream_bytes_per_s
from serve import make_parser, print_report, read_arguments, run, write_results
from train import HERE, imports, log, machine, make_peers_environment

from shardwise.formats.model_source import read_config
from shardwise.formats.storage_formats import quantized_formats
from shardwise.layout import Layout
from shardwise.measure.offline import OUTPUT_TOKENS, PROMPT_TOKENS
from shardwise.params import model_specs
from shardwise.quant.scheme import quantizable, weight_bytes

BARS = {
    "prefill_512": 2.0, "decode_1": 1.2, "decode_8": 1.8, "decode_32": 1.8,
    "generate_1": 1.5, "generate_8": 1.5, "generate_32": 1.5,
}  # fmt: skip
OURS = "Shardwise"
LLAMA_CPP = "llama.cpp"
OPENVINO = "OpenVINO"
OTHERS = "the best other"
THEIR_PACKAGES = ("llama_cpp_python", "openvino-genai")
PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "openvino-genai==2026.4.1.0")
PRODUCT_SIZE = 2048
PRODUCT_TRIES = 8


@dataclass(frozen=True)
class Limits:
    """Measured rates of the machine, and the work of the model: bytes of weights, and operations
    per token of the blocks and of the head."""

    read_bytes_per_s: float
    operations_per_s: float
    weight_bytes: int
    block_operations: int
    head_operations: int

    def tokens_per_s(self, name: str) -> float:
        """Return the limit of a row `KIND_NUMBER`: prefill by tokens of the prompt, decode by
        sequences per step, generate by requests that start together."""
        kind, number = name.split("_")
        num = int(number)
        if kind == "prefill":
            return num / self.step_s(num, 1)
        if kind == "decode":
            return num / self.step_s(num, num)
        whole_s = self.step_s(num * PROMPT_TOKENS, num) + (OUTPUT_TOKENS - 1) * self.step_s(
            num, num
        )
        return num * OUTPUT_TOKENS / whole_s

    def step_s(self, num_tokens: int, num_logits: int) -> float:
        """Return the shortest time of a step, which reads the weights once."""
        operations = num_tokens * self.block_operations + num_logits * self.head_operations
        return max(self.weight_bytes / self.read_bytes_per_s, operations / self.operations_per_s)


@dataclass
class Report:
    """Tokens/s of each turn, by row and contender."""

    about: dict[str, str | int]
    limits: Limits
    runs: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {name: {} for name in BARS}
    )

    def best(self, row: str) -> dict[str, float]:
        return {contender: max(rates) for contender, rates in self.runs[row].items()}

    def lines(self) -> Iterator[tuple[str, ...]]:
        yield (
            "",
            f"{OURS}, tokens/s",
            "best of the others",
            "its name",
            "ratio",
            "wanted",
            "",
            "machine allows",
            "reached",
        )
        for row, bar in BARS.items():
            best = self.best(row)
            ours = best.pop(OURS)
            name = max(best, key=lambda each: best[each])
            ratio = ours / best[name]
            limit = self.limits.tokens_per_s(row)
            rates = f"{ours:,.0f}", f"{best[name]:,.0f}", name, f"{ratio:.2f}", f"≥ {bar}"
            yield (
                row,
                *rates,
                "met" if ratio >= bar else "missed",
                f"{limit:,.0f}",
                f"{ours / limit:.0%}",
            )

    def to_json(self) -> dict[str, Any]:
        rows = []
        ratios = {}
        for row in BARS:
            best = self.best(row)
            rows += [
                {"name": f"{row}, {who}", "value": rate, "unit": "tokens/s"}
                for who, rate in best.items()
            ]
            ratios[row] = best.pop(OURS) / max(best.values())
        limits = {row: self.limits.tokens_per_s(row) for row in BARS}
        return {
            "rows": rows,
            "ratios": ratios,
            "bars": BARS,
            "limits": limits,
            "runs": self.runs,
            "about": self.about,
        }

    def to_svg(self) -> str:
        groups = {}
        for row in BARS:
            best = self.best(row)
            ours = best.pop(OURS)
            limit = self.limits.tokens_per_s(row)
            named = (OURS, ours), (OTHERS, max(best.values())), ("the machine", limit)
            groups[row] = [Bar("", series, value) for series, value in named]
        panels = [Panel(row, "tokens/s", "", {row: bars}) for row, bars in groups.items()]
        return draw(panels, (OURS, OTHERS, "the machine"))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if everything ran, whether or not the bars are met, else 1."""
    args = read_arguments(make_parser(__doc__, "a .gguf file"), argv, of_gguf=True)
    python = with_peers(make_peers_environment(args.peers_env))
    args.steps = 24
    report = Report(machine(python, args, THEIR_PACKAGES), measure_limits(args.model))
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = {"as stored": str(args.model)} | run(
                [*llama_cpp(python), "requantize", str(args.model), folder]
            )
            take_turns(report, args.model, python, files, args.rounds)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    write_results(report, args.results, "serve_rows")
    (args.results / "serve_rows.svg").write_text(report.to_svg(), encoding="utf-8")
    print_report(report, args.json)
    return 0


def with_peers(python: Path) -> Path:
    """Install llama.cpp, compiled for this processor, and OpenVINO into the environment."""
    if not imports(python, "llama_cpp, gguf, openvino_genai"):
        log("installing OpenVINO and compiling llama.cpp, about five minutes")
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *PACKAGES,
        ]
        settings = os.environ | {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        if subprocess.run(install, env=settings, stdout=sys.stderr).returncode:
            sys.exit("llama.cpp could not be built; it needs a C++ compiler")
    return python


def llama_cpp(python: Path) -> list[str]:
    return [str(python), str(HERE / "serve_llama_cpp.py")]


def take_turns(
    report: Report, model: Path, python: Path, files: dict[str, str], rounds: int
) -> None:
    """Run all contenders once per round; each prints the rows that it has."""
    threads = str(torch.get_num_threads())
    ours = [
        sys.executable,
        "-m",
        "shardwise",
        "bench",
        "serve",
        str(model),
        "--quant",
        "as-stored",
        "--json",
    ]
    theirs = {
        f"{LLAMA_CPP} {kind}": [*llama_cpp(python), "speed", file, threads]
        for kind, file in files.items()
    }
    theirs |= {
        f"{OPENVINO} {kind}": [str(python), str(HERE / "serve_openvino.py"), file, threads]
        for kind, file in files.items()
    }
    for turn in range(rounds):
        result = {OURS: {row["name"]: row["value"] for row in run(ours)["rows"]}}
        result |= {contender: run(command) for contender, command in theirs.items()}
        for contender, rates in result.items():
            mine = {row: float(rates[row]) for row in BARS if row in rates}
            for row, rate in mine.items():
                report.runs[row].setdefault(contender, []).append(rate)
            said = ", ".join(f"{row} {rate:,.0f}" for row, rate in mine.items())
            log(f"round {turn + 1} of {rounds}, {contender}: {said}")


def measure_limits(model: Path, quant: str | None = "as-stored") -> Limits:
    """Measure the machine; without `quant`, operations run at the rate of a bf16 product."""
    config = read_config(model)
    one = Layout()
    formats = quantized_formats(model, config, one, quant) if quant else {}
    specs = [spec for spec in model_specs(config) if spec.tied_to is None]
    matrices = [
        spec for spec in specs if len(spec.shape) == 2 and (spec.name != "embed" or config.tied)
    ]
    total_bytes = sum(weight_bytes(spec, one, one.coord(0), formats, 2) for spec in matrices)
    block_operations = 2 * sum(spec.numel for spec in matrices if quantizable(spec))
    head_operations = 2 * config.vocab_size * config.hidden_size
    rate = product_flops() * (2 if quant else 1)
    return Limits(stream_bytes_per_s(), rate, total_bytes, block_operations, head_operations)


def product_flops() -> float:
    """Return the FLOP/s of a large bf16 product."""
    x = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16)
    best_s = float("inf")
    for _ in range(PRODUCT_TRIES):
        start = time.perf_counter()
        _ = x @ x
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * PRODUCT_SIZE**3 / best_s


if __name__ == "__main__":
    sys.exit(main())
