"""Data sets: text tokenized once into files that training maps into memory.

A data set is a folder:

    train.bin, held_out.bin   tokens of all documents in order, little-endian uint16 or uint32
    train.idx, held_out.idx   start of each document, in tokens, little-endian int64
    data.json                 counts, dtype, vocabulary size, end-of-text token, source files
    tokenizer files           written by `tokenizer.save`, so that the data set is self-contained

Every document ends with the end-of-text token. `corpus_builder.py` writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.formats.config_files import read_json_object

FORMAT_VERSION = 1
TRAIN = "train"
HELD_OUT = "held_out"
START_DTYPE = np.dtype("<i8")


@dataclass(frozen=True)
class Split:
    """The size of one split of a data set, and the checksum of its tokens."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """The content of `data.json`: what a data set holds. `files` are the source files in reading
    order; `special_tokens` counts the control tokens that are spelled out in them."""

    dtype: str
    vocab_size: int
    end_of_text: int
    splits: Mapping[str, Split]
    files: tuple[str, ...]
    special_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


def read_corpus(folder: Path) -> Corpus:
    """Return what the data set in `folder` holds. Raises ValueError if there is none, or if this
    version cannot read it."""
    path = folder / "data.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a data set: it has no data.json (`shardwise data build` makes one)."
        )
    try:
        record = read_json_object(path)
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{folder} has format version {record['format_version']}, but this program reads "
                f"version {FORMAT_VERSION}; build it again."
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
            record.get("special_tokens", 0),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not describe a data set; build it again with `shardwise data build`."
        ) from error
