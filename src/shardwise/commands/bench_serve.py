"""`shardwise bench serve`: a model of ours, or any server of OpenAI's API, under load."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardwise.commands.serve import QUANT
from shardwise.commands.terminal import answer_console, progress_bar, say
from shardwise.precision import PRECISIONS

if TYPE_CHECKING:
    from shardwise.measure.load_test import Row, Target
    from shardwise.measure.workload import Load
    from shardwise.serve.settings import EngineSettings

COMPARED = ("output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
FLAGS_OF_SERVE = (
    "url", "api_key", "concurrency", "rate", "ramp", "requests", "prompt_tokens", "max_tokens", "lengths",
    "shared_prefix", "seed", "ttft_ms", "itl_ms", "dtype", "quant", "kv_dtype",
)  # fmt: skip
FLAGS_OF_LOADS = (
    "concurrency", "rate", "ramp", "requests", "prompt_tokens", "max_tokens", "lengths", "shared_prefix", "seed",
    "ttft_ms", "itl_ms",
)  # fmt: skip
FLAGS_OF_ENGINE = ("layout", "dtype", "quant", "kv_dtype")
DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 32


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group(
        "bench serve",
        "MODEL is loaded and asked without HTTP; or, with --url, it is what that server calls its model. With no flag "
        "of a load: the speed of prefill, decode and whole requests, as engines are compared",
    )
    flags.add_argument(
        "--url", metavar="URL", help="of a server, for example http://127.0.0.1:8000/v1"
    )
    flags.add_argument("--api-key", metavar="KEY", help="for the server")
    loads = "may be given many times, ratios are to the first load"
    flags.add_argument(
        "--concurrency",
        action="append",
        type=int,
        metavar="N",
        help=f"closed loop: N clients that each wait for their answers; {loads} (default: {DEFAULT_CONCURRENCY})",
    )
    flags.add_argument(
        "--rate",
        action="append",
        type=float,
        metavar="R",
        help=f"open loop: R requests a second, by chance; {loads}",
    )
    flags.add_argument(
        "--ramp",
        action="append",
        metavar="A:B",
        help="open loop from A to B requests a second, told in four parts",
    )
    flags.add_argument(
        "--requests", type=int, metavar="N", help=f"of each load (default: {DEFAULT_REQUESTS})"
    )
    flags.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="of each prompt (default: 128)"
    )
    flags.add_argument(
        "--max-tokens", type=int, metavar="N", help="of each answer, end or not (default: 128)"
    )
    flags.add_argument(
        "--lengths",
        choices=("fixed", "sharegpt"),
        help="sharegpt: drawn, with the mean lengths of ShareGPT, 161 and 338 tokens (default: fixed)",
    )
    flags.add_argument(
        "--shared-prefix",
        type=float,
        metavar="SHARE",
        help="of each prompt, the same in all of them",
    )
    flags.add_argument(
        "--seed", type=int, metavar="S", help="the same seed draws the same requests (default: 0)"
    )
    flags.add_argument(
        "--ttft-ms", type=float, metavar="MS", help="goodput: the first token comes within"
    )
    flags.add_argument(
        "--itl-ms",
        type=float,
        metavar="MS",
        help="goodput: each after it, on average, comes within",
    )
    flags.add_argument(
        "--dtype", choices=PRECISIONS, help="of the weights of MODEL (default: bf16)"
    )
    flags.add_argument("--quant", metavar="Q", help="of MODEL: " + QUANT)
    flags.add_argument(
        "--kv-dtype", metavar="T", help="of the keys and values of MODEL: auto, int8 or fp8"
    )


def run_bench_serve(args: argparse.Namespace) -> int:
    """Exit 0 when every request was answered, 1 when some were not."""
    if all(getattr(args, name) is None for name in ("url", *FLAGS_OF_LOADS)):
        tell(bench_speed(args), {}, args.json)
        return 0
    loads = read_loads(args)
    rows, problems = asyncio.run(bench(args, loads))
    tell(rows, ratios_of(rows, [str(load) for load in loads]), args.json)
    for problem in problems:
        print(f"shardwise: {problem}", file=sys.stderr)
    return 1 if problems else 0


def bench_speed(args: argparse.Namespace) -> "list[Row]":
    """What the model does with nothing in between."""
    from shardwise.measure.offline import measure_speed

    settings = settings_of(args)
    with progress_bar() as advance:
        return measure_speed(
            settings, lambda share: advance("prefill, decode, whole requests", share)
        )


def read_loads(args: argparse.Namespace) -> "list[Load]":
    from shardwise.measure.workload import Load

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
            f"--ramp {text} is not A:B, the first and the last requests a second; 1:8 is"
        ) from None
    return first, last


async def bench(args: argparse.Namespace, loads: "Sequence[Load]") -> "tuple[list[Row], list[str]]":
    """The figures of all loads, one after the other, and what went wrong."""
    from shardwise.measure.load_test import Goals, measure
    from shardwise.measure.workload import Sizes

    given = {
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "lengths": args.lengths,
        "shared": args.shared_prefix,
    }
    sizes = Sizes(**{name: value for name, value in given.items() if value is not None})
    goals = Goals(
        *(None if limit is None else limit / 1000 for limit in (args.ttft_ms, args.itl_ms))
    )
    num_requests = args.requests or DEFAULT_REQUESTS
    rows: list[Row] = []
    problems: list[str] = []
    async with target_of(args) as target:
        for number, load in enumerate(loads, start=1):
            say(f"{load}, {number} of {len(loads)}")
            with progress_bar() as advance:
                done = counted(num_requests, lambda share: advance("requests", share))
                found, wrong = await measure(
                    target, load, sizes, num_requests, args.seed or 0, goals, done
                )
            rows += found
            problems += [f"{load}: {problem}" for problem in wrong]
    return rows, problems


def counted(total: int, advance: Callable[[float], None]) -> Callable[[], None]:
    finished = 0

    def done() -> None:
        nonlocal finished
        finished += 1
        advance(finished / total)

    return done


@asynccontextmanager
async def target_of(args: argparse.Namespace) -> "AsyncGenerator[Target, None]":
    """The server that is named, or an engine that ends with the block."""
    from shardwise.measure.http_client import EngineTarget, UrlTarget, first_model

    if args.url:
        for name in FLAGS_OF_ENGINE:
            if getattr(args, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} says how MODEL is loaded; the server at {args.url} has its own already"
                )
        yield UrlTarget(
            args.url, args.model or await first_model(args.url, args.api_key), args.api_key
        )
        return
    from shardwise.formats.load import read_config
    from shardwise.formats.tokenizers.tokenizer import load_tokenizer
    from shardwise.serve.engine.remote import RemoteEngine

    settings = settings_of(args)
    engine = RemoteEngine(
        settings, read_config(settings.model), load_tokenizer(settings.model), say
    )
    try:
        await engine.start()
        yield EngineTarget(engine)
    finally:
        await engine.close()


def settings_of(args: argparse.Namespace) -> "EngineSettings":
    """How MODEL is loaded."""
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.load import read_config
    from shardwise.layout import Layout
    from shardwise.serve.settings import EngineSettings, check_model

    if not args.model:
        raise ValueError("say which model is to be served, or with --url which server")
    if args.layout and len(args.layout) > 1:
        raise ValueError("a benchmark of serving has one layout, for example --layout tp2")
    path = model_path(find_model(args.model))
    layout = Layout.parse((args.layout or ["dp1"])[0])
    settings = EngineSettings(
        path, layout, args.dtype or "bf16", quant=args.quant, kv_dtype=args.kv_dtype or "auto"
    )
    check_model(settings, read_config(path))
    return settings


def ratios_of(rows: "Sequence[Row]", loads: Sequence[str]) -> dict[str, float]:
    """Of each later load to the first, by `NAME LOAD/FIRST`."""
    values = {(row.load, row.name): row.value for row in rows}
    first, *others = loads
    return {
        f"{name} {load}/{first}": values[load, name] / values[first, name]
        for name in COMPARED
        for load in others
        if values.get((first, name)) and (load, name) in values
    }


def tell(rows: "Sequence[Row]", ratios: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratios": ratios}))
        return
    from rich.table import Table

    loads = list(dict.fromkeys(row.load for row in rows))
    values = {(row.load, row.name): f"{row.value:,.4g}" for row in rows}
    table = Table("", *loads, "unit")
    for name, unit in dict.fromkeys((row.name, row.unit) for row in rows):
        table.add_row(name, *(values.get((load, name), "") for load in loads), unit)
    answer_console().print(table)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
