"""`shardwise generate`: one completion of one prompt, streamed to the terminal."""

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.commands.flags import add_flags, given_values
from shardwise.commands.terminal import format_rate
from shardwise.serve.request import SamplingParams
from shardwise.serve.settings import EngineSettings

if TYPE_CHECKING:
    from shardwise.formats.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256


def add_generate(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, or answer it as a chat",
        description="Generate one completion with a model: a training run, a Hugging Face folder, "
        "a GGUF file or a hub id.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a training run, a model folder, a .gguf file or a hub id"
    )
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; - reads it from stdin"
    )
    parser.add_argument(
        "--chat", action="store_true", help="format the prompt with the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message for --chat")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum number of new tokens (default: {DEFAULT_MAX_TOKENS}, or as many as the "
        "model's context length allows)",
    )
    for name, value_type, metavar, text in (
        ("temperature", float, "T", "sampling temperature; 0 is greedy"),
        ("top_k", int, "K", "sample from the K most likely tokens; 0 for all"),
        ("top_p", float, "P", "nucleus sampling: the fewest tokens whose probabilities sum to P"),
        ("min_p", float, "P", "drop tokens less than P times as likely as the top one"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=value_type,
            default=getattr(SamplingParams, name),
            metavar=metavar,
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument("--seed", type=int, metavar="S", help="random seed (default: random)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the completion before this text; repeatable",
    )
    add_flags(parser, EngineSettings, ["dtype", "quant"])
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.model.layers import DTYPES
    from shardwise.parallel.launch import device_of
    from shardwise.serve.generate import generate, load_model

    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
        stop=tuple(args.stop),
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.system and not args.chat:
        raise ValueError("--system requires --chat")
    path = model_path(find_model(args.model))
    settings = EngineSettings(path, **given_values(args, EngineSettings))
    model = load_model(path, DTYPES[settings.dtype], device_of(0, 1), settings.quant)
    tokens = prompt_tokens(model.tokenizer, prompt, args.chat, args.system)
    capacity = model.config.max_positions - len(tokens)
    if args.max_tokens is None and 0 < capacity < DEFAULT_MAX_TOKENS:
        params = replace(params, max_tokens=capacity)
    completion = generate(model, tokens, params, ignore_text if args.json else write_stdout)
    if args.json:
        result = {
            "text": completion.text,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "prompt_tokens": completion.prompt_tokens,
            "tokens_per_s": completion.tokens_per_s,
            "first_token_s": completion.first_token_s,
            "finish_reason": completion.finish_reason,
        }
        print(json.dumps(result))
    else:
        write_stdout("\n")
        print(
            f"{len(completion.tokens)} tokens, the first after {completion.first_token_s:.2f} s, "
            f"then {format_rate(completion.tokens_per_s)} tokens/s",
            file=sys.stderr,
        )
    return 0


def prompt_tokens(
    tokenizer: "Tokenizer", prompt: str, chat: bool, system: str | None = None
) -> list[int]:
    """Return the token ids of a text, or of a user message in the model's chat template."""
    if not chat:
        return tokenizer.encode(prompt, special_tokens=True)
    messages = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode(tokenizer.chat([*messages, {"role": "user", "content": prompt}]))


def write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def ignore_text(text: str) -> None:
    pass
