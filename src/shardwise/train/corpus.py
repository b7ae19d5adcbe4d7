"""Text files, tokenized once into files of tokens that training maps into memory.

A data set is a folder:

    train.bin, held_out.bin   the tokens of all documents, one after another, little-endian uint16 or uint32
    train.idx, held_out.idx   where each document starts, in tokens, little-endian int64
    data.json                 counts, dtype, vocabulary size, end-of-text token, source files
    tokenizer files           what `tokenizer.save` writes, so that the data set is self-contained

Every document ends with the end-of-text token. Memory stays bounded whatever the size of the
source: long documents are tokenized in pieces.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shardwise.atomic import exclusive, partial_path, remove, written_aside
from shardwise.train.documents import Piece, read_file, source_files

FORMAT_VERSION = 1
TRAIN = "train"
HELD_OUT = "held_out"
START_DTYPE = np.dtype("<i8")

BATCH_CHARACTERS = 1 << 22
BATCH_PIECES = 1 << 12

Progress = Callable[[int, int, int], None]  # source bytes done, source bytes in all, tokens so far


class Encoder(Protocol):
    """What building needs of a tokenizer; `encode_batch` adds no special tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...

    def save(self, folder: Path, /) -> object: ...


@dataclass(frozen=True)
class Split:
    """How much one part of a data set holds, and the checksum of its tokens."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """What a data set holds: the content of its `data.json`. `files` are the source files, in
    reading order."""

    dtype: str
    vocab_size: int
    end_of_text: int
    splits: Mapping[str, Split]
    files: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


def build(
    source: Path | Sequence[Path],
    destination: Path,
    tokenizer: Encoder,
    held_out: float = 0.0,
    progress: Progress | None = None,
    field: str = "text",
) -> Corpus:
    """Tokenize text once, so that training reads tokens at the speed of memory and any layout reads
    the same ones.

    `source` is a file, a folder (walked in sorted order, without hidden files, `__pycache__` and
    what is no text) or a list of files. A `.jsonl` file holds a document a line and a `.parquet`
    file one a row, under `field`; any other file is one document of UTF-8 text. Empty documents are
    left out. `held_out` is the share of documents put into the held-out split, chosen by a hash of
    the document's number; each split gets at least one, and a last document that is most of the
    text is cut in two.

    The folder appears under its name only when complete. Raises ValueError for a destination in
    use, a source without text, and a file that cannot be read (with its line or row).
    """
    if not 0 <= held_out < 1:
        raise ValueError(
            f"held_out is a share of the documents, at least 0 and below 1, not {held_out}."
        )
    if not tokenizer.eos_ids:
        raise ValueError(
            "The tokenizer names no end-of-text token, so documents could not be told apart; name one."
        )
    destination = destination.resolve()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    try:
        refuse_used(destination)
        files = source_files(source)
        with staged(destination) as folder:
            splits = write_splits(files, folder, tokenizer, dtype, held_out, progress, field)
            tokenizer.save(folder)
            corpus = Corpus(
                dtype.name,
                tokenizer.vocab_size,
                min(tokenizer.eos_ids),
                splits,
                tuple(str(file) for file in files),
            )
            write_corpus(corpus, folder)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ValueError(
            f"Building {destination} failed: {error.strerror or error}{where}."
        ) from error
    return corpus


# -- the data set
# -------------------------------------------------------------------------------------------


def read_corpus(folder: Path) -> Corpus:
    """What the data set in `folder` holds; ValueError if there is none or this version cannot read
    it."""
    path = folder / "data.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a data set: it has no data.json (`shardwise data build` makes one)."
        )
    try:
        record = json.loads(path.read_bytes())
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{folder} is a data set of format version {record['format_version']}, and this program reads version "
                f"{FORMAT_VERSION}; build it again."
            )
        if record["dtype"] not in ("uint16", "uint32") or type(record["vocab_size"]) is not int:
            raise TypeError(record["dtype"])
        splits = {name: Split(**counts) for name, counts in record["splits"].items()}
        return Corpus(
            record["dtype"],
            record["vocab_size"],
            record["end_of_text"],
            splits,
            tuple(record["files"]),
        )
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not describe a data set; build it again with `shardwise data build`."
        ) from error


def write_corpus(corpus: Corpus, folder: Path) -> None:
    record = {
        "format_version": FORMAT_VERSION,
        "dtype": corpus.dtype,
        "vocab_size": corpus.vocab_size,
        "end_of_text": corpus.end_of_text,
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "sha256": split.sha256}
            for name, split in corpus.splits.items()
        },
        "files": corpus.files,
    }
    (folder / "data.json").write_text(json.dumps(record, indent=1) + "\n")


def refuse_used(destination: Path) -> None:
    if (destination / "data.json").is_file():
        raise ValueError(
            f"{destination} already holds a data set; remove it first or name another folder."
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; name another folder.")


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A folder to write in, renamed to `destination` when the block ends well and removed when it
    does not.

    What a killed build left behind is cleared by the next one; a lock keeps two at a time apart.
    """
    partial = partial_path(destination)
    partial.mkdir(parents=True, exist_ok=True)
    in_use = f"Another process is building {destination}; name another folder, or wait."
    with exclusive(partial, in_use), written_aside(destination, unique=False):
        for leftover in partial.iterdir():
            remove(leftover)
        yield partial


class SplitWriter:
    """One split being written: its tokens and the starts of its documents."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, vocab_size: int, files: ExitStack
    ) -> None:
        self.tokens_file = files.enter_context((folder / f"{name}.bin").open("w+b"))
        self.starts_file = files.enter_context((folder / f"{name}.idx").open("w+b"))
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self.num_documents = 0
        self.document_start = 0  # of the document being written, or else of the next

    def append(self, tokens: Sequence[int]) -> None:
        wide = np.asarray(tokens, dtype=np.int64)
        if wide.size and not 0 <= wide.min() <= wide.max() < self.vocab_size:
            raise ValueError(
                f"The tokenizer gave token {wide.max()}, outside its vocabulary of {self.vocab_size}; "
                "its files do not belong together."
            )
        self.tokens_file.write(wide.astype(self.dtype).tobytes())
        self.num_tokens += wide.size

    def end_document(self, end_of_text: int) -> bool:
        """Close the document being written; False if it was empty, and so is none."""
        if self.num_tokens == self.document_start:
            return False
        self.append([end_of_text])
        self.add_start(self.document_start)
        self.document_start = self.num_tokens
        return True

    def add_start(self, start: int) -> None:
        self.starts_file.write(np.asarray(start, dtype=START_DTYPE).tobytes())
        self.num_documents += 1

    def split(self) -> Split:
        self.tokens_file.flush()
        self.tokens_file.seek(0)
        digest = hashlib.file_digest(self.tokens_file, "sha256").hexdigest()
        return Split(self.num_tokens, self.num_documents, digest)

    def last_start(self) -> int:
        self.starts_file.seek(-START_DTYPE.itemsize, os.SEEK_END)
        return int(np.frombuffer(self.starts_file.read(START_DTYPE.itemsize), START_DTYPE)[0])

    def move_tail(self, start: int, empty: "SplitWriter") -> None:
        """Move the tokens from `start` on, the last document or its end, into an empty split as its
        one document."""
        if start == self.last_start():
            self.num_documents -= 1
            self.starts_file.truncate(self.num_documents * START_DTYPE.itemsize)
        self.tokens_file.seek(start * self.dtype.itemsize)
        shutil.copyfileobj(self.tokens_file, empty.tokens_file)
        self.tokens_file.truncate(start * self.dtype.itemsize)
        empty.num_tokens = self.num_tokens - start
        empty.add_start(0)
        self.num_tokens = start


def write_splits(
    files: Sequence[Path],
    folder: Path,
    tokenizer: Encoder,
    dtype: np.dtype,
    held_out: float,
    progress: Progress | None,
    field: str,
) -> dict[str, Split]:
    end_of_text = min(tokenizer.eos_ids)
    total_bytes = sum(file.stat().st_size for file in files)
    done_bytes = number = 0
    with ExitStack() as stack:
        names = [TRAIN, HELD_OUT] if held_out else [TRAIN]
        writers = {
            name: SplitWriter(folder, name, dtype, tokenizer.vocab_size, stack) for name in names
        }
        for batch in batched(piece for file in files for piece in read_file(file, field)):
            for piece, tokens in zip(
                batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True
            ):
                writer = writers[HELD_OUT if held_out and is_held_out(number, held_out) else TRAIN]
                writer.append(tokens)
                if piece.ends_document and writer.end_document(end_of_text):
                    number += 1
                done_bytes += piece.source_bytes
            if progress:
                progress(
                    done_bytes, total_bytes, sum(writer.num_tokens for writer in writers.values())
                )
        if not number:
            raise ValueError("The source holds no text: every document in it is empty.")
        if held_out and not writers[HELD_OUT].num_documents:
            hold_out_last(writers[TRAIN], writers[HELD_OUT], held_out)
        return {name: writer.split() for name, writer in writers.items()}


def is_held_out(number: int, share: float) -> bool:
    """Whether document `number` is held out, as if drawn at random; the first never is."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return number > 0 and int.from_bytes(digest, "little") < share * 2**64


def hold_out_last(train: SplitWriter, held_out: SplitWriter, share: float) -> None:
    """Hold out the last document where the hash chose none; where it is most of the text, its last
    tokens alone."""
    start = train.last_start()
    if 2 * (train.num_tokens - start) > train.num_tokens:
        start = train.num_tokens - min(
            train.num_tokens - start - 1, max(1, round(share * train.num_tokens))
        )
    train.move_tail(start, held_out)


def batched(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Enough pieces at a time to keep a tokenizer with many threads busy."""
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch
