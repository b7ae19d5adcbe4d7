"""Timing of a step: the spans of a rank's actions and waits, recorded while its trace is on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwise.parallel.pipeline.actions import Action

WAIT = "wait "
"""Prefix of the name of an axis, in spans that wait for one of its collectives."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time of an action of the table, or of something else by name, such as a wait within an
    action. Times are those of time.perf_counter."""

    what: Action | str
    start_s: float
    end_s: float


class Trace:
    """Spans of one rank, recorded while `is_on`.

    It is off by default, since it synchronizes a GPU before every reading of the clock. Only the
    stream of the computation is synchronized: waiting for transfers would wait for ranks that wait
    for this one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.spans: list[Span] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    @contextmanager
    def span(self, what: Action | str) -> Iterator[None]:
        """Record the time that the block takes, if the trace is on."""
        if not self.is_on:
            yield
            return
        start_s = self.now()
        yield
        self.spans.append(Span(what, start_s, self.now()))
