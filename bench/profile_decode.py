"""Where the time of a decode step goes, next to what reading the weights once would take.

A step has the parts that its design has: the scheduler, the model and in it products, attention and
head, the choice of tokens, the answers, the message to the server. Each is timed by something that
stands in its place and calls it, so the times add up, but for what the clock itself takes.
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
    """Seconds of a decode step of `num_running` sequences that have `context` tokens, the least of
    some steps; parts are from the step with the least. `run_s` is the model alone, `overhead_s` all
    else that the engine does for a step; `weights_s` is what reading the weights takes at the
    memory's measured rate."""

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
    """Seconds by part. Parts within parts count once, for the inner one."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[float] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self.inside.append(0.0)
        yield
        took = time.perf_counter() - began
        self.seconds[name] += took - self.inside.pop()
        if self.inside:
            self.inside[-1] += took

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*given, **named)

        return timed


@dataclass(frozen=True)
class TimedWeight:
    """In place of a row-invariant weight, or of the head."""

    weight: Any
    name: str
    clock: Clock

    def apply(self, x: Tensor | RecomputedInput) -> Tensor:
        with self.clock.part(self.name):
            made: Tensor = self.weight.apply(x)
        return made


@dataclass(frozen=True)
class TimedTransformer(Transformer):
    """The decoder with a clock at its small operations and at attention."""

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
    """Time steps of sequences that have about `context` tokens: first the whole, then its parts.
    `llm` is not to be used afterwards."""
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
    put_clock_in(runner, parts)
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
    """Have that many sequences past their prompts, of which each runs for another `num_steps` steps
    at least."""
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    prompts = torch.randint(
        engine.config.vocab_size, (num_running, context), generator=torch.Generator().manual_seed(0)
    )
    for request_id, prompt in enumerate(prompts.tolist()):
        engine.add(Request(tuple(prompt), params, request_id=request_id))
    while len(engine.step()) < num_running:
        pass


def timed_step(engine: Engine, clock: Clock, num_running: int) -> dict[str, float]:
    """One step as the engine's process makes it, by part: what comes of it is sent to the server
    too."""
    clock.seconds.clear()
    here, there = Pipe()
    scheduler = engine.scheduler
    with here, there, pieces_timed(engine, clock):
        with clock.part("answers"):
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
def pieces_timed(engine: Engine, clock: Clock) -> Iterator[None]:
    """The engine's own parts, timed while the block runs: what an object has goes before what its
    class has."""
    scheduler = engine.scheduler
    append = Sequence.append
    Sequence.append = clock.timed("answers", append)  # type: ignore[method-assign]
    engine.sample = clock.timed("sampler", engine.sample)  # type: ignore[method-assign]
    scheduler.next_batch = clock.timed("scheduler", scheduler.next_batch)  # type: ignore[method-assign]
    scheduler.commit = clock.timed("scheduler", scheduler.commit)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sequence.append = append  # type: ignore[method-assign]
        del engine.sample, scheduler.next_batch, scheduler.commit


def put_clock_in(runner: Runner, clock: Clock) -> None:
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
    """Of all that a step reads: every matrix once, and the head's, whether or not it is the
    embedding too."""
    read = [
        *(weight for name, weight in runner.weights.items() if name.startswith("blocks.")),
        runner.head,
    ]
    if all(isinstance(weight, Tensor | PackedWeight | PackedQuantized) for weight in read):
        return sum(
            weight.nbytes if isinstance(weight, Tensor) else weight.packed.nbytes for weight in read
        )
    specs = [
        spec
        for spec in model_specs(runner.config)
        if len(spec.shape) == 2 and spec.name.startswith("blocks.")
    ]
    head = runner.config.vocab_size * runner.config.hidden_size
    return (sum(spec.numel for spec in specs) + head) * runner.dtype.itemsize


def stream_bytes_per_s() -> float:
    """What reading memory that no cache holds reaches."""
    x = torch.ones(STREAM_BYTES // 4)
    best_s = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        x.sum()
        best_s = min(best_s, time.perf_counter() - began)
    return STREAM_BYTES / best_s
