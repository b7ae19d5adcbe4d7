"""Documents to token ids. Control tokens that are spelled out in a document are text, and those of
a chat template are control tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.train.data.documents import Messages, TextChunk


class DocumentTokenizer(Protocol):
    """The part of a tokenizer that documents need; see `formats/tokenizers/tokenizer.py`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]: ...

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]: ...

    def mark_special(self, messages: Messages) -> list[Mapping[str, Any]]: ...

    def count_special(self, content: Any) -> int: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str: ...

    def save(self, folder: Path) -> object: ...


class DocumentEncoder:
    """Encodes documents; `num_special` control tokens were spelled out in those counted so far.

    With `parse_special` these are parsed as control tokens.
    """

    def __init__(self, tokenizer: DocumentTokenizer, parse_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parse_special = parse_special
        self.num_special = 0

    def render(self, messages: Messages) -> str:
        """Return a conversation as text, and count control tokens in its messages."""
        num_special = self.tokenizer.count_special(messages)
        self.num_special += num_special
        if num_special and not self.parse_special:
            messages = self.tokenizer.mark_special(messages)
        return self.tokenizer.chat(messages, False)

    def count(self, chunks: Sequence[TextChunk]) -> None:
        """Count control tokens in texts; those in messages were counted when they were rendered."""
        for chunk in chunks:
            if not chunk.is_chat:
                self.num_special += self.tokenizer.count_special(chunk.text)

    def encode(self, chunks: Sequence[TextChunk]) -> list[list[int]]:
        """Return the ids of each chunk."""
        texts = [chunk.text for chunk in chunks if not chunk.is_chat]
        chats = [chunk.text for chunk in chunks if chunk.is_chat]
        of_texts = iter(self.tokenizer.encode_batch(texts, parse_special=self.parse_special))
        of_chats = iter(self.tokenizer.encode_marked(chats))
        return [next(of_chats if chunk.is_chat else of_texts) for chunk in chunks]
