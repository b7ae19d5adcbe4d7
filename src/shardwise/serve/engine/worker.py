"""The process of the engine, or of one of its tensor ranks: loads the model, allocates the KV
cache, and then steps while there is work.

Rank 0 is connected to the server and broadcasts every batch to the other ranks before it computes
it. When the server is gone, all ranks end.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shardwise.config import ModelConfig
from shardwise.formats.open_model import OpenModel, open_model
from shardwise.formats.storage_formats import choose_formats, stored_formats
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.description import describe_kernels
from shardwise.kernels.registry import serving_kernels
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.kv_pages import pages_per_sequence
from shardwise.model.layers import DTYPES
from shardwise.parallel.launch import STOP_SIGNALS, Place, run_ranks, when_launcher_ends
from shardwise.parallel.memory import available_bytes, peak_memory_bytes, reset_peaks
from shardwise.parallel.mesh import CollectiveFailed, Mesh, make_mesh
from shardwise.params import model_specs
from shardwise.quantize.load_quantized import load_quantized
from shardwise.serve.engine.cuda_graphs import cuda_capture
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.runner import LOGPROB_ROWS, Runner
from shardwise.serve.engine.scheduler import QueueFull, Scheduler
from shardwise.serve.engine.sequence import Batch, BatchEntry
from shardwise.serve.engine.startup_report import describe_weights
from shardwise.serve.engine.tensor_ranks import (
    DriverRunner,
    OutOfStep,
    broadcast_command,
    end_with,
    worker_loop,
)
from shardwise.serve.engine_client import Ready
from shardwise.serve.request import MAX_LOGPROBS
from shardwise.serve.settings import EngineSettings, check_shape

log = logging.getLogger(__name__)

COMPILING_S = 0.005
"""Interval at which an idle engine checks whether a grammar has been compiled."""
IDLE_S = 30.0
"""Interval at which an idle engine keeps the other ranks' collective from timing out."""


def main(settings: EngineSettings, address: str, failure: Connection) -> None:
    """Run the engine's process. If it fails, the reason is sent as a sentence."""
    ignore_stop_signals()
    try:
        refusal = run_ranks(serve_rank, settings.layout.world_size, settings, address)
        if refusal is not None:
            raise ValueError(refusal)
    except Exception as error:
        with suppress(OSError):  # the server is gone
            failure.send((type(error).__name__, str(error)))
        raise SystemExit(1) from None


def ignore_stop_signals() -> None:
    """Leave stop signals to the server: a terminal and `kill` send them to all processes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def serve_rank(place: Place, settings: EngineSettings, address: str) -> str | None:
    """Run one rank until the server disconnects.

    Returns the reason if the model cannot be served with these settings.
    """
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if place.world_size > 1:
        when_launcher_ends(signal.SIGKILL)
    server = connect(address) if place.rank == 0 else None

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        if server is not None:
            server.send(("phase", name, time.perf_counter() - start_s))

    try:
        started = start_rank(place, settings, phase)
    except ValueError as error:
        return str(error)
    tp = started.runner.mesh.tp
    pids = [int(pid) for pid in tp.gather(os.getpid())]
    is_over = end_with([pid for pid in pids if pid != os.getpid()])
    try:
        if server is None:
            worker_loop(started.runner)
        else:
            engine = make_engine(started, settings)
            server.send(("ready", report_of(started, settings)))
            serve_until_gone(server, engine)
            broadcast_command(tp, None)
    except OutOfStep as error:
        raise RuntimeError(f"rank {place.rank} failed alone in a step") from error.__cause__
    is_over.set()
    return None


def connect(address: str) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    return Connection(client.detach())


# -- start


@dataclass(frozen=True)
class StartedRank:
    """A rank with its model and its pages.

    Attributes:
        max_len: The most tokens that a request may have.
        weights: How the weights are held, in words.
    """

    runner: Runner
    tokenizer: Tokenizer
    num_pages: int
    max_len: int
    weights: str


def report_of(started: StartedRank, settings: EngineSettings) -> Ready:
    kernels = started.runner.kernels.name
    device_type = started.runner.mesh.device.type
    return Ready(
        started.max_len,
        started.num_pages,
        settings.page_tokens,
        started.weights,
        describe_kernels(kernels, device_type, settings.dtype),
    )


Phase = Callable[[str], Any]
"""Returns a context manager that reports how long the named phase of the start takes."""


def make_engine(started: StartedRank, settings: EngineSettings) -> Engine:
    """Return the engine, which lives on rank 0."""
    config = started.runner.config
    pages = Pages(started.num_pages, settings.page_tokens, config.kv_window)
    scheduler = Scheduler(pages, settings.limits, started.max_len)
    runner = DriverRunner(started.runner)
    return Engine(config, started.tokenizer, runner, scheduler)


def start_rank(
    place: Place,
    settings: EngineSettings,
    phase: Phase = lambda name: nullcontext(),
    opened: OpenModel | None = None,
) -> StartedRank:
    """Load the model and allocate pages in the memory that is left. `opened` is the model of the
    settings, if it is already open.

    Raises ValueError for what does not fit, with what does.
    """
    model = opened or open_model(settings.model)
    config = model.config
    check_shape(settings, config)
    max_len = settings.max_len or config.max_positions
    mesh = make_mesh(settings.layout, place.rank, place.device, config.num_kv_heads)
    with phase("weights"):
        kernels = serving_kernels(place.device, DTYPES[settings.dtype])
        stored = stored_formats(model.source, config)
        kept = choose_formats(
            stored,
            settings.model,
            config,
            settings.layout,
            settings.quant,
            kernels.multiplies_codes,
        )
        runner = load_runner(place, settings, model, mesh, kernels)
    with phase("memory of a full batch"):
        num_sharing = 1 if place.device.type == "cuda" else place.world_size
        free_bytes = available_bytes(place.device) // num_sharing
        num_pages, batch = largest_batch(config, settings)
        runner.make_pages(num_pages)
        free_bytes -= measure_batch_bytes(runner, batch)
    with phase("KV cache"):
        free_bytes = -int(mesh.world.max(-free_bytes)[0])  # the least of all ranks
        num_pages = choose_num_pages(runner, settings, max_len, free_bytes)
        try:
            runner.make_pages(num_pages)
        except RuntimeError:
            raise ValueError(
                f"{num_pages * runner.page_bytes / 1e9:,.3g} GB of KV cache do not fit into "
                f"memory, although each rank seemed to have {free_bytes / 1e9:,.3g} GB free; a "
                "smaller --kv-bytes works"
            ) from None
    if runner.attention.is_capturable and mesh.tp.size == 1:
        with phase("graphs of decode steps"):
            capture_graphs(runner, settings, max_len)
    weights = describe_weights(stored, kept, settings.quant, settings.dtype)
    return StartedRank(runner, model.tokenizer, num_pages, max_len, weights)


def load_runner(
    place: Place, settings: EngineSettings, model: OpenModel, mesh: Mesh, kernels: ServingKernels
) -> Runner:
    """Load this rank's shard of the weights."""
    config = model.config
    dtype = DTYPES[settings.dtype]
    weights = load_quantized(
        model.source,
        config,
        model_specs(config),
        settings.layout,
        settings.layout.coord(place.rank),
        dtype,
        settings.quant,
        place.device,
        kernels.multiplies_codes,
    )
    page_tokens = settings.page_tokens
    return Runner(config, weights, mesh, dtype, page_tokens, kernels, settings.kv_dtype)


def capture_graphs(runner: Runner, settings: EngineSettings, max_len: int) -> None:
    """Capture decode steps; if that fails, log it and go without."""
    capture = cuda_capture(runner.mesh.device)
    try:
        runner.capture_graphs(settings.limits.max_running, max_len, capture)
    except RuntimeError:
        log.exception(
            "decode steps cannot be captured, and will run operation by operation: slower, but "
            "correct"
        )


def largest_batch(config: ModelConfig, settings: EngineSettings) -> tuple[int, Batch]:
    """Return a batch that takes as much memory as any, and the number of pages that it needs."""
    page_tokens = settings.page_tokens
    length = min(settings.max_batch_tokens, config.max_positions)
    num_pages = -(-length // page_tokens)
    tokens = tuple(token % config.vocab_size for token in range(length))
    prompt = BatchEntry(0, tokens, 0, tuple(range(num_pages)), 1, None)
    few = tokens[: LOGPROB_ROWS + 1]  # logits of a prompt are held for no more at a time
    total = num_pages + -(-(LOGPROB_ROWS + 1) // page_tokens)
    with_logprobs = BatchEntry(1, few, 0, tuple(range(num_pages, total)), 1, MAX_LOGPROBS)
    return total, Batch((prompt, with_logprobs), ())


def measure_batch_bytes(runner: Runner, batch: Batch) -> int:
    """Run a batch and return the peak memory that it takes, in bytes."""
    device = runner.mesh.device
    reset_peaks(device)
    before = peak_memory_bytes(device)
    runner.run(batch)
    return max(0, peak_memory_bytes(device) - before)


def choose_num_pages(
    runner: Runner, settings: EngineSettings, max_len: int, free_bytes: int
) -> int:
    """Return as many pages as all running requests and the chunks of a step could ever fill, or as
    memory holds: most of a GPU, half of a machine, which other processes use too.

    Raises ValueError if that is not one request of `max_len` tokens, or if memory does not hold
    `kv_bytes`.
    """
    window = runner.config.kv_window
    per_request = pages_per_sequence(max_len, settings.page_tokens, window)
    share = settings.memory_share or (0.92 if runner.mesh.device.type == "cuda" else 0.5)
    usable_bytes = max(0, int(share * free_bytes))
    if settings.kv_bytes is not None and settings.kv_bytes > free_bytes:
        fits = usable_bytes // runner.page_bytes * runner.page_bytes
        raise ValueError(
            f"a KV cache of {settings.kv_bytes / 1e9:,.3g} GB was asked for, but each rank has "
            f"{max(0, free_bytes) / 1e9:,.3g} GB left; --kv-bytes {fits} fits"
        )
    kv_bytes = usable_bytes if settings.kv_bytes is None else settings.kv_bytes
    num_pages = kv_bytes // runner.page_bytes
    if num_pages < per_request:
        needed = per_request * runner.page_bytes
        fitting = num_pages * settings.page_tokens
        flags = [f"--kv-bytes {needed}"] if kv_bytes < needed <= usable_bytes else []
        flags += [f"--max-len {fitting}"] if fitting > 1 else []
        works = f"{' or '.join(flags)} fits" if flags else "a smaller model, or more memory, works"
        raise ValueError(
            f"a request of {max_len} tokens needs {needed / 1e9:,.3g} GB of KV cache on each rank, "
            f"which has {kv_bytes / 1e9:,.3g} GB for it; {works}"
        )
    if settings.kv_bytes is not None:
        return num_pages
    num_chunk = 0 if window is None else -(-settings.max_batch_tokens // settings.page_tokens)
    return min(num_pages, per_request * settings.max_running + num_chunk)


# -- messages of the server


def serve_until_gone(server: Connection, engine: Engine) -> None:
    with suppress(EOFError, OSError):
        serve_messages(server, engine)


def serve_messages(server: Connection, engine: Engine) -> None:
    """Handle messages between steps; wait for one if there is nothing to do.

    Between two steps no more inputs are embedded than a step has tokens, so that embeddings do not
    delay completions.
    """
    inputs: dict[int, list[int]] = {}
    while True:
        is_busy = engine.has_work or inputs
        timeout_s = 0 if is_busy else COMPILING_S if engine.compiling else IDLE_S
        while server.poll(timeout_s):
            handle_message(server, engine, inputs, server.recv())
            timeout_s = 0
        for request_id, error in engine.start_compiled():
            send_refusal(server, request_id, error)
        if inputs:
            embed_next(server, engine, inputs)
        if engine.has_work:
            if deltas := engine.step():
                server.send(("deltas", deltas))
        elif not is_busy and not engine.compiling:
            engine.runner.keep_alive()


def handle_message(
    server: Connection, engine: Engine, inputs: dict[int, list[int]], message: tuple[Any, ...]
) -> None:
    """Handle ("add", id, request), ("abort", id), ("embed", id, tokens) or ("stats", id)."""
    kind, request_id, *arguments = message
    try:
        if kind == "add":
            engine.add(*arguments)
        elif kind == "abort":
            inputs.pop(request_id, None)
            engine.abort(request_id)
        elif kind == "embed":
            (tokens,) = arguments
            engine.check_input(tokens)
            if len(inputs) >= engine.scheduler.limits.max_queued:
                raise QueueFull(len(inputs), 1)
            inputs[request_id] = tokens
        else:
            assert kind == "stats"
            server.send(("result", request_id, engine.stats()))
    except (ValueError, QueueFull) as error:
        send_refusal(server, request_id, error)


def embed_next(server: Connection, engine: Engine, inputs: dict[int, list[int]]) -> None:
    """Embed the input that has waited longest, and those after it that fit into a step.

    If that fails, each is embedded alone, so that an input that fails inside the model fails alone.
    """
    chosen: dict[int, list[int]] = {}
    num_left = engine.scheduler.limits.max_batch_tokens
    for request_id, tokens in inputs.items():
        if not chosen or len(tokens) <= num_left:
            chosen[request_id] = tokens
            num_left -= len(tokens)
        if num_left <= 0:
            break
    for request_id in chosen:
        del inputs[request_id]
    try:
        vectors = engine.embed(list(chosen.values()))
    except CollectiveFailed:
        raise
    except RuntimeError as error:  # of the model
        if len(chosen) > 1:
            for request_id, tokens in chosen.items():
                embed_next(server, engine, {request_id: tokens})
        else:
            server.send(("failed", *chosen, str(error)))
        return
    for request_id, vector in zip(chosen, vectors, strict=True):
        server.send(("result", request_id, vector))


def send_refusal(server: Connection, request_id: int, error: Exception) -> None:
    if isinstance(error, QueueFull):
        server.send(("full", request_id, (error.num_waiting, error.retry_after_s)))
    else:
        server.send(("refused", request_id, str(error)))
