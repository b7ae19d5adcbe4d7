"""Time of a decode step by part, next to the time of reading the weights once.

The parts are the scheduler, the model (matrix products, attention, head), sampling, completions and
the message to the server. Each is timed by a wrapper that calls it, so the times add up, except for
the time of the clock itself.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

from shardwise.block import is_block_matrix
from shardwise.kernels.native.serving import PackedQuantized, PackedWeight
from shardwise.model.layers import Attend, RecomputedInput
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import Sequence
from shardwise.serve.llm import LLM
from shardwise.serve.request import Delta, Request, SamplingParams

WARMUP_STEPS = 3
STREAM_BYTES = 1 << 28


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the fastest of some decode steps.

    Attributes:
        num_running: Sequences in the batch.
        context: Tokens that each sequence has.
        run_s: The model only.
        overhead_s: Everything else that the engine does for a step.
        weights_s: Reading the weights at the measured memory bandwidth.
        parts: Seconds by part, of the fastest step.
    """

    num_running: int
    context: int
    num_threads: int
    step_s: float
    run_s: float
    overhead_s: float
    weights_s: float
    parts: dict[str, float]

    @property
    def overhead_share(self) -> float:
        return self.overhead_s / self.step_s


@dataclass
class Clock:
    """Seconds by part; nested parts count once, for the inner one."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[float] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.inside.append(0.0)
        yield
        elapsed = time.perf_counter() - start
        self.seconds[name] += elapsed - self.inside.pop()
        if self.inside:
            self.inside[-1] += elapsed

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*given, **named)

        return timed


@dataclass(frozen=True)
class TimedWeight:
    """A wrapper that times a batch-invariant weight, or the head."""

    weight: Any
    name: str
    clock: Clock

    def apply(self, x: Tensor | RecomputedInput) -> Tensor:
        with self.clock.part(self.name):
            made: Tensor = self.weight.apply(x)
        return made


@dataclass(frozen=True)
class TimedTransformer(Transformer):
    """The decoder with a clock around its small operations and attention."""

    clock: Clock = field(default_factory=Clock)

    def hidden(
        self, weights: Mapping[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        return super().hidden(weights, tokens, positions, self.clock.timed("attention", attend))

    def norm(self, *given: Any) -> Tensor:
        with self.clock.part("norms"):
            return super().norm(*given)

    def activate(self, inner: Tensor) -> Tensor:
        with self.clock.part("activation"):
            return super().activate(inner)


def profile_decode(llm: LLM, num_running: int, context: int, num_steps: int) -> StepTimes:
    """Time steps of sequences that have about `context` tokens: first the whole step, then its
    parts. `llm` cannot be used afterwards."""
    engine = llm.engine
    runner = runner_of(llm)
    weights_s = weight_bytes(runner) / stream_bytes_per_s()
    begin(engine, num_running, context, 2 * (WARMUP_STEPS + num_steps) + num_running + 8)
    whole = Clock()
    runner.run = whole.timed("run", runner.run)  # type: ignore[method-assign]
    steps = [timed_step(engine, whole, num_running) for _ in range(WARMUP_STEPS + num_steps)][
        WARMUP_STEPS:
    ]
    del runner.run
    parts = Clock()
    time_model(runner, parts)
    runner.run = parts.timed("other operations of the model", runner.run)  # type: ignore[method-assign]
    split = [timed_step(engine, parts, num_running) for _ in range(WARMUP_STEPS + num_steps)][
        WARMUP_STEPS:
    ]
    step_s = min(sum(each.values()) for each in steps)
    return StepTimes(
        num_running,
        context,
        torch.get_num_threads(),
        step_s,
        min(each["run"] for each in steps),
        min(sum(each.values()) - each["run"] for each in steps),
        weights_s,
        min(split, key=lambda each: sum(each.values())),
    )


def runner_of(llm: LLM) -> Runner:
    return llm.engine.runner.runner  # type: ignore[attr-defined]


def begin(engine: Engine, num_running: int, context: int, num_steps: int) -> None:
    """Start `num_running` sequences and run their prompts; each has at least `num_steps` left."""
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    prompts = torch.randint(
        engine.config.vocab_size, (num_running, context), generator=torch.Generator().manual_seed(0)
    )
    for request_id, prompt in enumerate(prompts.tolist()):
        engine.add(Request(tuple(prompt), params, request_id=request_id))
    while len(engine.step()) < num_running:
        pass


def timed_step(engine: Engine, clock: Clock, num_running: int) -> dict[str, float]:
    """Run one step as the engine's process does, with the message to the server; return seconds by
    part."""
    clock.seconds.clear()
    here, there = Pipe()
    scheduler = engine.scheduler
    with here, there, engine_timed(engine, clock):
        with clock.part("completions"):
            deltas = engine.step()
        with clock.part("link"):
            here.send(("deltas", deltas))
        assert len(received(there)) == num_running and engine.scheduler is scheduler
    return dict(clock.seconds)


def received(there: Connection) -> list[Delta]:
    _, deltas = there.recv()
    result: list[Delta] = deltas
    return result


@contextmanager
def engine_timed(engine: Engine, clock: Clock) -> Iterator[None]:
    """Time the engine's parts while the block runs, by attributes that shadow its methods."""
    scheduler = engine.scheduler
    append = Sequence.append
    Sequence.append = clock.timed("completions", append)  # type: ignore[method-assign]
    engine.sample = clock.timed("sampler", engine.sample)  # type: ignore[method-assign]
    scheduler.next_batch = clock.timed("scheduler", scheduler.next_batch)  # type: ignore[method-assign]
    scheduler.commit = clock.timed("scheduler", scheduler.commit)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sequence.append = append  # type: ignore[method-assign]
        del engine.sample, scheduler.next_batch, scheduler.commit


def time_model(runner: Runner, clock: Clock) -> None:
    runner.blocks = None  # the same kernels one by one
    for name, weight in runner.weights.items():
        if is_block_matrix(name) and not isinstance(weight, Tensor):
            runner.weights[name] = TimedWeight(weight, "products", clock)
    runner.head = TimedWeight(runner.head, "head", clock)
    runner.model = TimedTransformer(
        runner.config,
        runner.model.kernels,
        runner.model.seams,
        applies_rope=runner.model.applies_rope,
        clock=clock,
    )


def weight_bytes(runner: Runner) -> int:
    """Return the bytes of the weights that a step reads: every matrix, and the head once even if it
    is tied to the embedding."""
    read = [
        *(weight for name, weight in runner.weights.items() if name.startswith("blocks.")),
        runner.head,
    ]
    if all(isinstance(weight, Tensor | PackedWeight | PackedQuantized) for weight in read):
        return sum(
            weight.nbytes if isinstance(weight, Tensor) else weight.packed.nbytes for weight in read
        )
    specs = [spec for spec in model_specs(runner.config) if spec.kind == "matrix"]
    head = runner.config.vocab_size * runner.config.hidden_size
    return (sum(spec.numel for spec in specs) + head) * runner.dtype.itemsize


def stream_bytes_per_s() -> float:
    """Return the bytes per second of reading memory that is in no cache."""
    x = torch.ones(STREAM_BYTES // 4)
    best_s = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        best_s = min(best_s, time.perf_counter() - start)
    return STREAM_BYTES / best_s
