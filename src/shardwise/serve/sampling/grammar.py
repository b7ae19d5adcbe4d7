"""Structured output: the tokens that a completion may continue with, if all of it must follow a
JSON schema or a regular expression.

The grammar is matched by llguidance (Earley parser and lazy automata over bytes, MIT licence, no
dependencies), which releases Python's lock: grammars are compiled on threads while requests run.
Its own limits bound the work per byte of a grammar, and `MAX_BYTES` the bytes.
"""

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.request import GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \n\t\r]{1,40}"
"""Whitespace between the parts of JSON: enough for indentation, but bounded, since a model could
otherwise generate it for ever."""

MAX_BYTES = 1 << 18
"""The size of a grammar: one that takes most of a second to compile."""
SMALL_BYTES = 1 << 14
"""The size up to which grammars have threads of their own, and so wait for no large one."""
NUM_THREADS = 3
LIMIT_S = 15.0
"""Seconds that a request waits for its grammar."""


class GrammarState:
    """State of one completion in its grammar; call `add` with each sampled token."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits: Tensor | None = None

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, as bits [ceil(V / 32)] (int32, lowest bit first).

        Once the text is complete they are the end tokens. No token is allowed after a token that
        was not, or where the grammar has become too complex: the sampler ends such a request alone.
        """
        if self._bits is None:
            num_words = -(-self._vocab_size // 32)
            bitmask = bytearray(self._matcher.compute_bitmask())
            self._bits = torch.frombuffer(bitmask, dtype=torch.int32)[:num_words]
            if self._matcher.is_error():
                self._bits = torch.zeros(num_words, dtype=torch.int32)
        return self._bits

    @property
    def is_complete(self) -> bool:
        """True if the text so far follows the grammar and may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def has_failed(self) -> bool:
        """True after a token that was not allowed, or where the grammar is too complex."""
        return bool(self._matcher.is_error())

    def add(self, token: int) -> None:
        """Consume the next token of the completion."""
        self._bits = None
        self._matcher.consume_token(token)

    def fork(self) -> "GrammarState":
        """Return a copy that continues from here."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles grammars on threads next to the engine's, large ones one after another.

    Making the first takes a third of a second more, to read the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._small = ThreadPoolExecutor(NUM_THREADS, "small grammars")
        self._large = ThreadPoolExecutor(1, "large grammars")

    def compile(self, kind: GrammarKind, text: str = "") -> "Future[GrammarState]":
        """Return a future of the grammar's initial state.

        `text` is what `SamplingParams.structure` has; "json" is any JSON object. The future holds a
        ValueError if the text cannot be used. Raises ValueError for a text that is too large.
        """
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > MAX_BYTES:
            raise ValueError(f"the {kind} has {num_bytes:,} bytes, but the limit is {MAX_BYTES:,}")
        threads = self._small if num_bytes <= SMALL_BYTES else self._large
        return threads.submit(self._compile, kind, text)

    def close(self) -> None:
        """End the threads; grammars that wait are not compiled."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=True, cancel_futures=True)

    def _compile(self, kind: GrammarKind, text: str) -> GrammarState:
        try:
            grammar = self._translate(kind, text)
        except ValueError as error:
            raise ValueError(f"the {kind} cannot be used: {_first_line(error)}") from error
        compiled = self._library.LLMatcher(self._vocabulary, grammar, log_level=0)
        if compiled.is_error():
            raise ValueError(f"the {kind} cannot be used: {_first_line(compiled.get_error())}")
        state = GrammarState(compiled, self._vocab_size)
        # the first mask takes longest: compute it here and not between the steps of others
        if not state.allowed().any():
            raise ValueError(f"the {kind} cannot be used: no text follows it")
        return state

    def _translate(self, kind: GrammarKind, text: str) -> str:
        """Return the grammar in the format of the library. Raises ValueError for wrong syntax."""
        matcher = self._library.LLMatcher
        match kind:
            case "regex":
                return str(matcher.grammar_from_regex(text))
            case "choice":
                return str(matcher.grammar_from_regex("|".join(map(re.escape, json.loads(text)))))
            case "grammar":
                return str(self._library.grammar_from("grammar", text))
        return str(
            matcher.grammar_from_json_schema(
                '{"type": "object"}' if kind == "json" else text,
                overrides={"whitespace_pattern": WHITESPACE},
            )
        )

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        eos_ids = sorted(self._tokenizer.eos_ids)
        return self._library.LLTokenizer(
            self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=eos_ids
        )


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0]
