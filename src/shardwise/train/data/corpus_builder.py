"""Building data sets: text is tokenized once into the files that `corpus.py` describes.

Memory stays bounded whatever the size of the source: long documents are tokenized in pieces, with
the ids of the whole document (`long_text.py`).
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from shardwise.train.data.corpus import FORMAT_VERSION, HELD_OUT, START_DTYPE, TRAIN, Corpus, Split
from shardwise.train.data.document_encoder import DocumentEncoder, DocumentTokenizer
from shardwise.train.data.documents import Reading, TextChunk, fail, read_file, source_files
from shardwise.train.data.long_text import pieces
from shardwise.writing.atomic import exclusive, partial_path, remove, written_aside
from shardwise.writing.json_text import json_text

BATCH_CHARACTERS = 1 << 22
BATCH_CHUNKS = 1 << 12

Progress = Callable[[int, int, int], None]  # source bytes done, total, tokens


def build_corpus(
    source: Path | Sequence[Path],
    destination: Path,
    tokenizer: DocumentTokenizer,
    held_out: float = 0.0,
    progress: Progress | None = None,
    field: str | None = None,
    parse_special: bool = False,
    on_bad: Callable[[ValueError], None] = fail,
) -> Corpus:
    """Tokenize text into a data set, and return what it holds.

    Training then reads tokens at the speed of memory, and any layout reads the same ones. The
    folder `destination` appears only when it is complete.

    Args:
        source: a file, a folder (walked in sorted order, without hidden files, `__pycache__` and
            binary files) or a list of files, any of them `.gz`. A `.jsonl` or `.ndjson` file
            holds one document per line, a `.json` file a list of them, a `.parquet` file one per
            row; any other file is one document of UTF-8 text. Empty
            documents are skipped.
        field: what holds a document in `.jsonl` and `.parquet`: a text, or messages, which are
            rendered with the tokenizer's chat template; None is `text`, or else `messages`.
        held_out: the share of documents in the held-out split, chosen by a hash of the document's
            number. Each split gets at least one document; a last document that is most of the text
            is split in two.
        parse_special: parse control tokens that are spelled out in documents, which are text
            otherwise. Those of the chat template are parsed either way.
        on_bad: called with the error of a row that holds no document; where it returns, the row is
            left out.

    Raises ValueError for a destination in use, a source without text, and a file that cannot be
    read (with its line or row).
    """
    if not 0 <= held_out < 1:
        raise ValueError(
            f"held_out is a share of the documents: at least 0 and below 1, not {held_out}."
        )
    check_end_token(tokenizer)
    destination = destination.resolve()
    encoder = DocumentEncoder(tokenizer, parse_special)
    reading = Reading(encoder.render, field, on_bad)
    try:
        refuse_used(destination)
        files = source_files(source)
        with staged(destination) as folder:
            corpus = write_data_set(files, folder, encoder, reading, held_out, progress)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ValueError(
            f"Building {destination} failed: {error.strerror or error}{where}."
        ) from error
    return corpus


def check_end_token(tokenizer: DocumentTokenizer) -> None:
    """Raise ValueError unless the tokenizer has a token that separates documents."""
    if not tokenizer.eos_ids:
        raise ValueError(
            "The tokenizer has no end-of-text token to separate documents; define one."
        )
    if min(tokenizer.eos_ids) >= tokenizer.vocab_size:
        raise ValueError(
            f"The end token has the id {min(tokenizer.eos_ids)} (eos_token_id), but the tokenizer "
            f"has ids below {tokenizer.vocab_size} only."
        )


# -- the data set


def write_data_set(
    files: Sequence[Path],
    folder: Path,
    encoder: DocumentEncoder,
    reading: Reading,
    held_out: float,
    progress: Progress | None,
) -> Corpus:
    """Write all files of a data set, and return what it holds."""
    tokenizer = encoder.tokenizer
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    splits = write_splits(files, folder, encoder, reading, dtype, held_out, progress)
    tokenizer.save(folder)
    corpus = Corpus(
        dtype.name,
        tokenizer.vocab_size,
        min(tokenizer.eos_ids),
        splits,
        tuple(str(file) for file in files),
        encoder.num_special,
    )
    write_corpus(corpus, folder)
    return corpus


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
        "special_tokens": corpus.special_tokens,
    }
    (folder / "data.json").write_text(json_text(record, indent=1) + "\n")


def refuse_used(destination: Path) -> None:
    if (destination / "data.json").is_file():
        raise ValueError(
            f"{destination} already holds a data set; remove it first or name another folder."
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; name another folder.")


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Yield an empty folder, which is renamed to `destination` when the block succeeds and removed
    when it fails.

    The next build clears what a killed one left. Raises ValueError if another process is building
    the same data set.
    """
    partial = partial_path(destination)
    partial.mkdir(parents=True, exist_ok=True)
    in_use = f"Another process is building {destination}; name another folder, or wait."
    with exclusive(partial, in_use), written_aside(destination, unique=False):
        for leftover in partial.iterdir():
            remove(leftover)
        yield partial


class SplitWriter:
    """Writes the tokens of one split and the starts of its documents."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, vocab_size: int, files: ExitStack
    ) -> None:
        self.tokens_file = files.enter_context((folder / f"{name}.bin").open("w+b"))
        self.starts_file = files.enter_context((folder / f"{name}.idx").open("w+b"))
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self.num_documents = 0
        self.document_start = 0  # of the current document, or of the next one
        self.last_tokens: tuple[int, ...] = ()  # at most two, of the current document

    def append(self, tokens: Sequence[int]) -> None:
        wide = np.asarray(tokens, dtype=np.int64)
        if wide.size and not 0 <= wide.min() <= wide.max() < self.vocab_size:
            raise ValueError(
                f"The tokenizer returned token {wide.max()}, outside its vocabulary of "
                f"{self.vocab_size}; its files do not belong together."
            )
        self.tokens_file.write(wide.astype(self.dtype).tobytes())
        self.num_tokens += wide.size
        self.last_tokens = (*self.last_tokens, *tokens[-2:])[-2:]

    def end_document(self, end_of_text: int, own_ends: Collection[int] = ()) -> bool:
        """End the current document; return False if it was empty and so does not count.

        A document with one of `own_ends` as its last token or the one before, as chat templates
        put a line break behind it, gets no other end.
        """
        if self.num_tokens == self.document_start:
            return False
        if not any(token in own_ends for token in self.last_tokens):
            self.append([end_of_text])
        self.last_tokens = ()
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
        """Move the tokens from `start` to the end, which are the last document or its tail, to an
        empty split as its only document."""
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
    encoder: DocumentEncoder,
    reading: Reading,
    dtype: np.dtype,
    held_out: float,
    progress: Progress | None,
) -> dict[str, Split]:
    """Tokenize the files into one or two splits in `folder`, and return their sizes."""
    end_of_text = min(encoder.tokenizer.eos_ids)
    vocab_size = encoder.tokenizer.vocab_size
    total_bytes = sum(file.stat().st_size for file in files)
    done_bytes = number = 0
    with ExitStack() as stack:
        names = [TRAIN, HELD_OUT] if held_out else [TRAIN]
        writers = {name: SplitWriter(folder, name, dtype, vocab_size, stack) for name in names}
        chunks = (chunk for file in files for chunk in read_file(file, reading))
        for batch in batched(pieces(chunks, encoder.encode)):
            encoder.count(batch)
            for chunk, tokens in zip(batch, encoder.encode(batch), strict=True):
                writer = writers[HELD_OUT if held_out and is_held_out(number, held_out) else TRAIN]
                writer.append(tokens)
                own_ends = encoder.tokenizer.eos_ids if chunk.is_chat else ()
                if chunk.ends_document and writer.end_document(end_of_text, own_ends):
                    number += 1
                done_bytes += chunk.source_bytes
            if progress:
                num_tokens = sum(writer.num_tokens for writer in writers.values())
                progress(done_bytes, total_bytes, num_tokens)
        if not number:
            raise ValueError("The source holds no text: all its documents are empty.")
        if held_out and not writers[HELD_OUT].num_documents:
            hold_out_last(writers[TRAIN], writers[HELD_OUT], held_out)
        return {name: writer.split() for name, writer in writers.items()}


def is_held_out(number: int, share: float) -> bool:
    """Return whether document `number` is held out: pseudo-random, and never the first."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return number > 0 and int.from_bytes(digest, "little") < share * 2**64


def hold_out_last(train: SplitWriter, held_out: SplitWriter, share: float) -> None:
    """Hold out the last document where the hash chose none, or only its last tokens if it is most
    of the text."""
    start = train.last_start()
    if 2 * (train.num_tokens - start) > train.num_tokens:
        num_held_out = max(1, round(share * train.num_tokens))
        start = train.num_tokens - min(train.num_tokens - start - 1, num_held_out)
    train.move_tail(start, held_out)


def batched(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    """Yield batches of chunks, large enough to keep a tokenizer with many threads busy."""
    batch: list[TextChunk] = []
    num_characters = 0
    for chunk in chunks:
        batch.append(chunk)
        num_characters += len(chunk.text)
        if num_characters >= BATCH_CHARACTERS or len(batch) == BATCH_CHUNKS:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch
