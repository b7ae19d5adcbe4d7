"""`shardwise data build`: text, tokenized once."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import progress_bar

if TYPE_CHECKING:
    from shardwise.formats.tokenizers.tokenizer import Tokenizer

STANDARD_LIBRARY = "python"


def add_data(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data",
        help="make training data of text",
        description="`shardwise data build SOURCE DST --tokenizer T` tokenizes text once, for training to map.",
    )
    parser.add_argument(
        "action", choices=("build",), help="build: tokenize SOURCE into the folder DST"
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=f"a file or folder of text, .jsonl or .parquet; `{STANDARD_LIBRARY}`: the source of Python's own library",
    )
    parser.add_argument("destination", metavar="DST", help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="MODEL",
        help="a model folder, .gguf file, run or hub id to take it from; `bytes`; or `bpe:4096` to train one",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the documents kept for evaluation (default: 0.01)",
    )
    parser.add_argument("--field", default="text", help="of .jsonl and .parquet (default: text)")
    parser.set_defaults(run=run_data)


def run_data(args: argparse.Namespace) -> int:
    from shardwise.train.corpus import build
    from shardwise.train.documents import python_source_files, walk

    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out must be at least 0 and below 1, not {args.held_out}")
    source = python_source_files() if args.source == STANDARD_LIBRARY else Path(args.source)
    destination = Path(args.destination)
    tokenizer = make_tokenizer(args.tokenizer, source, args.field)
    with progress_bar() as advance:
        corpus = build(
            source,
            destination,
            tokenizer,
            args.held_out,
            lambda done, total, tokens: advance(
                f"tokenize, {tokens:,} tokens", done / max(1, total)
            ),
            args.field,
        )
    if (
        isinstance(source, Path)
        and source.is_dir()
        and (left_out := len(walk(source)) - len(corpus.files))
    ):
        print(
            f"shardwise: {left_out} file{'s' * (left_out > 1)} of {source} left out as no text",
            file=sys.stderr,
        )
    files = [str(path) for path in sorted(destination.iterdir())]
    if args.json:
        print(json.dumps({"tokens": corpus.tokens, "documents": corpus.documents, "files": files}))
    else:
        told = f"{corpus.tokens:,} tokens of {corpus.documents:,} documents, vocabulary {corpus.vocab_size:,}"
        print(f"{destination}: {told}")
    return 0


def make_tokenizer(text: str, source: "Path | list[Path]", field: str) -> "Tokenizer":
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.tokenizers.tokenizer import byte_tokenizer, load_tokenizer, train_bpe

    if text == "bytes":
        return byte_tokenizer()
    if text.startswith("bpe:"):
        size = text.removeprefix("bpe:")
        if not size.isdigit() or int(size) < 257:
            raise ValueError(
                f"--tokenizer {text}: a trained vocabulary holds 256 bytes and an end; bpe:257 and up work"
            )
        return train_bpe(texts_of(source, field), int(size))
    path = Path(text)
    return load_tokenizer(path if path.exists() else model_path(find_model(text)))


def texts_of(source: "Path | list[Path]", field: str) -> Iterator[str]:
    from shardwise.train.documents import read_file, source_files

    return (piece.text for file in source_files(source) for piece in read_file(file, field))
