"""`shardwise serve`: an OpenAI-compatible HTTP server for one model."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.flags import add_flags, given_values
from shardwise.commands.terminal import log
from shardwise.environment import api_key
from shardwise.layout import Layout
from shardwise.serve.keywords import VLLM_FLAGS
from shardwise.serve.settings import EngineSettings, ServerSettings, check_model

if TYPE_CHECKING:
    from shardwise.formats.open_model import OpenModel


def add_serve(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over HTTP: /v1/chat/completions, /v1/completions, "
        "/v1/embeddings and /v1/models as in OpenAI's API; /tokenize, /detokenize and "
        "/tokenizer_info as in vLLM; /health, /ready and /metrics. SIGTERM and Ctrl-C let running "
        "requests finish.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a training run, a model folder, a .gguf file or a hub id"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to bind; 0.0.0.0 for all interfaces (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to bind; 0 picks a free port (default: %(default)s)",
    )
    add_flags(parser, ServerSettings)
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="PATH",
        help="require one of the API keys in this file, one a line",
    )
    layout = parser.add_mutually_exclusive_group()
    add_flags(layout, EngineSettings, ["layout"])
    layout.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel size; short for --layout tpN"
    )
    add_flags(parser, EngineSettings, ENGINE_FLAGS)
    parser.other_names = VLLM_FLAGS
    parser.set_defaults(run=run_serve)


ENGINE_FLAGS = (
    "dtype", "quant", "kv_dtype", "kv_bytes", "memory_share", "max_len", "max_batch_tokens",
    "max_running", "max_queued", "generation_config",
)  # fmt: skip


def run_serve(args: argparse.Namespace) -> int:
    """Exit 0 after a signal if every request finished, 1 if some did not or the engine died."""
    from shardwise.serve.api.lifetime import bind, serve_forever
    from shardwise.serve.default_params import default_params
    from shardwise.serve.engine.remote import RemoteEngine
    from shardwise.serve.engine_client import EngineDied

    default_names = {"model_names": (default_model_name(args.model),)}
    values = default_names | given_values(args, ServerSettings)
    settings = ServerSettings(**values | {"api_keys": api_keys(args)})
    with bind(args.host, args.port) as listener:
        model, engine_settings = describe_engine(args)
        sampling = default_params(model.source, engine_settings.generation_config)
        settings = replace(settings, default_params=sampling)
        engine = RemoteEngine(engine_settings, model.config, model.tokenizer, log)
        try:
            num_cut_off = serve_forever(engine, settings, listener)
        except EngineDied as died:
            log(f"the engine did not start: {died}")
            return 1
    if num_cut_off:
        log(f"{num_cut_off} requests were cut off")
    return 1 if num_cut_off else 0


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the command line, of the file and of the environment.

    Other users of a machine can read a command line. Raises ValueError if a source has no key.
    """
    keys: list[str] = list(getattr(args, "api_keys", ()))
    if args.api_key_file is not None:
        lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ValueError(f"{args.api_key_file} has no API key; write one a line")
        keys += in_file
    if (key := api_key()) is not None:
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def default_model_name(model: str) -> str:
    """Return the name of a file or folder without its path and .gguf, or a hub id as it is."""
    path = Path(model)
    return path.absolute().name.removesuffix(".gguf") if path.exists() else model


def describe_engine(args: argparse.Namespace) -> "tuple[OpenModel, EngineSettings]":
    """Return the model and how to serve it. Raises ValueError if it cannot be served so."""
    from shardwise.formats.catalogue import find_model, model_source
    from shardwise.formats.model_source import source_path
    from shardwise.formats.open_model import open_model

    model = open_model(model_source(find_model(args.model)))
    values = given_values(args, EngineSettings)
    if args.tp is not None:
        values["layout"] = Layout.parse(f"tp{args.tp}")
    settings = EngineSettings(source_path(model.source), **values)
    check_model(settings, model.config, model.source)
    return model, settings
