"""The tokens that a completion may continue with, where its request leaves out some:

    grammar            structured output: no token that the grammar does not allow
    allowed_token_ids  no token but these
    bad_words          no token that completes one of them
    min_tokens         no end token until the completion has that many tokens, unless nothing else
                       is left, as after a complete grammar

Sets of tokens are bits [ceil(V / 32)] (int32, lowest bit first) over the vocabulary V.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.request import FinishReason, SamplingParams
from shardwise.serve.sampling.grammar import GrammarState


class Constraints:
    """The state of the constraints of one completion. Call `add` with each sampled token.

    `end_ids` are the tokens that end the completion, `bad_words` the token ids of each bad word.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        end_ids: Collection[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._end_bits = token_bits(end_ids, vocab_size) if params.min_tokens and end_ids else None
        self._bad_words = bad_words
        self._grammar = grammar
        self._base: Tensor | None = None
        if params.allowed_token_ids is not None:
            self._base = token_bits(params.allowed_token_ids, vocab_size)
        self._num_tokens = 0
        longest = max((len(word) for word in bad_words), default=1)
        self._recent = deque[int](maxlen=longest - 1)

    @cached_property
    def _all(self) -> Tensor:
        return token_bits(slice(self._vocab_size), self._vocab_size)

    def allowed(self) -> Tensor | None:
        """Return the tokens that may come next, as bits; None: all.

        No bit is set where the constraints exclude each other: the completion cannot continue.
        """
        bans_end = self._end_bits is not None and self._num_tokens < self._params.min_tokens
        bits = self._base
        if self._grammar is not None:
            allowed = self._grammar.allowed()
            bits = allowed if bits is None else bits & allowed
        if not bans_end and not self._bad_words:
            return bits
        if bits is None:
            bits = self._all
        if self._bad_words:
            bits = bits & ~token_bits(self._completing(), self._vocab_size)
        if bans_end:
            assert self._end_bits is not None
            others = bits & ~self._end_bits
            bits = others if others.any() else bits
        return bits

    def _completing(self) -> set[int]:
        """Return the tokens that would complete a bad word."""
        recent = tuple(self._recent)
        return {
            word[-1]
            for word in self._bad_words
            if recent[len(recent) - len(word) + 1 :] == word[:-1]
        }

    def add(self, token: int) -> None:
        """Count the next token of the completion."""
        self._num_tokens += 1
        self._recent.append(token)
        if self._grammar is not None:
            self._grammar.add(token)

    def fork(self) -> "Constraints":
        """Return a copy for another sample. Only before the first token."""
        assert not self._num_tokens
        other = Constraints.__new__(Constraints)
        other.__dict__ |= self.__dict__
        other._recent = self._recent.copy()
        other._grammar = None if self._grammar is None else self._grammar.fork()
        return other

    def end_reason(self) -> FinishReason:
        """Return why a completion ends here for which no token could be sampled.

        "stop" after a complete grammar and "length" within one, if the constraints exclude each
        other; "error" if they do not, so that the logits are at fault, or if the grammar failed.
        """
        allowed = self.allowed()
        if allowed is None or allowed.any():
            return "error"
        if self._grammar is None:
            return "length"
        if self._grammar.has_failed:
            return "error"
        return "stop" if self._grammar.is_complete else "length"


def token_bits(ids: Iterable[int] | slice, vocab_size: int) -> Tensor:
    """Return a set of tokens as bits."""
    members = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    members[ids if isinstance(ids, slice) else list(ids)] = True
    return torch.from_numpy(np.packbits(members, bitorder="little").view(np.int32))


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    found = {tuple(ids) for ids in tokenizer.encode_batch(texts) if ids} if texts else set()
    return tuple(sorted(found))
