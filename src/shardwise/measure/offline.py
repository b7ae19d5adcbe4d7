"""Offline throughput of a model in this process: prefill, decode, and whole requests.

The rows by which engines are compared: prefill of a prompt of 512 tokens; decode of sequences with
a context of 128 tokens, one token each per step; and prompts of 128 tokens with completions of 128,
started together.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from shardwise.measure.rows import Row
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import Batch, BatchEntry
from shardwise.serve.engine.worker import make_engine, start_rank
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.settings import EngineSettings

PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
STEPS = 24
TRIES = 3
SIZES = (1, 8, 32)
LOAD = "in process"

Advance = Callable[[float], None]
"""Called with the fraction that is done, from 0 to 1."""


def measure_speed(
    settings: EngineSettings,
    advance: Advance,
    sizes: Sequence[int] = SIZES,
    tries: int = TRIES,
    whole_requests: bool = True,
) -> list[Row]:
    """Load the model in this process and time it; each row is the best of `tries`.

    Raises ValueError for a model whose pages do not hold so many sequences.
    """
    if settings.layout.world_size > 1:
        raise ValueError(
            f"offline throughput is measured on one device, not on {settings.layout}; "
            "--concurrency measures a load on several"
        )
    started = start_rank(Place(0, 1, device_of(0, 1)), settings)
    num_pages = -(-(PROMPT_TOKENS + max(STEPS, OUTPUT_TOKENS)) // settings.page_tokens)
    longest = max(LONG_PROMPT_TOKENS, 2 * PROMPT_TOKENS)
    if started.num_pages < num_pages * max(sizes) or started.max_len < longest:
        raise ValueError(
            f"{max(sizes)} sequences of {PROMPT_TOKENS + OUTPUT_TOKENS} tokens do not fit into "
            f"{started.num_pages} pages of {settings.page_tokens}; --concurrency measures another "
            "load"
        )
    engine = make_engine(started, settings)
    runner = started.runner
    timed = [(f"prefill_{LONG_PROMPT_TOKENS}", LONG_PROMPT_TOKENS, partial(prefill_s, runner))]
    timed += [(f"decode_{size}", size * STEPS, partial(decode_s, runner, size)) for size in sizes]
    if whole_requests:
        timed += [
            (f"generate_{size}", size * OUTPUT_TOKENS, partial(generate_s, engine, size))
            for size in sizes
        ]
    rows = []
    for number, (name, num_tokens, seconds) in enumerate(timed, start=1):
        rows.append(Row(name, num_tokens / min(seconds() for _ in range(tries)), "tokens/s", LOAD))
        advance(number / len(timed))
    return rows


def prefill_s(runner: Runner) -> float:
    """Return the seconds that one long prompt takes."""
    entry = entry_of(runner, 0, 0, range(LONG_PROMPT_TOKENS))
    start_s = time.perf_counter()
    runner.run(Batch((entry,), ()))
    return time.perf_counter() - start_s


def decode_s(runner: Runner, size: int) -> float:
    """Return the seconds of STEPS decode steps of `size` sequences, prompts excluded."""
    for number in range(size):
        runner.run(Batch((entry_of(runner, number, 0, range(PROMPT_TOKENS)),), ()))
    start_s = time.perf_counter()
    for step in range(STEPS):
        position = PROMPT_TOKENS + step
        entries = [entry_of(runner, number, position, [step + number]) for number in range(size)]
        runner.run(Batch(tuple(entries), ()))
    return time.perf_counter() - start_s


def entry_of(runner: Runner, number: int, start: int, tokens: Sequence[int]) -> BatchEntry:
    """Return tokens of sequence `number`, whose pages are consecutive."""
    stop = start + len(tokens)
    width = -(-(PROMPT_TOKENS + STEPS) // runner.page_tokens)
    pages = range(number * width, number * width + -(-stop // runner.page_tokens))
    vocab_size = runner.config.vocab_size
    return BatchEntry(
        number,
        tuple(token % vocab_size for token in tokens),
        start,
        tuple(pages),
        num_samples=1,
        num_prompt_logprobs=None,
    )


def generate_s(engine: Engine, size: int) -> float:
    """Return the seconds of `size` requests started together, whose prompts share no prefix."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first = engine.num_steps
    vocab_size = engine.config.vocab_size
    for number in range(size):
        tokens = tuple(
            (first + number * 7919 + place * 31) % vocab_size for place in range(PROMPT_TOKENS)
        )
        engine.add(Request(tokens, params, request_id=number))
    start_s = time.perf_counter()
    while engine.has_work:
        for _ in engine.step():
            pass
    return time.perf_counter() - start_s
