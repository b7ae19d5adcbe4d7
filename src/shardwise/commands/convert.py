"""`shardwise convert`: any model that can be read, as a Hugging Face folder, or quantized."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import Advance, progress_bar

if TYPE_CHECKING:
    import torch

    from shardwise.formats.convert import Converted
    from shardwise.quantize.recipe import Recipe

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_convert(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="write a model as a Hugging Face folder, or quantized",
        description="Write a Hugging Face folder, GGUF file or training run as a Hugging Face folder, or quantized as "
        "a folder or GGUF file that other engines read; then load what was written and compare logits.",
    )
    parser.add_argument("source", metavar="SRC", help="a folder, a .gguf file, a run or a hub id")
    parser.add_argument(
        "destination", metavar="DST", help="the folder, or with --quant gguf:... the file, to make"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="of the weights (default: as stored; quantized: bf16)",
    )
    parser.add_argument(
        "--quant",
        metavar="Q",
        help="quantize the matrices of the blocks: int8, int4-g64, int4-g128, int3-g32, int4z-g64 (with zero points), "
        "fp8 ...; or gguf:q8_0, gguf:q4_0, gguf:q4_1",
    )
    parser.add_argument(
        "--method",
        metavar="M",
        help="rtn | gptq | awq: round to nearest, or make up for the errors on a text (default: rtn)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="of gptq and awq: text like what the model will read, or a data set",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="how much of it is looked at (default: 65536)",
    )
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    import torch

    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.convert import convert

    check_flags(args)
    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype else None
    source = model_path(find_model(args.source))
    destination = Path(args.destination)
    with progress_bar() as advance:
        if args.quant is None:
            converted = convert(source, destination, dtype, advance)
        else:
            converted = quantized(args, source, destination, dtype, advance)
    if args.json:
        files = [
            str((destination.parent if destination.is_file() else destination) / name)
            for name in converted.files
        ]
        answer = {
            "files": files,
            "params": converted.params,
            "checked_logits": converted.checked_logits,
        }
        print(json.dumps(answer))
    else:
        of = (
            f"those of {args.source}"
            if args.quant is None
            else f"what {args.quant} makes of {args.source}"
        )
        print(
            f"{args.destination}: {converted.params:,} parameters; loaded again, its logits differ from {of} by "
            f"{converted.checked_logits:.2g} at most"
        )
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags of quantization that do not go together."""
    says_how = args.calibration or args.calibration_tokens is not None
    if args.quant is None:
        if args.method or says_how:
            raise ValueError(
                "--method and --calibration say how to quantize; --quant says to what, e.g. --quant int4-g64"
            )
        return
    calibrated = recipe_of(args).calibrated
    if not calibrated and says_how:
        raise ValueError(
            "rounding to nearest looks at no text; --calibration goes with --method gptq or awq"
        )
    if calibrated and not args.calibration:
        raise ValueError(
            f"--method {args.method} needs --calibration FILE: text like what the model will read"
        )


def recipe_of(args: argparse.Namespace) -> "Recipe":
    from shardwise.quantize.recipe import Recipe

    return Recipe.parse(args.quant, args.method or "rtn")


def quantized(
    args: argparse.Namespace,
    source: Path,
    destination: Path,
    dtype: "torch.dtype | None",
    advance: Advance,
) -> "Converted":
    from shardwise.formats.load import read_config
    from shardwise.formats.tokenizers.tokenizer import load_tokenizer
    from shardwise.parallel.launch import device_of
    from shardwise.quantize.export import check_plain, export
    from shardwise.train.calibration import USUAL_TOKENS, calibration_text

    recipe = recipe_of(args)
    text = None
    check_plain(source)
    if recipe.calibrated:
        num_tokens = USUAL_TOKENS if args.calibration_tokens is None else args.calibration_tokens
        positions = read_config(source).max_positions
        text = calibration_text(
            Path(args.calibration), load_tokenizer(source), positions, num_tokens
        )
    return export(source, destination, recipe, text, dtype, device_of(0, 1), advance)
