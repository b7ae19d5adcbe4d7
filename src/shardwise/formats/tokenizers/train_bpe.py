"""Tokenizers made here: one token per byte, or byte-level BPE trained on a text."""

from collections.abc import Iterable

from tokenizers import AddedToken, trainers
from tokenizers import Tokenizer as Backend

from shardwise.formats.tokenizers.bpe import BYTE_TO_CHAR, byte_level_bpe
from shardwise.formats.tokenizers.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PRE_TOKENIZER = "gpt-2"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte (its id is the byte) and 256 as the end of a
    text; it needs no download."""
    vocab = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
    return _with_end_of_text(byte_level_bpe(vocab, [], PRE_TOKENIZER))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary of at most `vocab_size` tokens; deterministic.

    The vocabulary is smaller if the texts have no more pairs to merge. Raises ValueError below 257:
    256 bytes and the end of a text.
    """
    smallest = len(BYTE_TO_CHAR) + 1
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}, but 256 bytes and {END_OF_TEXT} need at least {smallest}"
        )
    backend = byte_level_bpe({}, [], PRE_TOKENIZER)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=list(BYTE_TO_CHAR),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_end_of_text(backend)


def _with_end_of_text(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    end = backend.token_to_id(END_OF_TEXT)
    assert end is not None
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return Tokenizer(backend, special, frozenset((end,)))
