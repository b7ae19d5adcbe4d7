"""Control tokens that are spelled out in a text, such as `<|im_end|>` in a document about chat
formats, read as text.

In a plain text none is parsed: `tokenizers` has a switch for that. In a conversation those of the
chat template are parsed and those in its messages are not: they are marked before the template is
rendered, so that they match no token, and a normalizer removes the marks afterwards.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from shardwise.writing.json_text import json_text

MARK = "\ufdd0\ufdd1"
"""Two code points that are no characters, and in no text."""


def control_pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of `tokens`, the longest first."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def text_backend(backend: Backend) -> Backend:
    """Return a copy that parses no control token."""
    copy = Backend.from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy


def marked_backend(backend: Backend) -> Backend:
    """Return a copy that parses control tokens, and removes marks from the text between them."""
    record = json.loads(backend.to_str())
    remove = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
    own = [record["normalizer"]] if record["normalizer"] else []
    record["normalizer"] = {"type": "Sequence", "normalizers": [remove, *own]}
    for token in record["added_tokens"]:
        if token["special"]:
            token["normalized"] = False  # match before marks are removed
    return Backend.from_str(json_text(record))


def mark(value: Any, tokens: Collection[str], pattern: re.Pattern[str]) -> Any:
    """Return a message, or a part of one, with marks inside the control tokens of its texts, and
    after the beginning of one at the end of a text."""
    if isinstance(value, str):
        marked = pattern.sub(lambda found: MARK.join(found[0]) + MARK, value)
        return marked + MARK if ends_in_beginning(value, tokens) else marked
    if isinstance(value, Mapping):
        return {key: mark(each, tokens, pattern) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [mark(each, tokens, pattern) for each in value]
    return value


def ends_in_beginning(text: str, tokens: Collection[str]) -> bool:
    return any(text.endswith(token[:length]) for token in tokens for length in range(1, len(token)))


def count_controls(value: Any, pattern: re.Pattern[str]) -> int:
    """Return how many control tokens are spelled out in a text, or in the texts of messages."""
    if isinstance(value, str):
        return sum(1 for _ in pattern.finditer(value))
    if isinstance(value, Mapping):
        return sum(count_controls(each, pattern) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(count_controls(each, pattern) for each in value)
    return 0
