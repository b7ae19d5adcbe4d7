"""`shardwise data build`: tokenize text into a training dataset."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import log, progress_bar

if TYPE_CHECKING:
    from shardwise.formats.tokenizers.tokenizer import Tokenizer
    from shardwise.train.data.documents import Messages

STANDARD_LIBRARY = "python"
LEAST_VOCABULARY = 257  # 256 bytes and an end-of-text token


def add_data(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data",
        help="tokenize text into a training dataset",
        description="Prepare training data: `shardwise data build SOURCE DST --tokenizer MODEL`.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    build = actions.add_parser(
        "build",
        help="tokenize SOURCE into the folder DST",
        description="Tokenize text into a training dataset, once; training maps the files into "
        "memory.",
    )
    build.add_argument(
        "source",
        metavar="SOURCE",
        help="a file or folder of text, .jsonl, .json or .parquet, also .gz; or `python`, the "
        "source of Python's standard library",
    )
    build.add_argument("destination", metavar="DST", help="folder to write")
    build.add_argument(
        "--tokenizer",
        required=True,
        metavar="MODEL",
        help="tokenizer to use: a model folder, a .gguf file, a training run or a hub id; `bytes`; "
        "or `bpe:4096` to train one with 4096 tokens",
    )
    build.add_argument(
        "--held-out",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the documents to hold out for evaluation (default: %(default)s)",
    )
    build.add_argument(
        "--field",
        metavar="NAME",
        help="field of JSON or column of .parquet that holds a document: a text, or a list of "
        "messages, rendered with the model's chat template (default: text, or else messages)",
    )
    build.set_defaults(run=run_data_build)


def run_data_build(args: argparse.Namespace) -> int:
    from shardwise.train.data.corpus_builder import build_corpus
    from shardwise.train.data.documents import python_source_files, walk

    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out must be at least 0 and below 1, not {args.held_out}")
    source = python_source_files() if args.source == STANDARD_LIBRARY else Path(args.source)
    destination = Path(args.destination)
    tokenizer = make_tokenizer(args.tokenizer, source, args.field)
    with progress_bar() as advance:

        def report(done: int, total: int, tokens: int) -> None:
            share = min(1.0, done / max(1, total))  # a compressed file has more than its size
            advance(f"tokenize, {tokens:,} tokens", share)

        corpus = build_corpus(source, destination, tokenizer, args.held_out, report, args.field)
    if isinstance(source, Path) and source.is_dir():
        num_skipped = len(walk(source)) - len(corpus.files)
        if num_skipped:
            log(f"skipped {num_skipped} file{'s' * (num_skipped > 1)} of {source}: not text")
    if args.json:
        files = [str(path) for path in sorted(destination.iterdir())]
        print(json.dumps({"tokens": corpus.tokens, "documents": corpus.documents, "files": files}))
    else:
        print(
            f"{destination}: {corpus.tokens:,} tokens in {corpus.documents:,} documents, "
            f"vocabulary of {corpus.vocab_size:,}"
        )
    return 0


def make_tokenizer(name: str, source: "Path | list[Path]", field: str | None) -> "Tokenizer":
    """Return the tokenizer that --tokenizer names; `bpe:N` is trained on the source."""
    from shardwise.formats.catalogue import find_model, model_path
    from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
    from shardwise.formats.tokenizers.train_bpe import byte_tokenizer, train_bpe

    if name == "bytes":
        return byte_tokenizer()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdigit() or int(size) < LEAST_VOCABULARY:
            raise ValueError(
                f"--tokenizer {name} is too small: a vocabulary has 256 bytes and an end-of-text "
                f"token; use bpe:{LEAST_VOCABULARY} or more"
            )
        return train_bpe(document_texts(source, field), int(size))
    path = Path(name)
    return load_tokenizer(path if path.exists() else model_path(find_model(name)))


def document_texts(source: "Path | list[Path]", field: str | None) -> Iterator[str]:
    from shardwise.train.data.documents import read_file, source_files

    def render(messages: "Messages") -> str:
        raise ValueError("a new tokenizer has no chat template; give --tokenizer a chat model")

    return (piece.text for file in source_files(source) for piece in read_file(file, field, render))
