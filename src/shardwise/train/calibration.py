"""Text for methods that quantize by looking at how a model works: token ids, in sequences of one
length."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.train.data import TokenFile
from shardwise.train.documents import read_file, source_files

SEQUENCE_TOKENS = 512
USUAL_TOKENS = 65536
FEWEST_TOKENS = 1024
"""Below, a text says little of what a model works on."""
READ_TIMES = 8
"""More is read than is used, so that sequences can be taken from all over it."""


def calibration_text(
    source: Path, tokenizer: Tokenizer, max_positions: int, num_tokens: int = USUAL_TOKENS
) -> Tensor:
    """About `num_tokens` ids [sequences, tokens] of a text file, a folder of them, or a data set,
    evenly spread.

    Raises ValueError for a source that is missing, has too little text, or is a data set of another
    tokenizer.
    """
    if num_tokens < FEWEST_TOKENS:
        raise ValueError(
            f"{num_tokens} tokens are too few to calibrate with; at least {FEWEST_TOKENS:,} work"
        )
    if (source / "data.json").is_file():
        tokens = np.asarray(data_set(source, tokenizer).tokens)
    else:
        tokens = text_tokens(source, tokenizer, READ_TIMES * num_tokens)
    if len(tokens) < FEWEST_TOKENS:
        raise ValueError(
            f"{source} has {len(tokens):,} tokens, too few to calibrate with; at least {FEWEST_TOKENS:,} work, and "
            f"{USUAL_TOKENS:,} are usual"
        )
    length = min(SEQUENCE_TOKENS, max_positions)
    num_there = len(tokens) // length
    num_taken = max(1, min(num_tokens, len(tokens)) // length)
    chosen = np.arange(num_taken) * num_there // num_taken
    sequences = tokens[: num_there * length].reshape(num_there, length)[chosen]
    return torch.from_numpy(sequences.astype(np.int64))


def data_set(folder: Path, tokenizer: Tokenizer) -> TokenFile:
    found = TokenFile(folder)
    if found.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{folder} was built with a tokenizer of {found.vocab_size:,} tokens and the model has one of "
            f"{tokenizer.vocab_size:,}; give a text file, or build it with --tokenizer set to the model"
        )
    return found


def text_tokens(source: Path, tokenizer: Tokenizer, at_most: int) -> np.ndarray:
    """The first tokens of a text."""
    found: list[int] = []
    for text in texts(source):
        found += tokenizer.encode(text)
        if len(found) >= at_most:
            break
    return np.array(found[:at_most], dtype=np.int64)


def texts(source: Path) -> Iterator[str]:
    for file in source_files(source):
        yield from (piece.text for piece in read_file(file, "text"))
