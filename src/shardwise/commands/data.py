"""`shardwise data build`: tokenize text into a training dataset."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.terminal import log, progress_bar
from shardwise.writing.json_text import json_text

if TYPE_CHECKING:
    from shardwise.formats.tokenizers.tokenizer import Tokenizer
    from shardwise.train.data.corpus import Corpus
    from shardwise.train.data.documents import Messages

STANDARD_LIBRARY = "python"
LEAST_VOCABULARY = 257  # 256 bytes and an end-of-text token
MOST_NAMED = 10
"""Bad rows that are named in the log; all are counted."""


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
        help="a file or folder of text, .jsonl, .json or .parquet, also .gz or .zst; or `python`, "
        "the source of Python's standard library",
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
    build.add_argument(
        "--parse-special",
        action="store_true",
        help="parse control tokens that are spelled out in documents, such as <|endoftext|>; by "
        "default they are text",
    )
    build.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out rows that cannot be read (no JSON, no valid text, no document), and count "
        "them; by default the first ends the build",
    )
    build.set_defaults(run=run_data_build)


def run_data_build(args: argparse.Namespace) -> int:
    from shardwise.train.data.corpus_builder import build_corpus
    from shardwise.train.data.documents import python_source_files, walk

    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out must be at least 0 and below 1, not {args.held_out}")
    source = python_source_files() if args.source == STANDARD_LIBRARY else Path(args.source)
    destination = Path(args.destination)
    bad_rows = BadRows(args.skip_bad)
    tokenizer = make_tokenizer(args.tokenizer, source, args.field, BadRows(args.skip_bad))
    with progress_bar() as advance:

        def report(done: int, total: int, tokens: int) -> None:
            share = min(1.0, done / max(1, total))  # a compressed file has more than its size
            advance(f"tokenize, {tokens:,} tokens", share)

        corpus = build_corpus(
            source,
            destination,
            tokenizer,
            args.held_out,
            report,
            args.field,
            args.parse_special,
            bad_rows.add,
        )
    left_out = []
    if isinstance(source, Path) and source.is_dir():
        read = set(corpus.files)
        left_out = [file for file in walk(source) if str(file) not in read]
    log_differences(corpus, left_out, bad_rows, args.parse_special)
    if args.json:
        files = [str(path) for path in sorted(destination.iterdir())]
        result = {"tokens": corpus.tokens, "documents": corpus.documents, "files": files}
        counts = {
            "special_tokens": corpus.special_tokens,
            "skipped_rows": bad_rows.number,
            "left_out_files": len(left_out),
        }
        print(json_text({**result, **counts}))
    else:
        print(
            f"{destination}: {corpus.tokens:,} tokens in {corpus.documents:,} documents, "
            f"vocabulary of {corpus.vocab_size:,}"
        )
    return 0


class BadRows:
    """Rows that hold no document: the first is an error, or with `skip` all are counted and the
    first few kept for the log."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.number = 0
        self.first: list[str] = []

    def add(self, error: ValueError) -> None:
        if not self.skip:
            raise ValueError(f"{error} --skip-bad leaves out such rows.") from error
        self.number += 1
        if len(self.first) < MOST_NAMED:
            self.first.append(str(error))


def log_differences(
    corpus: "Corpus", left_out: list[Path], bad_rows: BadRows, parse_special: bool
) -> None:
    """Log what of the source is not in the data set as it stands: files, rows, control tokens."""
    if left_out:
        num_broken = sum(not file.exists() for file in left_out)
        num_binary = len(left_out) - num_broken
        reasons = [f"{num_binary} not text"] if num_binary else []
        reasons += [f"{num_broken} broken link{plural(num_broken)}"] if num_broken else []
        log(f"left out {len(left_out)} file{plural(len(left_out))}: {', '.join(reasons)}")
    if bad_rows.number:
        log(f"skipped {bad_rows.number:,} bad row{plural(bad_rows.number)}:")
        for sentence in bad_rows.first:
            log(f"  {sentence}")
        if bad_rows.number > len(bad_rows.first):
            log(f"  and {bad_rows.number - len(bad_rows.first):,} more")
    if corpus.special_tokens:
        meaning = "parsed as such" if parse_special else "kept as text (--parse-special parses)"
        log(
            f"{corpus.special_tokens:,} control token{plural(corpus.special_tokens)} spelled out "
            f"in documents, {meaning}"
        )


def plural(number: int) -> str:
    return "s" * (number != 1)


def make_tokenizer(
    name: str, source: "Path | list[Path]", field: str | None, bad_rows: BadRows
) -> "Tokenizer":
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
        return train_bpe(document_texts(source, field, bad_rows), int(size))
    path = Path(name)
    return load_tokenizer(path if path.exists() else model_path(find_model(name)))


def document_texts(
    source: "Path | list[Path]", field: str | None, bad_rows: BadRows
) -> Iterator[str]:
    from shardwise.train.data.documents import Reading, read_file, source_files

    def render(messages: "Messages") -> str:
        raise ValueError("a new tokenizer has no chat template; give --tokenizer a chat model")

    reading = Reading(render, field, bad_rows.add)
    return (piece.text for file in source_files(source) for piece in read_file(file, reading))
