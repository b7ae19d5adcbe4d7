"""The project's own figures, measured on this machine: `make bench`.

Machines differ and drift, so what is compared runs in turns, and only ratios count.

    python bench/run.py [--json]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shardwise.commands.demo import installed_model

HERE = Path(__file__).resolve().parent
SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
ROUNDS = 3
STEP_FLOPS = 435e9
"""FLOPs of the training step: 6 x 70.8 M weights x 1024 tokens, without attention."""
PRODUCT_SIZE = 2048


def best_wall_s(command: list[str], rounds: int = ROUNDS) -> float:
    """Return the best wall time of a command, with the start of Python."""
    best_s = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def step_s(system: str) -> float:
    command = [sys.executable, str(HERE / "train_step.py"), system]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["seconds"])


def product_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, the machine's limit for the step."""
    x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype)
    best_s = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x @ x
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * PRODUCT_SIZE**3 / best_s


def measure_rows() -> list[tuple[str, float, str, str]]:
    """Return (name, value, unit, goal) of each figure."""
    rows = [("shardwise --help", best_wall_s([SHARDWISE, "--help"]), "s", "under 0.4")]
    model = installed_model()
    if model is not None:
        generate = [SHARDWISE, "generate", str(model), "--chat", "--prompt", "Hi"]
        generate += ["--max-tokens", "1", "--temperature", "0"]
        name = "SmolLM2-135M from GGUF to the first token, including the start"
        rows.append((name, best_wall_s(generate), "s", "under 5"))
    pairs = [(step_s("ours"), step_s("transformers")) for _ in range(ROUNDS)]
    ours = min(ours for ours, _ in pairs)
    theirs = min(theirs for _, theirs in pairs)
    limit = STEP_FLOPS / product_flops(torch.bfloat16)
    return [
        *rows,
        ("training step, 70.8 M parameters, 2 x 512 tokens, bf16", ours, "s", ""),
        ("forward and backward of transformers in bf16", theirs, "s", ""),
        ("ratio of their time to ours", theirs / ours, "x", "at least 1"),
        ("matrix products at the machine's measured peak", limit, "s", ""),
        ("share of the step that these products would take", limit / ours, "", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows = measure_rows()
    if args.json:
        print(json.dumps({"rows": [{"name": n, "value": v, "unit": u} for n, v, u, _ in rows]}))
        return
    title = f"{os.cpu_count()} cores, torch {torch.__version__}"
    table = Table("figure", "measured", "goal", title=title)
    for name, value, unit, goal in rows:
        table.add_row(name, f"{value:.3g} {unit}", goal)
    Console(width=min(110, shutil.get_terminal_size().columns)).print(table)


if __name__ == "__main__":
    main()
