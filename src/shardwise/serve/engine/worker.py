"""The engine's own process, or those of its tensor ranks: loads the model, hands out what memory
there is to pages, and then steps while there is work.

The first rank talks to the server over one connection and tells the others every batch before it
runs it. When the server is gone, all end.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig as set_parent_death_signal  # type: ignore[attr-defined]

from shardwise.formats.model_source import open_source, read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.model.layers import DTYPES
from shardwise.parallel.launch import STOP_SIGNALS, Place, run_ranks
from shardwise.parallel.mesh import CollectiveFailed, make_mesh
from shardwise.parallel.peak_memory import peak_memory_bytes, reset_peaks
from shardwise.params import model_specs
from shardwise.quantize.load_quantized import load_quantized
from shardwise.serve.engine.batch import Batch, Part
from shardwise.serve.engine.cuda_graphs import cuda_capture
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.runner import SCORED_ROWS, Runner
from shardwise.serve.engine.scheduler import QueueFull, Scheduler
from shardwise.serve.engine.tensor_ranks import Leader, OutOfStep, end_with, follow, tell
from shardwise.serve.engine_client import Ready
from shardwise.serve.request import MAX_LOGPROBS, Ask
from shardwise.serve.settings import EngineSettings, check_shape

log = logging.getLogger(__name__)

COMPILING_S = 0.005
"""How often it is looked whether a structure has been compiled, if there is nothing else to do."""
IDLE_S = 30.0
"""Ranks that wait for a batch are told this often that there is none, or their collective would
time out."""


def main(settings: EngineSettings, address: str, failure: Connection) -> None:
    """Entry of the engine's process. Why it failed is sent as a sentence."""
    for (
        number
    ) in STOP_SIGNALS:  # a terminal and `kill` reach all processes; the server alone decides
        signal.signal(number, signal.SIG_IGN)
    try:
        refusal = run_ranks(serve, settings.layout.world_size, settings, address)
        if refusal is not None:
            raise ValueError(refusal)
    except Exception as error:
        with suppress(OSError):  # the server is gone
            failure.send((type(error).__name__, str(error)))
        raise SystemExit(1) from None


def serve(place: Place, settings: EngineSettings, address: str) -> str | None:
    """Of one rank, until the server closes the connection. Returns why, if there is something that
    cannot be served."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if place.world_size > 1:
        set_parent_death_signal(signal.SIGKILL)
    server = connect(address) if place.rank == 0 else None

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if server is not None:
            server.send(("phase", name, time.perf_counter() - began))

    try:
        started = start(place, settings, phase)
    except ValueError as error:
        return str(error)
    tp = started.runner.mesh.tp
    pids = [int(pid) for pid in tp.gather(os.getpid())]
    is_over = end_with([pid for pid in pids if pid != os.getpid()])
    try:
        if server is None:
            follow(started.runner)
        else:
            engine = lead(started, settings)
            server.send(("ready", Ready(started.max_len, started.num_pages, settings.page_tokens)))
            serve_until_gone(server, engine)
            tell(tp, None)
    except OutOfStep as error:
        raise RuntimeError(f"rank {place.rank} failed alone in a step") from error.__cause__
    is_over.set()
    return None


def connect(address: str) -> Connection:
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    return Connection(link.detach())


# -- starting
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A rank with its model and its pages; `max_len` is the longest request."""

    runner: Runner
    tokenizer: Tokenizer
    num_pages: int
    max_len: int


def lead(started: Started, settings: EngineSettings) -> Engine:
    """The engine of the first rank."""
    scheduler = Scheduler(Pages(started.num_pages, settings.page_tokens), settings.limits)
    return Engine(
        started.runner.config, started.tokenizer, Leader(started.runner), scheduler, started.max_len
    )


def start(
    place: Place, settings: EngineSettings, phase: Callable[[str], Any] = lambda name: nullcontext()
) -> Started:
    """Load the model and make pages of the memory that is left. Raises ValueError for what does not
    fit, with what does."""
    source = open_source(settings.model)
    config = read_config(source)
    check_shape(settings, config)
    max_len = settings.max_len or config.max_positions
    mesh = make_mesh(settings.layout, place.rank, place.device, config.num_kv_heads)
    dtype = DTYPES[settings.dtype]
    with phase("weights"):
        tokenizer = load_tokenizer(source)
        check_vocabulary(tokenizer, config.vocab_size)
        coord = settings.layout.coord(place.rank)
        weights = load_quantized(
            source,
            config,
            model_specs(config),
            settings.layout,
            coord,
            dtype,
            settings.quant,
            place.device,
        )
        runner = Runner(
            config, weights, mesh, dtype, settings.page_tokens, kv_dtype=settings.kv_dtype
        )
    with phase(f"one full batch with {runner.kernels.name} kernels, for its memory"):
        free_bytes = available_bytes(place.device) // (
            1 if place.device.type == "cuda" else place.world_size
        )
        free_bytes -= batch_bytes(runner, settings)
    with phase("pages"):
        free_bytes = int(mesh.world.max(-free_bytes)[0]) * -1
        num_pages = choose_pages(runner, settings, max_len, free_bytes)
        try:
            runner.make_pages(num_pages)
        except RuntimeError:
            raise ValueError(
                f"{num_pages * runner.page_bytes / 1e9:,.3g} GB of KV cache do not fit into memory, of which each rank "
                f"seemed to have {free_bytes / 1e9:,.3g} GB; a smaller --kv-bytes works"
            ) from None
    if runner.attention.is_capturable and mesh.tp.size == 1:
        with phase("graphs of decode steps"):
            try:
                runner.capture_graphs(
                    settings.limits.max_running, max_len, cuda_capture(place.device)
                )
            except RuntimeError:
                log.exception(
                    "decode steps cannot be captured, and will run operation by operation: slower, but right"
                )
    return Started(runner, tokenizer, num_pages, max_len)


def batch_bytes(runner: Runner, settings: EngineSettings) -> int:
    """What a batch as large as they come takes while it runs, measured."""
    length = min(settings.max_batch_tokens, runner.config.max_positions)
    num_pages = -(-length // settings.page_tokens)
    total = num_pages + -(-(SCORED_ROWS + 1) // settings.page_tokens)
    runner.make_pages(total)
    device = runner.mesh.device
    reset_peaks(device)
    before = peak_memory_bytes(device)
    tokens = tuple(token % runner.config.vocab_size for token in range(length))
    scored = tokens[: SCORED_ROWS + 1]  # logits of a prompt are held for no more at a time
    own = tuple(range(num_pages))
    others = tuple(range(num_pages, total))
    runner.run(
        Batch((Part(0, tokens, 0, own, 1, None), Part(1, scored, 0, others, 1, MAX_LOGPROBS)), ())
    )
    return max(0, peak_memory_bytes(device) - before)


def available_bytes(device: torch.device) -> int:
    """Memory that is free: of the GPU, or of the machine, or of what the container may have of
    it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        told = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    return min(told["MemAvailable"], container_bytes(Path("/sys/fs/cgroup")))


def container_bytes(folder: Path) -> int:
    """Free in a cgroup, which may drop what it has read of files (cgroup v2, "Memory Interface
    Files"); no end of it where there is no limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max"
        return 1 << 62
    return limit - used + int(told.get("inactive_file", 0))


def choose_pages(runner: Runner, settings: EngineSettings, max_len: int, free_bytes: int) -> int:
    """As many as all requests that run at a time could ever fill, or as memory has room for: most
    of a GPU, half of a machine, which others use too. Raises ValueError if that is not one request
    of `max_len`, or if memory has no room for what was asked."""
    per_request = -(-max_len // settings.page_tokens)
    share = 0.92 if runner.mesh.device.type == "cuda" else 0.5
    if settings.kv_bytes is not None and settings.kv_bytes > free_bytes:
        fits = max(0, int(share * free_bytes)) // runner.page_bytes * runner.page_bytes
        raise ValueError(
            f"a KV cache of {settings.kv_bytes / 1e9:,.3g} GB was asked for, but each rank has "
            f"{max(0, free_bytes) / 1e9:,.3g} GB left; --kv-bytes {fits} fits"
        )
    room_bytes = int(share * free_bytes) if settings.kv_bytes is None else settings.kv_bytes
    fitting = max(0, room_bytes) // runner.page_bytes
    if fitting < per_request:
        works = fitting * settings.page_tokens
        hint = f"--max-len {works} fits" if works >= 2 else "a smaller model, or more memory, works"
        raise ValueError(
            f"a request of {max_len} tokens needs {per_request * runner.page_bytes / 1e9:,.3g} GB of KV cache on each "
            f"rank, which has {room_bytes / 1e9:,.3g} GB for it; {hint}"
        )
    return (
        fitting
        if settings.kv_bytes is not None
        else min(fitting, per_request * settings.max_running)
    )


# -- talking to the server
# ----------------------------------------------------------------------------------


def serve_until_gone(server: Connection, engine: Engine) -> None:
    with suppress(EOFError, OSError):
        converse(server, engine)


def converse(server: Connection, engine: Engine) -> None:
    """Take what comes between steps; wait for it where there is nothing to do. Of the inputs to be
    embedded one is run between two steps, so that they hold up nobody."""
    inputs: dict[int, Sequence[int]] = {}
    while True:
        is_busy = engine.has_work or inputs
        patience_s = 0 if is_busy else COMPILING_S if engine.compiling else IDLE_S
        while server.poll(patience_s):
            answer(server, engine, inputs, server.recv())
            patience_s = 0
        for name, error in engine.begin_compiled():
            refuse(server, name, error)
        if inputs:
            embed_next(server, engine, inputs)
        if engine.has_work:
            if pieces := engine.step():
                server.send(("pieces", pieces))
        elif not is_busy and not engine.compiling:
            engine.runner.keep_alive()


def answer(
    server: Connection, engine: Engine, inputs: dict[int, Sequence[int]], message: tuple[Any, ...]
) -> None:
    what, name, *given = message
    try:
        if what == "add":
            (ask,) = given
            assert isinstance(ask, Ask)
            engine.add(name, ask)
        elif what == "abort":
            inputs.pop(name, None)
            engine.abort(name)
        elif what == "embed":
            (tokens,) = given
            engine.check_input(tokens)
            if len(inputs) >= engine.scheduler.limits.max_queued:
                raise QueueFull(len(inputs), 1)
            inputs[name] = tokens
        else:
            assert what == "stats"
            server.send(("answer", name, engine.stats()))
    except (ValueError, QueueFull) as error:
        refuse(server, name, error)


def embed_next(server: Connection, engine: Engine, inputs: dict[int, Sequence[int]]) -> None:
    name = next(iter(inputs))
    try:
        server.send(("answer", name, engine.embed(inputs.pop(name))))
    except CollectiveFailed:
        raise
    except RuntimeError as error:  # of the model
        server.send(("failed", name, str(error)))


def refuse(server: Connection, name: int, error: Exception) -> None:
    if isinstance(error, QueueFull):
        server.send(("full", name, (error.num_waiting, error.retry_after_s)))
    else:
        server.send(("refused", name, str(error)))
