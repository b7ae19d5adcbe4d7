"""Cutting a long text into pieces that are tokenized one by one, to the ids of the whole text.

A tokenizer may treat the start of a text in its own way (SentencePiece puts a space there), and a
token may reach over any place. So a place is tried before a text is cut there: the text around it
must have the same ids in one piece and in two. Places are looked for between words, where the
regular expressions of byte-level tokenizers split and where pieces of SentencePiece end, and else
after line breaks. A text that cannot be cut is tokenized whole, which takes more memory.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from shardwise.train.data.documents import CHUNK_CHARACTERS, TextChunk

AROUND = 512
"""Characters before and after a place that are tokenized to try it."""
SEARCHED = 1 << 16
"""Characters at the end of a piece in which a place is looked for."""
MOST_TRIES = 16
PLACES = (re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\n)(?=\S)"))
"""Between words, and after line breaks."""

Encode = Callable[[list[TextChunk]], list[list[int]]]


class Cut(NamedTuple):
    """The first piece of a text ends at `end`, the next begins at `start`: one character later
    where the tokenizer itself puts a space before a text."""

    end: int
    start: int


def pieces(
    chunks: Iterable[TextChunk], encode: Encode, piece_characters: int = CHUNK_CHARACTERS
) -> Iterator[TextChunk]:
    """Yield the same documents in pieces whose ids by `encode`, one piece after another, are those
    of the whole document. A piece has about `piece_characters`, if the text can be cut."""
    text = ""
    num_bytes = 0
    num_wanted = piece_characters
    for chunk in chunks:
        text += chunk.text
        num_bytes += chunk.source_bytes
        while len(text) >= num_wanted + AROUND:
            cut = find_cut(chunk._replace(text=text), encode)
            if cut is None:
                num_wanted = 2 * len(text)
                continue
            yield chunk._replace(text=text[: cut.end], ends_document=False, source_bytes=num_bytes)
            text = text[cut.start :]
            num_bytes = 0
            num_wanted = piece_characters
        if chunk.ends_document:
            yield chunk._replace(text=text, source_bytes=num_bytes)
            text = ""
            num_bytes = 0
            num_wanted = piece_characters


def find_cut(chunk: TextChunk, encode: Encode) -> Cut | None:
    """Return a place near the end of a text where it can be cut, or None."""
    text = chunk.text
    end = len(text) - AROUND
    for pattern in PLACES:
        places = [match.start() for match in pattern.finditer(text, max(1, end - SEARCHED), end)]
        for place in reversed(places[-MOST_TRIES:]):
            before = text[max(0, place - AROUND) : place]
            after = text[place : place + AROUND]
            tried = (before + after, before, after, after[1:])
            whole, left, right, spaceless = encode([chunk._replace(text=each) for each in tried])
            if whole == left + right:
                return Cut(place, place)
            if whole == left + spaceless and after.startswith(" "):
                return Cut(place, place + 1)
    return None
