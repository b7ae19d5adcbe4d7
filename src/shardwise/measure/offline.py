"""How fast a model runs with nothing in between: prefill, decode of some sequences, and whole
requests.

The rows that engines are compared by: a prompt of 512 tokens; sequences with 128 tokens before
them, one token each a step; and prompts of 128 tokens with answers of 128, begun together.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from shardwise.measure.rows import Row
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.engine.batch import Batch, Part
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.worker import lead, start
from shardwise.serve.request import Ask, SamplingParams
from shardwise.serve.settings import EngineSettings

PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 512
ANSWER_TOKENS = 128
STEPS = 24
TRIES = 3
SIZES = (1, 8, 32)
LOAD = "in process"

Advance = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


def measure_speed(
    settings: EngineSettings,
    advance: Advance,
    sizes: Sequence[int] = SIZES,
    tries: int = TRIES,
    whole_requests: bool = True,
) -> list[Row]:
    """Load the model in this process and time it; of each figure the best of some tries. Raises
    ValueError for a model whose pages do not hold so many sequences."""
    if settings.layout.world_size > 1:
        raise ValueError(
            f"the speed of one device is measured, not of {settings.layout}; with --concurrency that of a load is"
        )
    started = start(Place(0, 1, device_of(0, 1)), settings)
    num_pages = -(-(PROMPT_TOKENS + max(STEPS, ANSWER_TOKENS)) // settings.page_tokens)
    if started.num_pages < num_pages * max(sizes) or started.max_len < max(
        LONG_PROMPT_TOKENS, 2 * PROMPT_TOKENS
    ):
        raise ValueError(
            f"{max(sizes)} sequences of {PROMPT_TOKENS + ANSWER_TOKENS} tokens do not fit into {started.num_pages} "
            f"pages of {settings.page_tokens}; with --concurrency a load of your own is measured"
        )
    engine = lead(started, settings)
    runner = started.runner
    timed = [(f"prefill_{LONG_PROMPT_TOKENS}", LONG_PROMPT_TOKENS, partial(prefill_s, runner))]
    timed += [(f"decode_{size}", size * STEPS, partial(decode_s, runner, size)) for size in sizes]
    if whole_requests:
        timed += [
            (f"generate_{size}", size * ANSWER_TOKENS, partial(generate_s, engine, size))
            for size in sizes
        ]
    rows = []
    for number, (name, num_tokens, seconds) in enumerate(timed, start=1):
        rows.append(Row(name, num_tokens / min(seconds() for _ in range(tries)), "tokens/s", LOAD))
        advance(number / len(timed))
    return rows


def prefill_s(runner: Runner) -> float:
    """Of one long prompt."""
    part = part_of(runner, 0, 0, range(LONG_PROMPT_TOKENS))
    began = time.perf_counter()
    runner.run(Batch((part,), ()))
    return time.perf_counter() - began


def decode_s(runner: Runner, size: int) -> float:
    """Of STEPS tokens of each of `size` sequences, after their prompts."""
    for number in range(size):
        runner.run(Batch((part_of(runner, number, 0, range(PROMPT_TOKENS)),), ()))
    began = time.perf_counter()
    for step in range(STEPS):
        parts = [
            part_of(runner, number, PROMPT_TOKENS + step, [step + number]) for number in range(size)
        ]
        runner.run(Batch(tuple(parts), ()))
    return time.perf_counter() - began


def part_of(runner: Runner, number: int, start: int, tokens: Sequence[int]) -> Part:
    """Some tokens of a sequence whose pages lie side by side."""
    stop = start + len(tokens)
    width = -(-(PROMPT_TOKENS + STEPS) // runner.page_tokens)
    pages = range(number * width, number * width + -(-stop // runner.page_tokens))
    vocab_size = runner.config.vocab_size
    return Part(
        number,
        tuple(token % vocab_size for token in tokens),
        start,
        tuple(pages),
        samples=1,
        scores=None,
    )


def generate_s(engine: Engine, size: int) -> float:
    """Of `size` requests begun together, whose prompts have nothing in common."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first = engine.num_steps
    vocab_size = engine.config.vocab_size
    for number in range(size):
        tokens = tuple(
            (first + number * 7919 + place * 31) % vocab_size for place in range(PROMPT_TOKENS)
        )
        engine.add(number, Ask(tokens, params))
    began = time.perf_counter()
    while engine.has_work:
        for _ in engine.step():
            pass
    return time.perf_counter() - began
