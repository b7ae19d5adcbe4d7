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


def parent_of(pid: int) -> int:
    """Return the id of the process that has started this one. Raises OSError if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_fork_server(pid: int) -> bool:
    """Return whether a process forks ranks, or is one of them. Raises OSError if it has ended."""
    return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()


def children(pid: int) -> list[int]:
    """Return the processes that this one has started, zombies too, but for Python's own tracker."""
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            command = Path(entry.path, "cmdline").read_bytes()
            if parent_of(int(entry.name)) == pid and b"resource_tracker" not in command:
                found.append(int(entry.name))
    return sorted(found)


def ranks_of(launcher: int) -> list[int]:
    """Return the ranks that a launcher has started, in order: its fork server forks them."""
    servers = (child for child in children(launcher) if is_fork_server(child))
    return [rank for server in servers for rank in children(server)]


def stays(pid: int) -> bool:
    """Return whether a process serves the whole session: a pooled rank, the server that forks
    them, Python's own tracker, or a process for the chat templates of a shared tokenizer."""
    if pid in {child.pid for child in multiprocessing.active_children() if child.daemon}:
        return True
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        is_shared = is_fork_server(pid) or b"chat_template.py" in command
        return b"resource_tracker" in command or (is_shared and parent_of(pid) == os.getpid())
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
