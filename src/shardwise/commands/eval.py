"""`shardwise eval`: the perplexity of a text; and whether the trainer and the server agree on it,
token by token."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.commands.serve import QUANT
from shardwise.commands.terminal import progress_bar
from shardwise.precision import PRECISIONS


def add_eval(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="score a text: perplexity, or trainer against server",
        description="`shardwise eval perplexity MODEL --data FILE` says how well a model foresees a text; `shardwise "
        "eval logprobs MODEL --data FILE` how far the log-probabilities of training and of serving are apart.",
    )
    parser.add_argument("what", choices=("perplexity", "logprobs"), help="what is worked out")
    parser.add_argument("model", metavar="MODEL", help="a run, a folder, a .gguf file or a hub id")
    parser.add_argument("--data", required=True, metavar="FILE", help="text in UTF-8")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that are run at once (default: the model's positions)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="of perplexity: windows overlap so that each scores N tokens; the fewer, the more each token sees before "
        "it (default: the context, no overlap)",
    )
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="bf16", help="of weights and cache (default: bf16)"
    )
    parser.add_argument("--quant", metavar="Q", help="of perplexity: " + QUANT)
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.tokenizers.tokenizer import load_tokenizer
    from shardwise.measure.perplexity import agreement, perplexity
    from shardwise.model.layers import DTYPES
    from shardwise.parallel.launch import device_of
    from shardwise.serve.generate import load_model

    for name in ("context", "stride"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    path = model_path(find_model(args.model))
    text = read_text(Path(args.data))
    with progress_bar() as advance:
        if args.what == "logprobs":
            if args.stride is not None:
                raise ValueError(
                    "--stride is a flag of `eval perplexity`; logprobs scores each token once"
                )
            if args.quant is not None:
                raise ValueError(
                    "--quant is a flag of `eval perplexity`; the trainer knows no quantized weights"
                )
            tokens = load_tokenizer(path).encode(text, special_tokens=True)
            agreed = agreement(
                path, tokens, args.dtype, args.context, lambda done: advance("logprobs", done)
            )
            sentence = (
                f"{agreed.tokens:,} tokens: log-probabilities of trainer and server differ by "
                f"{agreed.max_abs_difference:.2g} at most, {agreed.mean_abs_difference:.2g} on average"
            )
            tell(asdict(agreed), sentence, args.json)
            return 0
        model = load_model(path, DTYPES[args.dtype], device_of(0, 1), args.quant)
        tokens = model.tokenizer.encode(text, special_tokens=True)
        context = args.context or model.config.max_positions
        found = perplexity(
            model, tokens, context, args.stride or context, lambda done: advance("perplexity", done)
        )
    sentence = (
        f"perplexity {found.perplexity:.4g} over {found.tokens:,} tokens, {found.nll:.4f} nats each"
    )
    tell(asdict(found), sentence, args.json)
    return 0


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8: {error.reason} at byte {error.start}"
        ) from None


def tell(answer: dict[str, float], sentence: str, as_json: bool) -> None:
    print(json.dumps(answer) if as_json else sentence)
