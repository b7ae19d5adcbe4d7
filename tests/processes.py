"""The processes that a test starts: each ends with its test, whether it passes or fails."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

TAG = "PYTEST_PROCESS_TAG"
"""Inherited through the environment, so that descendants are found in whatever session they are."""


def tag_descendants() -> None:
    os.environ[TAG] = str(os.getpid())


def descendants() -> set[int]:
    """Return the ids of the running processes that carry the tag of this one."""
    tag = f"{TAG}={os.getpid()}".encode()
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if tag in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def stays(pid: int) -> bool:
    """Return whether a process serves the whole session: a pooled rank, the server that forks
    them, or Python's own tracker."""
    if pid in {child.pid for child in multiprocessing.active_children() if child.daemon}:
        return True
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" in command or b"multiprocessing.forkserver" in command
    return False


@contextlib.contextmanager
def ended_with_block() -> Iterator[None]:
    """Kill what the block has started and left running."""
    before = descendants()
    try:
        yield
    finally:
        for pid in sorted(descendants() - before):
            if not stays(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def default_dispositions() -> Iterator[None]:
    """Handle signals as a program in the foreground does: `nohup` and background jobs ignore some,
    and children inherit that."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(number, defaults[number])
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
