"""Small tokenizers of the SentencePiece line with the same ids: as GGUF files have them, and as
newer folders do."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers

from shardwise.formats.gguf.gguf_tokenizer import TokenType, tokenizer_from_gguf
from shardwise.formats.tokenizers.tokenizer import Tokenizer

PIECES = ["▁", "a", "b", "▁a", "ab", "▁▁", "é", "▁漢"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
TYPES = (
    [TokenType.UNKNOWN]
    + [TokenType.CONTROL] * 2
    + [TokenType.BYTE] * 256
    + [TokenType.NORMAL] * len(PIECES)
)


def sentencepiece_tokenizer(space_prefix: bool = True) -> Tokenizer:
    """256 byte tokens and a few pieces, as in GGUF files of the Llama 2 line; the scores matter
    only for encoding. The space before a text is put there by a normalizer (Prepend)."""
    keys = {"model": "llama", "tokens": TOKENS, "token_type": TYPES, "scores": [0.0] * len(TOKENS)}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    keys |= {"add_space_prefix": space_prefix}
    return tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def metaspace_tokenizer(prepend_scheme: str = "first", split: bool = False) -> Tokenizer:
    """The same tokens in a pipeline with Metaspace, as transformers writes Llama and Mistral."""
    like = sentencepiece_tokenizer()
    backend = Backend.from_str(like.backend.to_str())
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * (prepend_scheme != "never")
    )
    return Tokenizer(backend, like.special, like.eos_ids)


def gguf_tokenizer(processor: Any, changes: Mapping[str, TokenType] = {}) -> Tokenizer:
    """Return the tokenizer that a GGUF file made of a sentencepiece processor has, with `changes`
    of the types of its tokens."""
    ids = list(range(processor.vocab_size()))
    kinds = {
        TokenType.UNKNOWN: processor.is_unknown,
        TokenType.CONTROL: processor.is_control,
        TokenType.BYTE: processor.is_byte,
        TokenType.UNUSED: processor.is_unused,
    }
    types = [
        next((kind for kind, holds in kinds.items() if holds(index)), TokenType.NORMAL)
        for index in ids
    ]
    for text, kind in changes.items():
        types[processor.piece_to_id(text)] = kind
    keys = {
        "model": "llama",
        "tokens": processor.id_to_piece(ids),
        "token_type": types,
        "scores": [processor.get_score(index) for index in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
