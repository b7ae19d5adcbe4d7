"""What a rank did when: the spans of a step, collected while a trace is on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwise.parallel.pipeline.actions import Action

WAIT = "wait "
"""Before the name of an axis: its collective was waited for."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action of the table; or what has another name, such as a wait inside of one."""

    what: Action | str
    start_s: float
    end_s: float


class Trace:
    """Off unless someone turns it on, since a GPU must be asked to finish before the clock is read.
    It is asked for the stream of the computation alone: to wait for transfers too would be to wait
    for ranks that wait for this one."""

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
        if not self.is_on:
            yield
            return
        start_s = self.now()
        yield
        self.spans.append(Span(what, start_s, self.now()))
