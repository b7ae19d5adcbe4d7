"""`text_bound`: how many bytes of text one token can stand for, at most.

A text of more bytes than a context's tokens can stand for is refused before it is encoded, which
takes seconds and gigabytes for long ones. The bound holds on these conditions, which are read from
the tokenizer; without them there is none:

- The model is a BPE that has a token for each byte, so that no text is dropped or becomes one
  unknown token of any length. Bytes that hardly any text has (`RARE_BYTES`) may be missing, and
  then do not count.
- Each step of the normalizer shrinks a text by at most a known factor (`SHRINKS`), such as NFC,
  which turns nine bytes of Hangul into three. Accents or spaces that are stripped have no factor.
- No step of the pre-tokenizer removes text.

Special tokens with `lstrip` or `rstrip` take any amount of whitespace with them. If there are some,
only other characters count.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from shardwise.formats.tokenizers.bpe import CHAR_TO_BYTE

SHRINKS = {
    "NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1,
}  # fmt: skip
"""Bytes of UTF-8 before a normalizer, over those after it, at most (`tests/test_text_bound.py`
computes the first four from the Unicode database)."""
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that never remove text."""
MAY_KEEP_TEXT = frozenset({"Split", "Punctuation"})
"""Pre-tokenizers that remove text only if their behavior is `Removed`."""


RARE_BYTES = frozenset((*range(0x20), 0xC0, 0xC1, *range(0xF1, 0xF4), *range(0xF5, 0x100)))
"""Control characters, planes without characters, and bytes that UTF-8 never has. No normalizer
produces any of them."""


@dataclass(frozen=True)
class TextBound:
    """The most bytes of text that a token stands for.

    Attributes:
        token_bytes: bytes of UTF-8.
        dropped: bytes that have no token; they do not count.
        skips_spaces: whitespace does not count, since a token may take any amount of it along.
    """

    token_bytes: int
    dropped: bytes = b""
    skips_spaces: bool = False

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least."""
        counted = "".join(text.split()) if self.skips_spaces else text
        num_bytes = len(counted.encode(errors="surrogatepass").translate(None, self.dropped))
        return -(-num_bytes // self.token_bytes)


def text_bound(backend: Backend) -> TextBound | None:
    """Return the bound of a tokenizer, or None if it does not meet the conditions for one."""
    normalizers = steps(backend.normalizer, "normalizers")
    pre_tokenizers = steps(backend.pre_tokenizer, "pretokenizers")
    factor = shrink_factor(normalizers)
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    dropped = bytes_without_token(backend, vocabulary, is_byte_level)
    if factor is None or not all(map(keeps_text, pre_tokenizers)) or dropped - RARE_BYTES:
        return None
    longest = max(len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
    added = backend.get_added_tokens_decoder().values()
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    skips_spaces = any(token.lstrip or token.rstrip for token in added)
    return TextBound(int(longest * factor), bytes(sorted(dropped)), skips_spaces)


def bytes_without_token(
    backend: Backend, vocabulary: Mapping[str, int], is_byte_level: bool
) -> frozenset[int]:
    """Return the bytes that this vocabulary cannot spell; all of them if the model is no BPE."""
    model = backend.model
    if not isinstance(model, models.BPE) or not (is_byte_level or model.byte_fallback):
        return frozenset(range(256))
    if is_byte_level:
        return frozenset(byte for char, byte in CHAR_TO_BYTE.items() if char not in vocabulary)
    return frozenset(byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary)


def steps(component: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, each as its JSON object."""
    if component is None:
        return []

    def flatten(step: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        return (each for inner in step[key] for each in flatten(inner))

    return list(flatten(json.loads(component.__getstate__())))


def keeps_text(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    return kind in KEEPS_TEXT or (kind in MAY_KEEP_TEXT and step.get("behavior") != "Removed")


def shrink_factor(normalizers: Iterable[Mapping[str, Any]]) -> Fraction | None:
    """Return bytes before all steps over bytes after them, at most; None without a bound."""
    factor = Fraction(1)
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String", "").encode()
            content = step["content"].encode()
            if not pattern or not content or RARE_BYTES & {*content}:
                return None
            factor *= max(Fraction(1), Fraction(len(pattern), len(content)))
        elif step["type"] in SHRINKS:
            factor *= SHRINKS[step["type"]]
        else:
            return None
    return factor
