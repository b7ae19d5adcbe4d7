"""Structured output: which tokens an answer may go on with, if all of it is to follow a JSON schema
or a regex.

The grammar is followed by llguidance (Earley parser and lazy automata over bytes, MIT licence, no
dependencies), which works without Python's lock: a schema is compiled on a thread of its own while
other requests go on.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.request import Form

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \n\t\r]{1,40}"
"""Between the parts of JSON: enough to indent by, and an end to it, for a model that would go on
for ever."""


class Structure:
    """Where one answer stands in its grammar; `add` takes each token that was chosen."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits: Tensor | None = None

    def allowed(self) -> Tensor:
        """The tokens that may come next, as bits [ceil(V / 32)] (int32, the lowest bit first).

        Once no text may follow they are the end tokens. There are none after a token that was not
        allowed, or where the grammar has become too complex: the sampler ends such a request alone.
        """
        if self._bits is None:
            num_words = -(-self._vocab_size // 32)
            self._bits = torch.frombuffer(
                bytearray(self._matcher.compute_bitmask()), dtype=torch.int32
            )[:num_words]
            if self._matcher.is_error():
                self._bits = torch.zeros(num_words, dtype=torch.int32)
        return self._bits

    def add(self, token: int) -> None:
        """The next token of the answer."""
        self._bits = None
        self._matcher.consume_token(token)

    def fork(self) -> "Structure":
        """Another answer that goes on from here."""
        return Structure(self._matcher.deep_copy(), self._vocab_size)


class Structures:
    """Compiles what requests ask for, one after another on a thread beside the engine's.

    Making the first takes a third of a second more, in which the vocabulary is read. Raises
    ValueError if the extra is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError:
            raise ValueError(
                "structured output needs an extra: pip install 'shardwise[structured]'"
            ) from None
        self._library = llguidance
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "structure")

    def compile(self, form: Form, text: str = "") -> "Future[Structure]":
        """The structure at its start, in a while. `text` is the schema or the regex; "json" is any
        JSON object.

        The future holds a ValueError with a sentence if the text cannot be used.
        """
        return self._thread.submit(self._compile, form, text)

    def close(self) -> None:
        """Let go of the thread; what waits for it is not compiled."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, form: Form, text: str) -> Structure:
        matcher = self._library.LLMatcher
        try:
            if form == "regex":
                grammar = matcher.grammar_from_regex(text)
            else:
                schema = '{"type": "object"}' if form == "json" else text
                grammar = matcher.grammar_from_json_schema(
                    schema, overrides={"whitespace_pattern": WHITESPACE}
                )
        except ValueError as error:
            raise ValueError(f"the {form} cannot be used: {_first_line(error)}") from error
        found = matcher(self._vocabulary, grammar, log_level=0)
        if found.is_error():
            raise ValueError(f"the {form} cannot be used: {_first_line(found.get_error())}")
        structure = Structure(found, self._vocab_size)
        if (
            not structure.allowed().any()
        ):  # the first takes longest, so here and not between the steps of others
            raise ValueError(f"the {form} cannot be used: no text follows it")
        return structure

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        ends = sorted(self._tokenizer.eos_ids)
        return self._library.LLTokenizer(
            self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=ends
        )


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0]
