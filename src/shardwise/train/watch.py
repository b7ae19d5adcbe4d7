"""Ending well: a signal asks for a stop, the step is finished, the run is saved."""

import signal
from types import FrameType


class StopRequest:
    """Set by Ctrl-C or SIGTERM while the block runs; a second Ctrl-C in the only process interrupts at once.

    As a context manager it puts the former handlers back. `patient` ranks, which a launcher also signals, never
    interrupt: the terminal and the launcher each tell them once.
    """

    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.signal: int | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signal = number
