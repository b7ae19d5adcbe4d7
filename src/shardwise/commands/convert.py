"""`shardwise convert`: any model that can be read, as a Hugging Face folder."""

import argparse
import json
from pathlib import Path
from typing import Any

from shardwise.commands.terminal import progress_bar

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_convert(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="write a model as a Hugging Face folder",
        description="Write a Hugging Face folder, GGUF file or training run as a Hugging Face folder; then load both "
        "and compare their logits.",
    )
    parser.add_argument("source", metavar="SRC", help="a folder, a .gguf file, a run or a hub id")
    parser.add_argument("destination", metavar="DST", help="the folder to make")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: as stored; quantized: bf16)")
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    import torch

    from shardwise.catalogue import find_model, model_path
    from shardwise.model.convert import convert

    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype else None
    with progress_bar() as advance:
        converted = convert(model_path(find_model(args.source)), Path(args.destination), dtype, advance)
    if args.json:
        files = [str(Path(args.destination) / name) for name in converted.files]
        answer = {"files": files, "params": converted.params, "checked_logits": converted.checked_logits}
        print(json.dumps(answer))
    else:
        print(
            f"{args.destination}: {converted.params:,} parameters; loaded again, its logits differ from those of "
            f"{args.source} by {converted.checked_logits:.2g} at most"
        )
    return 0
