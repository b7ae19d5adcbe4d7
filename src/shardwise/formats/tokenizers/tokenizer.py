"""`Tokenizer`: text to token ids and back, and the prompt for a conversation.

The package `tokenizers` does the work. Where models store what it needs is in
`folder_tokenizer.py` and `gguf/gguf_tokenizer.py`. File formats:
https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from shardwise.formats.config_files import read_optional_json, write_json
from shardwise.formats.tokenizers.bpe import CHAR_TO_BYTE
from shardwise.formats.tokenizers.chat_content import takes_parts, with_parts, with_text
from shardwise.formats.tokenizers.control_tokens import (
    MARK,
    control_pattern,
    count_controls,
    mark,
    marked_backend,
    text_backend,
)
from shardwise.formats.tokenizers.template_process import TemplateProcesses

PROBES = ("", " ", "a", "Hello, world!\n\t 123", "é→漢字\u0301😀\0", "a" * 100)
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
TEMPLATE_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_NAMES}
)
"""Names in chat templates that have a meaning for all models."""


@contextmanager
def backend_errors(source: str) -> Iterator[None]:
    """Turn faults of the package `tokenizers`, panics of Rust included, into a ValueError that
    begins with `source`."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(f"{source}: {str(error)[:500]}") from error
        raise


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Converts text to token ids and back, and renders conversations with the chat template.

    Attributes:
        backend: the pipeline of the package `tokenizers`.
        special: the texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, as far as the
            model has them.
        eos_ids: all ids that end a completion; a chat model often has several.
        chat_template: Jinja source, or None.
    """

    backend: Backend
    special: Mapping[str, str]
    eos_ids: frozenset[int]
    chat_template: str | None = None

    def encode(
        self, text: str, special_tokens: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of `text`. Special tokens spelled out in it, as in chat prompts, get their
        own ids; without `parse_special` they are text like any other.

        `special_tokens=True` also adds what the model expects around every text, such as a BOS.
        """
        return self.encode_batch([text], special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]:
        """Encode many texts at once, on all cores."""
        if parse_special or not any(map(self.count_special, texts)):
            return _encode(self.backend, texts, special_tokens)
        return _encode(self._text_backend, texts, special_tokens)

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode conversations whose messages went through `mark_special`: only the special tokens
        of the chat template get their own ids."""
        is_marked = any(MARK in text for text in texts)
        return _encode(self._marked_backend if is_marked else self.backend, texts, False)

    def mark_special(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages in which special tokens are marked as text, for `encode_marked`."""
        marked: list[Mapping[str, Any]] = mark(messages, self._special_texts, self._special_pattern)
        return marked

    def count_special(self, content: Any) -> int:
        """Return how many special tokens are spelled out in a text, or in messages."""
        return count_controls(content, self._special_pattern)

    @cached_property
    def _special_texts(self) -> list[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return control_pattern(self._special_texts)

    @cached_property
    def _text_backend(self) -> Backend:
        return text_backend(self.backend)

    @cached_property
    def _marked_backend(self) -> Backend:
        return marked_backend(self.backend)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        with backend_errors("the tokenizer cannot decode these tokens"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def offsets(self, text: str, special_tokens: bool = False) -> list[int]:
        """Return where each id of `encode` begins in `text`, in characters."""
        with backend_errors("the tokenizer cannot encode this text"):
            encoding = self.backend.encode(text, add_special_tokens=special_tokens)
        return [start for start, _ in encoding.offsets]

    def num_added(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return how many ids `encode(..., special_tokens=True)` put before and after a text."""
        added = self.encode("", special_tokens=True)
        num_before = 0
        while num_before < len(added) and added[num_before] == ids[num_before]:
            num_before += 1
        return num_before, len(added) - num_before

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of embedding rows that this tokenizer can index."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, or None."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, and separates documents in training data; or None."""
        return self._special_id("eos_token")

    @property
    def ordered_eos_ids(self) -> list[int]:
        """All ids that end a completion, `eos_id` first."""
        return sorted(self.eos_ids, key=lambda index: (index != self.eos_id, index))

    def _special_id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """True if a token stands for the same bytes in any context, as `token_bytes` needs."""
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes of one token of a byte-level tokenizer; they may be partial UTF-8."""
        assert self.is_byte_level
        token = self.backend.id_to_token(index) or ""
        try:
            return bytes(CHAR_TO_BYTE[char] for char in token)
        except KeyError:  # an added token, stored as text rather than as bytes
            return token.encode()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation of `{"role": ..., "content": ...}` messages as a prompt, special
        tokens spelled out.

        A content is a text or a list of text parts, whichever the template takes. With
        `add_generation_prompt` the prompt ends where the assistant's reply begins. `variables` are
        further names that the template may use.

        Encode it with `special_tokens=False`, since the template already contains them. Raises
        ValueError if the model has no chat template, if the template rejects the messages, and if
        it reaches a limit of `template_process.py`.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: give it plain text to continue, not messages"
            )
        convert = with_parts if self._takes_parts else with_text
        return self._render([convert(each) for each in messages], add_generation_prompt, variables)

    @cached_property
    def _takes_parts(self) -> bool:
        return takes_parts(self._render)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        assert self.chat_template is not None
        names = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special,
        }
        return self._templates.render(self.chat_template, {**(variables or {}), **names})

    @cached_property
    def _templates(self) -> TemplateProcesses:
        return TemplateProcesses()

    def save(self, folder: str | Path) -> None:
        """Write files from which `transformers.AutoTokenizer` and `load_tokenizer` read the same
        ids.

        The files are tokenizer.json, tokenizer_config.json, chat_template.jinja if there is a
        template, and generation_config.json with the end tokens; its other entries are preserved.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special,
        }
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        ends = self.ordered_eos_ids
        generation = read_optional_json(folder / "generation_config.json")
        if self.bos_id is not None:
            generation["bos_token_id"] = self.bos_id
        if ends:
            generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        if generation:
            write_json(folder / "generation_config.json", generation)


def _encode(backend: Backend, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
    with backend_errors("the tokenizer cannot encode this text"):
        try:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        except TypeError as error:  # raised for strings that UTF-8 cannot encode
            raise ValueError(
                "the text is not valid Unicode: it contains half of a surrogate pair"
            ) from error
    return [encoding.ids for encoding in encodings]


def check_usable(tokenizer: Tokenizer) -> None:
    """Encode and decode a few texts and tokens, within `backend_errors`. Raises ValueError for a
    pipeline that makes ids which no token has."""
    for text in PROBES:
        try:
            ids = tokenizer.backend.encode(text).ids
        except Exception:  # a vocabulary without an unknown token; such a text is refused later
            continue
        if max(ids, default=-1) >= tokenizer.vocab_size:
            raise ValueError(f"its pipeline makes the id {max(ids)}, which no token has")
    step = max(1, tokenizer.vocab_size // 256)
    tokenizer.decode(range(0, tokenizer.vocab_size, step), skip_special=False)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has ids, those of end tokens included, without a row in an
    embedding of `vocab_size` rows.

    More rows than ids is common and fine: vocabularies are padded to a multiple that devices like.
    """
    last = tokenizer.vocab_size - 1
    if last >= vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {last}, but the model's vocabulary has only {vocab_size} "
            f"rows, none for {tokenizer.backend.id_to_token(last)!r:.60}; use the tokenizer that "
            "the model was trained with"
        )
    last_end = max(tokenizer.eos_ids, default=-1)
    if last_end >= vocab_size:
        raise ValueError(
            f"the model's end token has the id {last_end} (eos_token_id), but its vocabulary has "
            f"only {vocab_size} rows"
        )
