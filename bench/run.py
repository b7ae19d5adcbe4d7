"""The project's figures, measured on this machine: `make bench`. Machines differ and drift, so what
is compared is run in turns, and ratios are what counts. Prints a table, and with --json one object.
"""

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
"""Of the training step: 6 x 70.8 M weights x 1024 tokens, attention not counted."""


def wall_s(command: list[str], rounds: int = ROUNDS) -> float:
    """The best wall time of a command, Python's start included."""
    best_s = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s


def step_s(which: str) -> float:
    command = [sys.executable, str(HERE / "train_step.py"), which]
    return float(
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[
            "seconds"
        ]
    )


def product_flops(dtype: torch.dtype) -> float:
    """What one large matrix product reaches: the machine's limit for the step."""
    x = torch.randn(2048, 2048).to(dtype)
    best_s = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        x @ x
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * 2048**3 / best_s


def main() -> None:
    as_json = "--json" in sys.argv
    torch.set_num_threads(2)
    rows: list[tuple[str, float, str, str]] = [
        ("shardwise --help", wall_s([SHARDWISE, "--help"]), "s", "under 0.4")
    ]
    model = installed_model()
    if model is not None:
        ask = [
            SHARDWISE,
            "generate",
            str(model),
            "--chat",
            "--prompt",
            "Hi",
            "--max-tokens",
            "1",
            "--temperature",
            "0",
        ]
        rows.append(
            ("SmolLM2-135M from GGUF to the first token, all in", wall_s(ask), "s", "under 5")
        )
    pairs = [(step_s("ours"), step_s("transformers")) for _ in range(ROUNDS)]
    ours = min(a for a, _ in pairs)
    theirs = min(b for _, b in pairs)
    limit = STEP_FLOPS / product_flops(torch.bfloat16)
    rows += [
        ("training step, 70.8 M, 2 x 512 tokens, bf16, whole", ours, "s", ""),
        ("transformers' forward and backward alone, plain bf16", theirs, "s", ""),
        ("ratio of their time to ours", theirs / ours, "x", "at least 1"),
        ("products at the machine's measured peak", limit, "s", ""),
        ("share of the step that the products alone would need", limit / ours, "", ""),
    ]
    if as_json:
        print(json.dumps({"rows": [{"name": n, "value": v, "unit": u} for n, v, u, _ in rows]}))
        return
    table = Table(
        "what", "measured", "wanted", title=f"{os.cpu_count()} cores, torch {torch.__version__}"
    )
    for name, value, unit, wanted in rows:
        table.add_row(name, f"{value:.3g} {unit}", wanted)
    Console(width=min(110, shutil.get_terminal_size().columns)).print(table)


if __name__ == "__main__":
    main()
