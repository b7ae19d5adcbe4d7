"""Incremental detokenization: token ids to text while they are generated. Text is emitted as soon
as no later token can change it, so never with a partial UTF-8 character.

Text is held back in three cases. A token may end inside a UTF-8 character. In SentencePiece
vocabularies, characters without a piece are runs of byte tokens, and one wrong byte makes the whole
run invalid. And the text may be the beginning of a stop string. Only held-back text is stored, so a
token costs the same at any length.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from shardwise.formats.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """The text of one completion, in increments.

    The texts that `add` returns and the last one from `flush` together equal `tokenizer.decode` of
    all ids, up to the first stop string that is completed, or with `include_stop` up to its end;
    where one token completes several, the first in the text counts. Ids that continue a `prompt`
    are decoded behind it: the text of the prompt and that of the completion together are the text
    of all ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        assert all(stop), "an empty stop string would stop at once"
        self.stopped_by: str | None = None
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._text: _Text = (
            _ByteText(tokenizer)
            if tokenizer.is_byte_level
            else _PieceText(tokenizer, context_of(tokenizer, prompt, self._skipped))
        )
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._waiting = ""

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed: `stopped_by`."""
        return self.stopped_by is not None

    def add(self, token_id: int, may_stop: bool = True) -> str:
        """Add the next id; return the text that can be emitted now, which may be empty.

        Without `may_stop`, a stop string that this token completes is text like any other.
        """
        if self.stopped or token_id in self._skipped:
            return ""
        return self._emit(self._text.add(token_id), may_stop, hold=True)

    def flush(self, may_stop: bool = True) -> str:
        """Return the text that was held back, with U+FFFD for a partial character, when no more ids
        come.
        """
        return "" if self.stopped else self._emit(self._text.flush(), may_stop, hold=False)

    def _emit(self, new: str, may_stop: bool, hold: bool) -> str:
        text = self._waiting + new
        if may_stop and (match := _first_stop(text, self._stop, len(self._waiting))):
            start, end = match
            self.stopped_by = text[start:end]
            self._waiting = ""
            return text[: end if self._include_stop else start]
        num_held = _num_held(text, self._stop) if hold else 0
        self._waiting = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _first_stop(text: str, stop: Sequence[str], num_old: int) -> tuple[int, int] | None:
    """Return start and end of the stop string that is completed first; of two that end together,
    the longer.

    Only matches that end after the first `num_old` characters count; those were searched before.
    """
    matches = [
        (start + len(each), start)
        for each in stop
        if (start := text.find(each, max(0, num_old - len(each) + 1))) >= 0
    ]
    if not matches:
        return None
    end, start = min(matches)
    return start, end


def _num_held(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of `text` could be the beginning of a stop string."""
    longest = max((len(each) for each in stop), default=1) - 1
    for num_held in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[len(text) - num_held :]) for each in stop):
            return num_held
    return 0


class _Text(Protocol):
    """Turns ids into text that no later id can change."""

    def add(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteText:
    """Text of byte-level vocabularies: the bytes of the tokens, concatenated, as UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceText:
    """Text of other vocabularies: new ids are decoded after one that was emitted, so that they are
    not taken for the start of the text.

    (The start is special: SentencePiece drops the space that encoding added there.)
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = context
        self._waiting: list[int] = []

    def add(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        self._waiting.append(token_id)
        return "" if is_byte_token(token) else self.flush()

    def flush(self) -> str:
        if not self._waiting:
            return ""
        before = self._tokenizer.decode(self._emitted, skip_special=False)
        whole = self._tokenizer.decode(self._emitted + self._waiting, skip_special=False)
        text = whole[len(before) :]
        self._emitted = self._waiting[-1:]
        self._waiting = []
        return text


def context_of(tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> list[int]:
    """Return the last id of the prompt that has a text of its own, or none.

    Byte tokens are passed over: together with byte tokens of the completion they would be another
    character.
    """
    for token_id in reversed(prompt):
        token = None if token_id in skipped else tokenizer.backend.id_to_token(token_id)
        if token is not None and not is_byte_token(token):
            return [token_id]
    return []


def is_byte_token(token: str) -> bool:
    """Return whether a token is SentencePiece's spelling of one byte, `<0xE2>`."""
    return len(token) == 6 and token.startswith("<0x")
