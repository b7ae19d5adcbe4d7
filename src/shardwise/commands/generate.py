"""`shardwise generate`: one prompt, one answer, streamed."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from shardwise.commands.serve import QUANT
from shardwise.precision import PRECISIONS

DEFAULT_TOKENS = 256


def add_generate(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, or answer it as a chat",
        description="Continue a prompt with a model: a training run, a Hugging Face folder, a GGUF file or a hub id.",
    )
    parser.add_argument("model", metavar="MODEL", help="a run, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="what to continue; - reads it from stdin"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message for --chat")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"new tokens at most (default: {DEFAULT_TOKENS}, or what room the model's positions leave)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0: the likeliest token (default: 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="only the K likeliest tokens (default: 0, all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest that sum to P (default: 1, all)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="only those P times as likely as the first",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed draws the same tokens")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; many allowed",
    )
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="bf16", help="of weights and cache (default: bf16)"
    )
    parser.add_argument("--quant", metavar="Q", help=QUANT)
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.model.layers import DTYPES
    from shardwise.parallel.launch import device_of
    from shardwise.serve.generate import generate, load_model
    from shardwise.serve.request import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=DEFAULT_TOKENS if args.max_tokens is None else args.max_tokens,
        stop=tuple(args.stop),
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.system and not args.chat:
        raise ValueError("--system is a message of a chat; add --chat")
    model = load_model(
        model_path(find_model(args.model)), DTYPES[args.dtype], device_of(0, 1), args.quant
    )
    tokens = prompt_tokens(model.tokenizer, prompt, args.chat, args.system)
    room = model.config.max_positions - len(tokens)
    if args.max_tokens is None and 0 < room < DEFAULT_TOKENS:
        params = replace(params, max_tokens=room)
    answer = generate(model, tokens, params, (lambda text: None) if args.json else write)
    if args.json:
        print(
            json.dumps(
                {
                    "text": answer.text,
                    "tokens": answer.tokens,
                    "logprobs": answer.logprobs,
                    "prompt_tokens": answer.prompt_tokens,
                    "tokens_per_s": answer.tokens_per_s,
                    "first_token_s": answer.first_token_s,
                    "finish_reason": answer.finish_reason,
                }
            )
        )
    else:
        write("\n")
        print(
            f"{len(answer.tokens)} tokens, the first after {answer.first_token_s:.2f} s, then "
            f"{answer.tokens_per_s:.0f} tokens/s",
            file=sys.stderr,
        )
    return 0


def prompt_tokens(tokenizer: Any, prompt: str, chat: bool, system: str | None = None) -> list[int]:
    """The prompt as ids: as it is, or as the user's message of a chat, whose template writes the
    special tokens."""
    if not chat:
        ids: list[int] = tokenizer.encode(prompt, special_tokens=True)
        return ids
    messages = [{"role": "system", "content": system}] if system else []
    chatted: list[int] = tokenizer.encode(
        tokenizer.chat([*messages, {"role": "user", "content": prompt}])
    )
    return chatted


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
