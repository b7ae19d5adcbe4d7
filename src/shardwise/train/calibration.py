"""Calibration data for methods that quantize by the activations of a model: token ids, in sequences
of one length."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.train.data.batches import TokenFile
from shardwise.train.data.document_encoder import DocumentEncoder
from shardwise.train.data.documents import Reading, read_file, source_files
from shardwise.train.data.long_text import pieces

SEQUENCE_TOKENS = 512
USUAL_TOKENS = 65536
FEWEST_TOKENS = 1024
"""The minimum: fewer tokens say little about the inputs of the model."""
READ_TIMES = 8
"""Ratio of tokens read to tokens used, so that sequences come from the whole text."""


def calibration_text(
    source: Path, tokenizer: Tokenizer, max_positions: int, num_tokens: int = USUAL_TOKENS
) -> Tensor:
    """Return about `num_tokens` token ids, int64 [sequences, tokens], evenly spread over a text
    file, a folder of text files, or a data set.

    Raises ValueError for a source that is missing or too short, and for a data set of another
    tokenizer.
    """
    if num_tokens < FEWEST_TOKENS:
        raise ValueError(
            f"{num_tokens} tokens are too few to calibrate with; at least {FEWEST_TOKENS:,} work"
        )
    if (source / "data.json").is_file():
        tokens = np.asarray(open_data_set(source, tokenizer).tokens)
    else:
        tokens = first_tokens(source, tokenizer, READ_TIMES * num_tokens)
    if len(tokens) < FEWEST_TOKENS:
        raise ValueError(
            f"{source} has {len(tokens):,} tokens, too few to calibrate with; at least "
            f"{FEWEST_TOKENS:,} work, and {USUAL_TOKENS:,} are usual"
        )
    length = min(SEQUENCE_TOKENS, max_positions)
    num_available = len(tokens) // length
    num_used = max(1, min(num_tokens, len(tokens)) // length)
    chosen = np.arange(num_used) * num_available // num_used
    sequences = tokens[: num_available * length].reshape(num_available, length)[chosen]
    return torch.from_numpy(sequences.astype(np.int64))


def open_data_set(folder: Path, tokenizer: Tokenizer) -> TokenFile:
    """Open the training split of a data set. Raises ValueError if its tokenizer has another number
    of tokens."""
    token_file = TokenFile(folder)
    if token_file.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{folder} was built with a tokenizer of {token_file.vocab_size:,} tokens, but that of "
            f"the model has {tokenizer.vocab_size:,}; give a text file, or build it with "
            "--tokenizer set to the model"
        )
    return token_file


def first_tokens(source: Path, tokenizer: Tokenizer, most: int) -> np.ndarray:
    """Return at most `most` token ids from the start of a text."""
    tokens: list[int] = []
    encoder = DocumentEncoder(tokenizer)
    reading = Reading(encoder.render)
    chunks = (chunk for file in source_files(source) for chunk in read_file(file, reading))
    for piece in pieces(chunks, encoder.encode):
        tokens += encoder.encode([piece])[0]
        if len(tokens) >= most:
            break
    return np.array(tokens[:most], dtype=np.int64)
