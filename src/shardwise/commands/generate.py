"""`shardwise generate`: one completion of one prompt, streamed to the terminal."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.commands.flags import add_flags, given_values
from shardwise.commands.terminal import format_rate
from shardwise.serve.request import CompletionOutput, Request, SamplingParams, check_length
from shardwise.serve.settings import EngineSettings
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.formats.open_model import OpenModel
    from shardwise.formats.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256
SAMPLING_FLAGS = {
    "temperature": (float, "T", "sampling temperature; 0 is greedy"),
    "top_k": (int, "K", "sample from the K most likely tokens; 0 for all"),
    "top_p": (float, "P", "nucleus sampling: the fewest tokens whose probabilities sum to P"),
    "min_p": (float, "P", "drop tokens less than P times as likely as the top one"),
}
"""Flags with the names of fields of SamplingParams: their type, metavar and help."""


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
    for name, (value_type, metavar, text) in SAMPLING_FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=value_type,
            metavar=metavar,
            help=f"{text} (default: the model's generation_config.json, else "
            f"{getattr(SamplingParams, name):g})",
        )
    parser.add_argument("--seed", type=int, metavar="S", help="random seed (default: random)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the completion before this text; repeatable",
    )
    add_flags(parser, EngineSettings, ["dtype", "quant", "kv_dtype", "generation_config"])
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    from shardwise.formats.catalogue import find_model, model_source
    from shardwise.formats.open_model import open_model
    from shardwise.serve.default_params import default_params

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.system and not args.chat:
        raise ValueError("--system requires --chat")
    model = open_model(model_source(find_model(args.model)))
    values = given_values(args, EngineSettings)
    given = {name: getattr(args, name) for name in (*SAMPLING_FLAGS, "seed")}
    params = replace(
        default_params(model.source, values.get("generation_config", "auto")),
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
        stop=tuple(args.stop),
        logprobs=0 if args.json else None,
    )
    tokens = prompt_tokens(model.tokenizer, prompt, args.chat, args.system)
    capacity = model.config.max_positions - len(tokens)
    if args.max_tokens is None and 0 < capacity < DEFAULT_MAX_TOKENS:
        params = replace(params, max_tokens=capacity)
    show = ignore_text if args.json else write_stdout
    request = Request(tuple(tokens), params, starts_text=args.chat)
    completed = complete(model, request, show, **values)
    if args.json:
        print(json_text(asdict(completed)))
    else:
        write_stdout("\n")
        print(completed.summary(), file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Completed:
    """A completion with its timing.

    Attributes:
        tokens: Its tokens, without the end token.
        logprobs: Their log-probabilities under the unmodified logits, if requested.
        load_s: Seconds to load the model.
        first_token_s: Seconds for the prompt and the first token.
        tokens_per_s: Rate of the tokens after the first.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    prompt_tokens: int
    finish_reason: str
    load_s: float
    first_token_s: float
    tokens_per_s: float

    def summary(self) -> str:
        return (
            f"{len(self.tokens)} tokens: model loaded in {self.load_s:.2f} s, first token after "
            f"{self.first_token_s:.2f} s, then {format_rate(self.tokens_per_s)} tokens/s"
        )


def complete(
    model: "OpenModel", request: Request, show: Callable[[str], None], **settings: Any
) -> Completed:
    """Load a model and complete a request, in an engine just large enough for it; `settings` are
    further fields of EngineSettings, and `show` gets text as soon as no later token can change it.

    Raises ValueError for a prompt and completion that exceed the context length, and if the model
    computes logits that are not numbers.
    """
    from shardwise.formats.model_source import source_path
    from shardwise.parallel.launch import Place, device_of
    from shardwise.serve.engine.worker import make_engine, start_rank

    num_prompt = len(request.tokens)
    max_tokens = check_length(num_prompt, request.params, model.config.max_positions)
    for_one = EngineSettings(
        source_path(model.source),
        **settings,
        max_len=num_prompt + max_tokens,
        max_running=1,
        max_batch_tokens=max(2, min(num_prompt, EngineSettings.max_batch_tokens)),
    )
    start_s = time.perf_counter()
    place = Place(0, 1, device_of(0, 1))
    engine = make_engine(start_rank(place, for_one, opened=model), for_one)
    loaded_s = time.perf_counter()
    first_s = 0.0
    output = CompletionOutput(0)
    engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            first_s = first_s or time.perf_counter()
            output.add(delta)
            if delta.text:
                show(delta.text)
    end_s = time.perf_counter()
    if output.finish_reason == "error":
        raise ValueError(
            "the model's logits are not numbers: its weights are damaged, or it diverged in "
            "training"
        )
    assert output.finish_reason is not None
    tokens = output.token_ids
    rate = (len(tokens) - 1) / (end_s - first_s) if len(tokens) > 1 else 0.0
    if tokens[-1] in engine.tokenizer.eos_ids:
        tokens = tokens[:-1]
    return Completed(
        output.text,
        tokens,
        [each.logprob for each in output.logprobs[: len(tokens)]],
        num_prompt,
        output.finish_reason,
        loaded_s - start_s,
        first_s - loaded_s,
        rate,
    )


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
