"""Ending well: a signal asks for a stop, the step is finished, the run is saved."""

import signal
from types import FrameType
from typing import Any

from shardwise.parallel.launch import STOP_SIGNALS, is_taken


class StopRequest:
    """Set by one of STOP_SIGNALS while the block runs; a second Ctrl-C in the only process
    interrupts at once.

    A context manager. `patient` ranks, which a launcher also signals, never interrupt, since
    terminal and launcher each tell them; signals held back while they started come now, and those
    that come after the block are ignored, since such a rank is ending anyway. Elsewhere, and after
    an error, the former handlers are put back.
    """

    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.signal: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            if is_taken(number):
                self._former[number] = signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_IGN if self.patient and error is None else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signal = number
