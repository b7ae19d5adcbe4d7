"""`LastingStream`: a stream for logs, which drops what cannot be written.

A full disk, a closed pipe or a lost terminal must neither end a run before it is saved nor keep a
server from restarting its engine.
"""

from contextlib import suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream that ignores failed writes; all else is that of `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def lasting(stream: TextIO) -> TextIO:
    """Return the stream without its errors."""
    return cast(TextIO, LastingStream(stream))
