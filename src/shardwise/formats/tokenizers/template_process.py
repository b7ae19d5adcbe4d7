"""Renders chat templates in processes of their own, since a template is untrusted code: one that
loops or doubles strings reaches a limit of its process, and disturbs nobody else.

The program is `chat_template.py`. A process starts in 0.1 s and then renders any number of chats,
each in about 0.1 ms. One that reaches a limit is ended by the system, and the next render starts
another.
"""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

CPU_SECONDS = 2.0
MEMORY_BYTES = 256 << 20
MAX_PROCESSES = 16
"""Renders at the same time; further ones wait."""
MAX_IDLE = 2
PROGRAM = Path(__file__).with_name("chat_template.py")


class TemplateProcesses:
    """The processes that render for one tokenizer, in any number of threads; they start on first
    use, and end with this object or with its process.

    Attributes:
        cpu_s: the limit of the CPU time of a render, compiling the template included.
        memory_bytes: the limit of the memory of a process beyond that of an idle one.
    """

    def __init__(self, cpu_s: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = Lock()
        self._free = BoundedSemaphore(MAX_PROCESSES)
        weakref.finalize(self, _end_all, self._idle)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return the text that the template `source` makes of `variables`, values of JSON.

        Raises ValueError if the template is not valid, rejects the messages, or needs more time or
        memory than the limits.
        """
        try:
            request = json.dumps([source, variables], allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages must hold values of JSON only: {error}") from None
        with self._free, self._process() as process:
            reply = _exchange(process, request)
            if reply is None:
                raise ValueError(self._reason(process.wait()))
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"]

    def _reason(self, exit_code: int) -> str:
        """Return why a process ended without a reply."""
        reason = f"ended its process with code {exit_code}"
        if exit_code == -signal.SIGPROF:
            reason = f"takes more than {self.cpu_s:g} s of CPU time"
        elif exit_code == -signal.SIGKILL:  # by itself, or by a system that is out of memory
            reason = f"needs more than {self.memory_bytes >> 20} MiB of memory"
        return f"the model's chat template {reason} for these messages"

    @contextmanager
    def _process(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Yield a process, and keep it unless the block fails or enough are idle."""
        process = self._idle_process() or self._start()
        try:
            yield process
        except BaseException:  # an interrupted exchange would leave its reply to the next
            _end(process)
            raise
        with self._lock:
            is_kept = len(self._idle) < MAX_IDLE
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end(process)

    def _idle_process(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return None

    def _start(self) -> "subprocess.Popen[bytes]":
        limits = (str(self.cpu_s), str(self.memory_bytes))
        return subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which may have renders to finish
        )


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> dict[str, str] | None:
    """Send a request and return the reply, or None if the process ends instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # an unsent rest of a request
            continue


def _end_all(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        _end(process)
