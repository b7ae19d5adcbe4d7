"""`shardwise convert`: write any model as a Hugging Face folder, or quantized."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import Advance, progress_bar
from shardwise.quantize.quant_config import METHODS
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    import torch

    from shardwise.formats.convert import Converted
    from shardwise.quantize.quant_config import QuantConfig

STORED_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_convert(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="convert a model to a Hugging Face folder, optionally quantized, or to GGUF",
        description="Write a Hugging Face folder, GGUF file or training run as a Hugging Face "
        "folder, or quantized as a folder or GGUF file that other engines read. Then reload the "
        "result and compare its logits.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="a training run, a model folder, a .gguf file or a hub id"
    )
    parser.add_argument(
        "destination", metavar="DST", help="folder to write; with --quant gguf:..., the file"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(STORED_DTYPES),
        help="dtype of the weights (default: as stored; bf16 with --quant)",
    )
    parser.add_argument(
        "--quant",
        metavar="Q",
        help="quantize the weights of the blocks: int8, int4-g64, int4-g128, int3-g32, int4z-g64 "
        "(with zero points), fp8, ...; or gguf:q8_0, gguf:q4_0, gguf:q4_1 (default: unquantized)",
    )
    parser.add_argument(
        "--method",
        metavar="M",
        help=f"{' | '.join(METHODS)}: round to nearest, or compensate errors using calibration "
        f"text (default: {METHODS[0]})",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="calibration text for gptq and awq, a file, folder or dataset; should resemble the "
        "data that the model will see",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens of calibration text to use (default: 65536)",
    )
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    import torch

    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.convert import convert

    check_quantization_flags(args)
    dtype = getattr(torch, STORED_DTYPES[args.dtype]) if args.dtype else None
    source = model_path(find_model(args.source))
    destination = Path(args.destination)
    with progress_bar() as advance:
        if args.quant is None:
            converted = convert(source, destination, dtype, advance)
        else:
            converted = convert_quantized(args, source, destination, dtype, advance)
    if args.json:
        folder = destination.parent if destination.is_file() else destination
        result = {
            "files": [str(folder / name) for name in converted.files],
            "params": converted.params,
            "checked_logits": converted.checked_logits,
        }
        print(json_text(result))
    else:
        print(summary(args, converted))
    return 0


def summary(args: argparse.Namespace, converted: "Converted") -> str:
    reference = args.source if args.quant is None else f"{args.source} rounded to {args.quant}"
    difference = converted.checked_logits
    check = (
        f"reloaded logits match those of {reference} exactly"
        if difference == 0
        else f"reloaded logits differ from those of {reference} by at most {difference:.2g}"
    )
    return f"{args.destination}: {converted.params:,} parameters; verified: {check}"


def check_quantization_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags of quantization that do not go together."""
    has_calibration = args.calibration or args.calibration_tokens is not None
    if args.quant is None:
        if args.destination.endswith(".gguf"):
            raise ValueError(
                f"{args.destination} would become a folder; a GGUF file needs --quant gguf:q8_0, "
                "gguf:q4_0 or gguf:q4_1"
            )
        if args.method or has_calibration:
            raise ValueError(
                "--method and --calibration need a quantization, for example --quant int4-g64"
            )
        return
    calibrated = recipe_of(args).calibrated
    if not calibrated and has_calibration:
        raise ValueError(
            "--calibration needs --method gptq or awq; round-to-nearest uses no calibration text"
        )
    if calibrated and not args.calibration:
        raise ValueError(
            f"--method {args.method} needs --calibration FILE, text that resembles the data that "
            "the model will see"
        )


def recipe_of(args: argparse.Namespace) -> "QuantConfig":
    from shardwise.quantize.quant_config import QuantConfig

    return QuantConfig.parse(args.quant, args.method or METHODS[0])


def convert_quantized(
    args: argparse.Namespace,
    source: Path,
    destination: Path,
    dtype: "torch.dtype | None",
    advance: Advance,
) -> "Converted":
    from shardwise.formats.model_source import read_config
    from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
    from shardwise.parallel.launch import device_of
    from shardwise.quantize.export import check_unquantized, export
    from shardwise.train.calibration import USUAL_TOKENS, calibration_text

    quant_config = recipe_of(args)
    text = None
    check_unquantized(source)
    if quant_config.calibrated:
        num_tokens = USUAL_TOKENS if args.calibration_tokens is None else args.calibration_tokens
        max_positions = read_config(source).max_positions
        text = calibration_text(
            Path(args.calibration), load_tokenizer(source), max_positions, num_tokens
        )
    return export(source, destination, quant_config, text, dtype, device_of(0, 1), advance)
