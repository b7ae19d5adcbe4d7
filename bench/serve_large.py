"""Shardwise and llama.cpp on a model of a billion random weights, in bf16, 8 and 4 bits, to see
whether the ratios of bench/serve_rows.py hold for larger models. Part of `make bench-serve`.

The shape is that of Llama 3.2 1B with SmolLM2's vocabulary. Both read the same GGUF files of 8 and
4 bits. In bf16, Shardwise reads the folder that they were made from, and llama.cpp a file made from
the one of 8 bits. Each figure is measured once, in turns: a round takes about ten minutes.

    python bench/serve_large.py [--rounds 1] [--peers-env DIR] [--results DIR] [--json]
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from serve import make_parser, print_report, read_arguments, run, write_results
from serve_rows import (
    LLAMA_CPP,
    OURS,
    THEIR_PACKAGES,
    Limits,
    llama_cpp,
    measure_limits,
    with_peers,
)
from train import log, machine, make_peers_environment

from shardwise.formats.catalogue import llama
from shardwise.formats.huggingface.write_folder import write_folder
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.layout import Layout
from shardwise.measure.offline import measure_speed
from shardwise.model.init import init_weights
from shardwise.params import model_specs
from shardwise.serve.settings import EngineSettings

SHAPE = llama(16, 2048, 8192, 32, 8, vocab=49152, tied=True)
ROWS = ("prefill_512", "decode_1", "decode_8", "decode_32")


@dataclass(frozen=True)
class Kind:
    """The same weights for both: a folder or file for Shardwise, and a file for llama.cpp."""

    ours: Path
    quant: str | None
    theirs: Path


@dataclass
class Report:
    """Tokens/s of each turn, by kind, row and contender; limits of the machine, by kind."""

    about: dict[str, str | int]
    limits: dict[str, Limits]
    runs: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def best(self, kind: str, row: str) -> tuple[float, float]:
        ours, theirs = (max(self.runs[kind][row][contender]) for contender in (OURS, LLAMA_CPP))
        return ours, theirs

    def lines(self) -> Iterator[tuple[str, ...]]:
        yield (
            "weights",
            "",
            f"{OURS}, tokens/s",
            f"{LLAMA_CPP}, tokens/s",
            "ratio",
            "machine allows",
            "reached",
        )
        for kind, limits in self.limits.items():
            for row in ROWS:
                ours, theirs = self.best(kind, row)
                limit = limits.tokens_per_s(row)
                rates = f"{ours:,.1f}", f"{theirs:,.1f}", f"{ours / theirs:.2f}"
                yield kind, row, *rates, f"{limit:,.1f}", f"{ours / limit:.0%}"

    def to_json(self) -> dict[str, Any]:
        rows = []
        ratios = {}
        for kind in self.limits:
            for row in ROWS:
                ours, theirs = self.best(kind, row)
                named = {OURS: ours, LLAMA_CPP: theirs}
                rows += [
                    {"name": f"{row}, {kind}, {who}", "value": value, "unit": "tokens/s"}
                    for who, value in named.items()
                ]
                ratios[f"{row}, {kind}"] = ours / theirs
        return {"rows": rows, "ratios": ratios, "runs": self.runs, "about": self.about}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, ".gguf file whose vocabulary the random model gets")
    parser.set_defaults(rounds=1)
    args = read_arguments(parser, argv, of_gguf=True)
    python = with_peers(make_peers_environment(args.peers_env))
    args.steps = 24
    with tempfile.TemporaryDirectory() as folder:
        try:
            kinds = make_files(args.model, Path(folder), python)
            limits = {name: measure_limits(kind.ours, kind.quant) for name, kind in kinds.items()}
            report = Report(machine(python, args, THEIR_PACKAGES[:1]), limits)
            take_turns(report, kinds, python, args.rounds)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    write_results(report, args.results, "serve_large")
    print_report(report, args.json)
    return 0


def make_files(vocabulary: Path, folder: Path, python: Path) -> dict[str, Kind]:
    """Write the random model as a folder in bf16, and quantized."""
    plain = folder / "bf16"
    specs = model_specs(SHAPE)
    layout = Layout()
    log(f"drawing {sum(spec.numel for spec in specs if spec.tied_to is None):,} weights")
    tensors = (
        (spec.name, init_weights(spec, layout, layout.coord(0), 0, torch.bfloat16))
        for spec in specs
        if spec.tied_to is None
    )
    write_folder(plain, SHAPE, specs, tensors, torch.bfloat16, load_tokenizer(vocabulary))
    files = {}
    for kind in ("q8_0", "q4_0"):
        log(f"writing them as {kind}")
        files[kind] = folder / f"{kind}.gguf"
        run(
            [
                sys.executable,
                "-m",
                "shardwise",
                "convert",
                str(plain),
                str(files[kind]),
                "--quant",
                f"gguf:{kind}",
            ]
        )
    (written,) = run(
        [*llama_cpp(python), "requantize", str(files["q8_0"]), str(folder), "BF16"]
    ).values()
    return {
        "bf16": Kind(plain, None, Path(written)),
        "8 bits": Kind(files["q8_0"], "as-stored", files["q8_0"]),
        "4 bits": Kind(files["q4_0"], "as-stored", files["q4_0"]),
    }


def take_turns(report: Report, kinds: dict[str, Kind], python: Path, rounds: int) -> None:
    threads = str(torch.get_num_threads())
    for turn in range(rounds):
        for name, kind in kinds.items():
            settings = EngineSettings(kind.ours, Layout(), "bf16", quant=kind.quant)
            measured = measure_speed(settings, lambda share: None, tries=1, whole_requests=False)
            result = {
                OURS: {row.name: row.value for row in measured},
                LLAMA_CPP: run([*llama_cpp(python), "speed", str(kind.theirs), threads, "1"]),
            }
            for contender, rates in result.items():
                for row in ROWS:
                    of_row = report.runs.setdefault(name, {}).setdefault(row, {})
                    of_row.setdefault(contender, []).append(float(rates[row]))
                said = ", ".join(f"{row} {rates[row]:,.1f}" for row in ROWS)
                log(f"round {turn + 1} of {rounds}, {name}, {contender}: {said}")


if __name__ == "__main__":
    sys.exit(main())
