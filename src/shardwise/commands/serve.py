"""`shardwise serve`: a model behind the API that OpenAI's clients talk to."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import say
from shardwise.precision import PRECISIONS

if TYPE_CHECKING:
    from shardwise.config import ModelConfig
    from shardwise.formats.tokenizers.tokenizer import Tokenizer
    from shardwise.serve.settings import EngineSettings


QUANT = (
    "round the matrices of the blocks to int8, int4-g64 (groups of 64), int4z-g64 (with zero points), int3-g32, fp8 or "
    "the like; as-stored keeps a model that is stored quantized as it is (default: plain numbers in --dtype)"
)
KV_DTYPE = "keep keys and values in int8 or fp8, with a scale for each token and head (default: auto, as in --dtype)"


def add_serve(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI's API does",
        description="Serve a model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/embeddings and "
        "/v1/models; beside them /tokenize, /detokenize, /tokenizer_info, /health, /ready and /metrics. SIGTERM and "
        "Ctrl-C let running requests end.",
    )
    parser.add_argument("model", metavar="MODEL", help="a run, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="0.0.0.0: all (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="who shows it may ask; many allowed (default: everybody may)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model; many allowed (default: MODEL's last part)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages from there may ask from a browser; *: all pages (default: none)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="of a request, 1 MiB at least (default: 4 MiB)",
    )
    add_engine(parser)
    parser.set_defaults(run=run_serve)


def add_engine(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument(
        "--layout", default="dp1", metavar="L", help="how the model is cut, for example tp2"
    )
    layout.add_argument("--tp", type=int, metavar="N", help="the same as --layout tpN")
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="bf16", help="of weights and cache (default: bf16)"
    )
    parser.add_argument("--quant", metavar="Q", help=QUANT)
    parser.add_argument("--kv-dtype", default="auto", metavar="D", help=KV_DTYPE)
    for name, default, what in (
        ("kv-bytes", None, "of keys and values on each rank (default: what memory leaves)"),
        ("max-len", None, "tokens of a prompt and its answer (default: the model's positions)"),
        ("max-batch-tokens", 512, "tokens run in one step (default: 512)"),
        ("max-running", 64, "sequences that run at the same time (default: 64)"),
        ("max-queued", 1024, "requests that wait; more are told when to try again (default: 1024)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what)


def run_serve(args: argparse.Namespace) -> int:
    """Exit 0 when a signal stopped it and every request had ended, 1 when some had to be cut off or
    the engine died."""
    from shardwise.serve.api.server import bind, serve_forever
    from shardwise.serve.api.service import ServerSettings
    from shardwise.serve.engine.remote import RemoteEngine
    from shardwise.serve.engine_client import EngineDied

    settings = ServerSettings(
        tuple(args.served_model_name or [model_name(args.model)]),
        tuple(args.api_key),
        tuple(args.cors_origin),
        args.max_body_bytes,
    )
    with bind(args.host, args.port) as listener:
        engine = RemoteEngine(*describe_engine(args), say)
        try:
            num_cut_off = serve_forever(engine, settings, listener)
        except EngineDied as died:
            say(f"the engine did not start: {died}")
            return 1
    if num_cut_off:
        say(f"{num_cut_off} requests were cut off")
    return 1 if num_cut_off else 0


def model_name(model: str) -> str:
    """What a model is called unless it is said: a file or folder without its path and ending, a hub
    id as it is."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def describe_engine(args: argparse.Namespace) -> "tuple[EngineSettings, ModelConfig, Tokenizer]":
    """What the engine is to be."""
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.load import read_config
    from shardwise.formats.tokenizers.tokenizer import load_tokenizer
    from shardwise.layout import Layout
    from shardwise.serve.settings import EngineSettings, check_model

    path = model_path(find_model(args.model))
    layout = Layout.parse(args.layout if args.tp is None else f"tp{args.tp}")
    settings = EngineSettings(
        path,
        layout,
        args.dtype,
        args.kv_bytes,
        args.max_len,
        max_batch_tokens=args.max_batch_tokens,
        max_running=args.max_running,
        max_queued=args.max_queued,
        quant=args.quant,
        kv_dtype=args.kv_dtype,
    )
    config = read_config(path)
    check_model(settings, config)
    return settings, config, load_tokenizer(path)
