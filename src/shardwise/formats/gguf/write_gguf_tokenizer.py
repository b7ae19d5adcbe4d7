"""A tokenizer as GGUF metadata: the inverse of `gguf_tokenizer.py`, verified by reading it back.

Supports byte-level BPE with a pre-tokenizer that GGUF has a name for. Keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.formats.gguf.gguf_tokenizer import (
    BYTE_LEVEL,
    GGUF_SPECIAL,
    TokenType,
    tokenizer_from_gguf,
)
from shardwise.formats.tokenizers.pre_tokenizers import GPT2_WORDS, PRE_TOKENIZERS
from shardwise.formats.tokenizers.tokenizer import Tokenizer

SAMPLE = (
    "Hello! It's 2024: 3.14159, x_1=f(y); don't  stop.\n\n\tDéjà vu \N{SNOWMAN} 日本語 мир\r\n"
    "   THE End's 12345"
)


def tokenizer_metadata(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    """Return the `tokenizer.*` metadata of a model with `vocab_size` rows in its embedding.

    Raises ValueError for a tokenizer that GGUF cannot describe.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    metadata = _byte_level_metadata(tokenizer, vocab_size)
    reread = tokenizer_from_gguf(metadata)
    for special_tokens in (False, True):
        if reread.encode(SAMPLE, special_tokens) != tokenizer.encode(SAMPLE, special_tokens):
            raise ValueError(
                "GGUF cannot describe this model's tokenizer; write a folder instead: "
                "--quant int4-g32"
            )
    return metadata


def _byte_level_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    content = json.loads(tokenizer.backend.to_str())
    pre = _pre_tokenizer_name(content)
    if content["model"]["type"] != "BPE" or not tokenizer.is_byte_level or pre is None:
        raise ValueError(
            "GGUF has no name for this model's kind of tokenizer; byte-level BPE with the "
            f"pre-tokenizer {', '.join(sorted(PRE_TOKENIZERS))} can be written, and a folder with "
            "any tokenizer: --quant int4-g32"
        )
    merges = content["model"]["merges"]
    if not merges:
        raise ValueError(
            "GGUF cannot store a tokenizer without merges, such as one token per byte; write a "
            "folder instead: --quant int4-g32"
        )
    values: dict[str, Any] = {"model": BYTE_LEVEL, "pre": pre}
    values |= _token_lists(tokenizer, max(vocab_size, tokenizer.vocab_size))
    values["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    for name, short in GGUF_SPECIAL.items():
        if name in tokenizer.special:
            values[f"{short}_token_id"] = tokenizer.backend.token_to_id(tokenizer.special[name])
    bare = tokenizer.encode("a")
    wrapped = tokenizer.encode("a", special_tokens=True)
    values["add_bos_token"] = wrapped[:1] != bare[:1]
    values["add_eos_token"] = wrapped[-1:] != bare[-1:]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if tokenizer.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _token_lists(tokenizer: Tokenizer, num_ids: int) -> dict[str, list[Any]]:
    """Return the text and type of every id; ids without a token become unused padding."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    texts = {index: text for text, index in vocab.items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    for index, token in tokenizer.backend.get_added_tokens_decoder().items():
        types[index] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    return {
        "tokens": [texts.get(index, f"[PAD{index}]") for index in range(num_ids)],
        "token_type": [int(types.get(index, TokenType.UNUSED)) for index in range(num_ids)],
    }


def _pre_tokenizer_name(content: Mapping[str, Any]) -> str | None:
    """Return GGUF's name for the pre-tokenizer of a tokenizer.json, or None. Of several with the
    same patterns it is the first that also uses whole words and composes as the tokenizer does."""
    first = content.get("pre_tokenizer") or {}
    patterns = tuple(_patterns(first.get("pretokenizers", [first])))
    whole_words_first = content["model"].get("ignore_merges", False)
    composes = (content.get("normalizer") or {}).get("type") == "NFC"
    names = [name for name, pre in PRE_TOKENIZERS.items() if pre.patterns == patterns]

    def num_differences(name: str) -> int:
        pre = PRE_TOKENIZERS[name]
        return (pre.whole_words_first != whole_words_first) + (pre.composes_unicode != composes)

    return min(names, key=num_differences, default=None)


def _patterns(steps: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the regular expressions by which the steps of a pre-tokenizer split text."""
    for step in steps:
        if step.get("type") == "Split":
            yield step["pattern"].get("Regex", "")
        elif step.get("type") == "Digits":
            yield r"\p{N}" if step["individual_digits"] else r"\p{N}+"
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            yield GPT2_WORDS
