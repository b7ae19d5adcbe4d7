"""`shardwise bench serve`: a model, or any OpenAI-compatible server, under load."""

import argparse
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from shardwise.commands.flags import add_flags, documented_fields, flag_of, given_values
from shardwise.commands.terminal import log, print_rows, progress_bar
from shardwise.measure.rows import Row, ratios_to_first
from shardwise.measure.workload import LatencyLimits, Load, RequestSizes
from shardwise.serve.settings import EngineSettings, check_model

if TYPE_CHECKING:
    from shardwise.measure.load_test import Backend

COMPARED_LOAD_FIGURES = ("output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
LOADED_WITH = ("layout", "dtype", "quant", "kv_dtype")
"""Fields of EngineSettings that `bench serve` has flags for."""
DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 32


def add_bench_serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure a model, or any OpenAI-compatible server, under load",
        description="Load MODEL and send it random prompts without HTTP; or, with --url, send them "
        "to a server. Without --url or any load flag, measure prefill, decode and end-to-end "
        "throughput in this process.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a training run, a model folder, a .gguf file or a hub id; with --url, the model's "
        "name in the server's API (default with --url: its first model)",
    )
    parser.add_argument("--url", metavar="URL", help="a server, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_flags(parser, EngineSettings, LOADED_WITH)
    load = parser.add_argument_group(
        "load", "Loads run one after the other; ratios are to the first."
    )
    load.add_argument(
        "--concurrency",
        action="append",
        type=int,
        metavar="N",
        help="closed loop: N clients, each of which waits for its completion; repeatable "
        f"(default: {DEFAULT_CONCURRENCY})",
    )
    load.add_argument(
        "--rate",
        action="append",
        type=float,
        metavar="R",
        help="open loop: R requests per second, Poisson arrivals; repeatable",
    )
    load.add_argument(
        "--ramp",
        action="append",
        metavar="A:B",
        help="open loop from A to B requests per second, also reported in four quarters; "
        "repeatable",
    )
    load.add_argument(
        "--requests", type=int, metavar="N", help=f"requests per load (default: {DEFAULT_REQUESTS})"
    )
    add_flags(load, RequestSizes)
    load.add_argument(
        "--seed", type=int, metavar="S", help="random seed of the requests (default: 0)"
    )
    add_flags(load, LatencyLimits)
    parser.set_defaults(run=run_bench_serve)


def run_bench_serve(args: argparse.Namespace) -> int:
    """Exit 0 when every request completed, 1 when some failed."""
    if args.url is None and not has_load(args):
        print_rows(measure_in_process(args), {}, "load", args.json)
        return 0
    import asyncio  # 0.05 s, which --help does without

    loads = read_loads(args)
    rows, errors = asyncio.run(measure_loads(args, loads))
    print_rows(rows, ratios_to_first(rows, COMPARED_LOAD_FIGURES), "load", args.json)
    for error in errors:
        log(error)
    return 1 if errors else 0


def has_load(args: argparse.Namespace) -> bool:
    """Return True if any flag of the load was given."""
    names = ("concurrency", "rate", "ramp", "requests", "seed")
    if any(getattr(args, name) is not None for name in names):
        return True
    return bool(given_values(args, RequestSizes) or given_values(args, LatencyLimits))


def measure_in_process(args: argparse.Namespace) -> list[Row]:
    from shardwise.measure.offline import measure_speed

    settings = engine_settings(args)
    with progress_bar() as advance:
        return measure_speed(
            settings, lambda done: advance("prefill, decode, whole requests", done)
        )


def read_loads(args: argparse.Namespace) -> list[Load]:
    """Return the loads in the order concurrency, rate, ramp. Raises ValueError for duplicates."""
    loads = [Load(concurrency=number) for number in args.concurrency or ()]
    loads += [Load(rates=(rate, rate)) for rate in args.rate or ()]
    loads += [Load(rates=read_ramp(text)) for text in args.ramp or ()]
    for load in loads:
        if loads.count(load) > 1:
            raise ValueError(f"the load {load} is named twice; name it once")
    if args.requests is not None and args.requests < 1:
        raise ValueError(f"--requests must be at least 1, not {args.requests}")
    return loads or [Load(concurrency=DEFAULT_CONCURRENCY)]


def read_ramp(text: str) -> tuple[float, float]:
    try:
        first, last = map(float, text.split(":"))
    except ValueError:
        raise ValueError(
            f"--ramp must be A:B, the first and the last rate in requests per second, such as 1:8; "
            f"not {text}"
        ) from None
    return first, last


async def measure_loads(
    args: argparse.Namespace, loads: Sequence[Load]
) -> tuple[list[Row], list[str]]:
    """Return the rows of all loads, run one after the other, and their errors."""
    from shardwise.measure.load_test import measure_load

    sizes = RequestSizes(**given_values(args, RequestSizes))
    limits = LatencyLimits(**given_values(args, LatencyLimits))
    num_requests = args.requests or DEFAULT_REQUESTS
    rows: list[Row] = []
    errors: list[str] = []
    async with open_backend(args) as backend:
        for number, load in enumerate(loads, start=1):
            log(f"{load}, {number} of {len(loads)}")
            with progress_bar() as advance:
                on_done = count_done(num_requests, lambda done: advance("requests", done))
                load_rows, load_errors = await measure_load(
                    backend, load, sizes, num_requests, args.seed or 0, limits, on_done
                )
            rows += load_rows
            errors += [f"{load}: {error}" for error in load_errors]
    return rows, errors


def count_done(total: int, advance: Callable[[float], None]) -> Callable[[], None]:
    """Return a function that, at each call, advances by one of `total`."""
    num_done = 0

    def on_done() -> None:
        nonlocal num_done
        num_done += 1
        advance(num_done / total)

    return on_done


@asynccontextmanager
async def open_backend(args: argparse.Namespace) -> "AsyncGenerator[Backend, None]":
    """Yield the server at --url, or an engine with MODEL that ends with the block."""
    from shardwise.measure.http_client import EngineBackend, HttpBackend, first_model

    if args.url:
        for entry in documented_fields(EngineSettings, LOADED_WITH):
            if hasattr(args, entry.name):
                raise ValueError(
                    f"{flag_of(entry)} configures a local MODEL and cannot be combined with --url"
                )
        model = args.model or await first_model(args.url, args.api_key)
        yield HttpBackend(args.url, model, args.api_key)
        return
    from shardwise.formats.model_source import open_source, read_config
    from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
    from shardwise.serve.engine.remote import RemoteEngine

    settings = engine_settings(args)
    source = open_source(settings.model)
    engine = RemoteEngine(settings, read_config(source), load_tokenizer(source), log)
    try:
        await engine.start()
        yield EngineBackend(engine)
    finally:
        await engine.close()


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """Return how to load MODEL. Raises ValueError if it cannot be served so."""
    from shardwise.formats.catalogue import find_model, model_source
    from shardwise.formats.model_source import source_path

    if not args.model:
        raise ValueError("name a MODEL to load, or pass --url to measure a server")
    found = find_model(args.model)
    source = model_source(found)
    settings = EngineSettings(source_path(source), **given_values(args, EngineSettings))
    check_model(settings, found.config, source)
    return settings
