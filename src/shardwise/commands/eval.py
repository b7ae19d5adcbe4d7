"""`shardwise eval`: the perplexity of a text, and the agreement of trainer and server on its
log-probabilities."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.flags import add_flags, given_values
from shardwise.commands.terminal import log, progress_bar
from shardwise.serve.settings import EngineSettings
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.formats.tokenizers.tokenizer import Tokenizer


def add_eval(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="measure how well a model predicts a text",
        description="Measure how well a model predicts a text (perplexity), or how closely the "
        "trainer and the server agree on its log-probabilities (logprobs).",
    )
    metrics = parser.add_subparsers(metavar="METRIC", dest="what", required=True)
    perplexity = metrics.add_parser(
        "perplexity",
        help="exp of the mean negative log-likelihood per token",
        description="Measure the perplexity of a text: exp of the mean negative log-likelihood "
        "per token, computed as `serve` computes it: same kernels, quantized weights and KV cache.",
    )
    add_text_flags(perplexity)
    perplexity.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens scored per window of --context tokens; smaller strides give each token more "
        "context (default: --context, no overlap)",
    )
    add_flags(perplexity, EngineSettings, ["dtype", "quant", "kv_dtype"])
    perplexity.set_defaults(run=run_perplexity)
    logprobs = metrics.add_parser(
        "logprobs",
        help="difference between the log-probabilities of the trainer and the server",
        description="Compute the log-probability of every token of a text twice, as the trainer "
        "does and as the server does, and print how far they differ.",
    )
    add_text_flags(logprobs)
    add_flags(logprobs, EngineSettings, ["dtype"])
    logprobs.set_defaults(run=run_logprobs)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a training run, a model folder, a .gguf file or a hub id"
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="a UTF-8 text file")
    parser.add_argument(
        "--parse-special",
        action="store_true",
        help="parse control tokens that are spelled out in the text; by default they are text, as "
        "in `data build`",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per forward pass (default: the model's context length)",
    )


def run_perplexity(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_source
    from shardwise.formats.model_source import source_path
    from shardwise.formats.open_model import open_model
    from shardwise.measure.perplexity import check_windows, perplexity
    from shardwise.measure.served_model import start_model

    check_at_least_one(args, ["context", "stride"])
    opened = open_model(model_source(find_model(args.model)))
    max_positions = opened.config.max_positions
    context = args.context or max_positions
    stride = args.stride or context
    check_windows(context, stride, max_positions)
    tokens = encode_text(opened.tokenizer, args)
    settings = EngineSettings(
        source_path(opened.source),
        **given_values(args, EngineSettings),
        max_len=min(max_positions, max(2, min(context, len(tokens)))),
        max_running=1,
    )
    with progress_bar() as advance:
        model = start_model(settings, opened)
        result = perplexity(
            model.logits, tokens, context, stride, lambda done: advance("perplexity", done)
        )
    if args.json:
        print(json_text(asdict(result)))
    else:
        print(
            f"perplexity {result.perplexity:.4g} over {result.tokens:,} tokens, "
            f"{result.nll:.4f} nats per token"
        )
    return 0


def run_logprobs(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
    from shardwise.measure.perplexity import compare_trainer_with_server

    check_at_least_one(args, ["context"])
    path = model_path(find_model(args.model))
    settings = EngineSettings(path, **given_values(args, EngineSettings))
    with progress_bar() as advance:
        tokens = encode_text(load_tokenizer(path), args)
        result = compare_trainer_with_server(
            path, tokens, settings.dtype, args.context, lambda done: advance("logprobs", done)
        )
    if args.json:
        print(json_text(asdict(result)))
    else:
        print(
            f"{result.tokens:,} tokens: log-probabilities of trainer and server differ by at most "
            f"{result.max_abs_difference:.2g}, by {result.mean_abs_difference:.2g} on average"
        )
    return 0


def encode_text(tokenizer: "Tokenizer", args: argparse.Namespace) -> list[int]:
    """Return the ids of the file --data, with what the model expects around a text; control tokens
    that are spelled out in it are read as `data build` reads them."""
    text = read_utf8(Path(args.data))
    num_special = tokenizer.count_special(text)
    if num_special:
        meaning = "parsed as such" if args.parse_special else "read as text"
        log(f"{num_special:,} control token{'s' * (num_special > 1)} spelled out, {meaning}")
    return tokenizer.encode(text, special_tokens=True, parse_special=args.parse_special)


def check_at_least_one(args: argparse.Namespace, names: list[str]) -> None:
    """Raise ValueError if one of these flags was given and is below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def read_utf8(path: Path) -> str:
    if path.is_dir():
        raise ValueError(f"--data takes a UTF-8 text file, but {path} is a folder")
    try:
        return path.read_bytes().decode("utf-8-sig")  # as `data build` reads it: CR LF stays
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
