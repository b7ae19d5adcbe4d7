"""Graceful stop: on a signal the step is finished and the run is saved."""

import signal
from types import FrameType
from typing import Any

from shardwise.parallel.launch import STOP_SIGNALS, handles_signal


class StopRequest:
    """Context manager that records in `signal` the last of STOP_SIGNALS that arrived in its block.

    In the only process of a run, a second Ctrl-C raises KeyboardInterrupt. `patient` ranks, which
    belong to a launcher, never do: terminal and launcher may both send the same signal. Signals
    blocked while such a rank started are delivered now, and those after the block are ignored,
    since the rank is ending. Otherwise, and after an error, the previous handlers are restored.
    """

    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            if handles_signal(number):
                self._previous[number] = signal.signal(number, self._record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self.patient and error is None else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signal = number
