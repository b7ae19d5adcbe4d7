"""A tokenizer as GGUF metadata, the way back of `vocabulary.backend_from_gguf`: then proven by
reading it back.

Byte-level BPE whose rule to cut words is one that GGUF has a name for. Keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.formats.tokenizers.tokenizer import GGUF_SPECIAL, Tokenizer, from_gguf
from shardwise.formats.tokenizers.vocabulary import GPT2_WORDS, WORDS, TokenType

SAMPLE = "Hello! It's 2024: 3.14159, x_1=f(y); don't  stop.\n\n\tDéjà vu \N{SNOWMAN} 日本語 мир\r\n   THE End's 12345"


@dataclass(frozen=True)
class Metadata:
    """What `from_gguf` asks an open file for."""

    metadata: Mapping[str, Any]


def vocabulary_metadata(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    """`tokenizer.*` of a model with that many rows in its embedding. Raises ValueError for a
    tokenizer of a kind that GGUF has no name for."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    written = byte_level_metadata(tokenizer, vocab_size)
    again = from_gguf(Metadata(written))
    for special_tokens in (False, True):
        if again.encode(SAMPLE, special_tokens) != tokenizer.encode(SAMPLE, special_tokens):
            raise ValueError(
                "GGUF cannot say how this model's tokenizer works; write a folder instead: --quant int4-g32"
            )
    return written


def byte_level_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    content = json.loads(tokenizer.backend.to_str())
    pre = words_name(content)
    if content["model"]["type"] != "BPE" or not tokenizer.is_byte_level or pre is None:
        raise ValueError(
            "GGUF has no name for this model's kind of tokenizer; byte-level BPE that cuts words as "
            f"{', '.join(sorted(WORDS))} can be written, and a folder with any: --quant int4-g32"
        )
    texts = {
        index: text for text, index in tokenizer.backend.get_vocab(with_added_tokens=True).items()
    }
    added = tokenizer.backend.get_added_tokens_decoder()
    kinds = {
        index: TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        for index, token in added.items()
    }
    ids = range(max(vocab_size, tokenizer.vocab_size))
    merges = content["model"]["merges"]
    if not merges:
        raise ValueError(
            "a tokenizer without merges, as that of bytes, has no place in GGUF; write a folder instead"
        )
    found: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts.get(index, f"[PAD{index}]") for index in ids],
        "token_type": [
            int(kinds.get(index, TokenType.NORMAL if index in texts else TokenType.UNUSED))
            for index in ids
        ],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    for name, short in GGUF_SPECIAL.items():
        if name in tokenizer.special:
            found[f"{short}_token_id"] = tokenizer.backend.token_to_id(tokenizer.special[name])
    plain = tokenizer.encode("a")
    whole = tokenizer.encode("a", special_tokens=True)
    found["add_bos_token"] = whole[:1] != plain[:1]
    found["add_eos_token"] = whole[-1:] != plain[-1:]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    return metadata | (
        {"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    )


def words_name(content: Mapping[str, Any]) -> str | None:
    """The name of the rule by which a tokenizer cuts words."""
    first = content.get("pre_tokenizer") or {}
    cuts = tuple(cuts_of(first.get("pretokenizers", [first])))
    return next((name for name, known in WORDS.items() if known == cuts), None)


def cuts_of(steps: list[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        if step.get("type") == "Split":
            yield step["pattern"].get("Regex", "")
        elif step.get("type") == "Digits":
            yield r"\p{N}" if step["individual_digits"] else r"\p{N}+"
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            yield GPT2_WORDS
