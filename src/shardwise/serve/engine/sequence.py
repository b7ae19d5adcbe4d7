"""The live state of a sequence, and the batch that a step runs. Imports no torch.

`Sequence.append` alone decides when a sequence ends. As in vLLM, the first of these that holds
after a token:

    an end token of the model (unless ignore_eos)   "stop", stop_reason None
    one of stop_token_ids                           "stop", stop_reason is that id
    a special token that is a stop string           "stop", stop_reason is that text
    a stop string is complete                       "stop", stop_reason is that text
    max_tokens                                      "length"

Before min_tokens tokens, these tokens are masked unless nothing else may follow (constraints.py),
as after a complete grammar; an end token of the model ends the sequence then too. A stop string
counts only if a later token completes it. The returned tokens and log-probabilities
are all that were generated, including the end token and the tokens of a stop string. The text has
neither, unless `include_stop_str_in_output` asks for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwise.serve.request import Delta, FinishReason, Logprob, Request

if TYPE_CHECKING:
    from shardwise.serve.sampling.constraints import Constraints
    from shardwise.serve.sampling.detokenize import Detokenizer
    from shardwise.serve.sampling.penalties import SamplerState


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request, from its prompt to its last token.

    The n samples of a request share its prompt: until that has been computed, only the first is
    scheduled, and the others are its `siblings`. Then they fork: each is scheduled on its own, with
    the same pages so far.

    Attributes:
        id: Order of arrival; the n samples of a request have consecutive ids.
        request: What the client asked.
        max_tokens: Tokens to generate at most, resolved against the context length.
        end_tokens: The stop_reason of each token that ends the sequence; None for end tokens of
            the model.
        sampler: Random numbers and penalties.
        constraints: Which tokens may come next.
        detokenizer: Text so far, and stop strings.
        index: Which of the n samples of the request.
        siblings: The other samples, until the prompt has been computed.
        tokens: The prompt and the generated tokens.
        order: Scheduling order, lowest first: (priority, id).
        num_prompt: Tokens of the prompt.
        pages: Page table. Empty unless the sequence is running.
        num_computed: Leading tokens whose keys and values are in `pages`.
        num_ever_computed: The most that `num_computed` has been; preemption resets the latter.
        num_cached_tokens: Prompt tokens that were in the prefix cache at the first admission.
        prompt_logprobs: Log-probabilities of the prompt's tokens, by position.
        finish_reason: Why the sequence has ended; None while it runs.
        stop_reason: The stop string or stop token id that ended it.
    """

    id: int
    request: Request
    max_tokens: int
    end_tokens: Mapping[int, str | int | None]
    sampler: "SamplerState"
    constraints: "Constraints"
    detokenizer: "Detokenizer"
    index: int = 0
    siblings: tuple["Sequence", ...] = ()
    tokens: list[int] = field(init=False)
    order: tuple[int, int] = field(init=False)
    num_prompt: int = field(init=False)
    pages: list[int] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    num_ever_computed: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: str | int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.order = (self.request.priority, self.id)
        self.num_prompt = len(self.tokens)

    # -- what the scheduler reads

    @property
    def samples(self) -> tuple["Sequence", ...]:
        """All n samples until they fork, then the sequence alone."""
        return (self, *self.siblings)

    @property
    def num_samples(self) -> int:
        return 1 + len(self.siblings)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Most probable tokens to return for each prompt token; None after the prompt."""
        return self.request.params.prompt_logprobs if self.num_generated == 0 else None

    @property
    def num_tokens_left(self) -> int:
        """Tokens that are still to be computed at most."""
        return self.num_pending + self.num_samples * (self.max_tokens - self.num_generated - 1)

    # -- generation

    def append(self, token: int | None, logprob: Logprob | None = None) -> Delta:
        """Append a sampled token and decide whether it ends the sequence.

        None means that no token could be sampled, which ends the sequence: `end_reason` of its
        constraints says why.
        """
        is_first = self.index == 0 and self.num_generated == 0
        if token is None:
            delta = self.end(self.constraints.end_reason())
        else:
            delta = self._extend(token, logprob)
        if not is_first:
            return delta
        prompt_logprobs = None
        if self.request.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(self.prompt_logprobs[at] for at in sorted(self.prompt_logprobs))
        return replace(
            delta, prompt_logprobs=prompt_logprobs, num_cached_tokens=self.num_cached_tokens
        )

    def _extend(self, token: int, logprob: Logprob | None) -> Delta:
        assert self.finish_reason is None, "the sequence has ended"
        self.tokens.append(token)
        self.sampler.add(token)
        self.constraints.add(token)
        may_stop = self.num_generated > self.request.params.min_tokens
        text = ""
        if token in self.end_tokens and (may_stop or self.end_tokens[token] is None):
            self.finish_reason = "stop"
            self.stop_reason = self.end_tokens[token]
            if self.request.params.include_stop_str_in_output:
                text = self._end_text(token)
        else:
            text = self.detokenizer.add(token, may_stop)
            if self.num_generated >= self.max_tokens and not self.detokenizer.stopped:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self.detokenizer.flush(may_stop)
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
            self.stop_reason = self.detokenizer.stopped_by
        return self._delta(text, (token,), () if logprob is None else (logprob,))

    def _end_text(self, token: int) -> str:
        """Return the text of the token that ends the sequence."""
        if isinstance(self.stop_reason, str):  # also where special tokens are skipped
            return self.detokenizer.flush(may_stop=False) + self.stop_reason
        return self.detokenizer.add(token, may_stop=False)

    def end(self, reason: FinishReason) -> Delta:
        """End the sequence early; the delta has the text that was held back."""
        assert self.finish_reason is None, "the sequence has ended"
        self.finish_reason = reason
        return self._delta(self.detokenizer.flush(may_stop=False))

    def _delta(
        self, text: str, tokens: tuple[int, ...] = (), logprobs: tuple[Logprob, ...] = ()
    ) -> Delta:
        return Delta(
            self.request.request_id,
            self.index,
            text,
            tokens,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """The next tokens of one sequence, at positions `start`, `start + 1`, ...

    Attributes:
        id: The sequence.
        tokens: The tokens to compute: one for a decode, several for a chunk of a prompt.
        start: Position of the first.
        pages: Page table, long enough for all positions; position p is in pages[p // page_tokens].
        num_samples: Tokens to sample after the last of `tokens`: 0 within a prompt, 1 at its end
            or in a decode, n where n samples fork.
        num_prompt_logprobs: How many most probable tokens to return with the log-probability of
            each token; None for no log-probabilities. A token's log-probability follows from the
            token before it, so the first of `tokens` has none; entries of one prompt overlap by a
            token, so that together they leave out only the first token of the prompt.
    """

    id: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    num_samples: int
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step; rank 0 broadcasts it to the other tensor ranks.

    Attributes:
        entries: Those of a single token come first.
        copies: Pages to copy before the entries are computed, as (source, target): in this order,
            or all read before any is written.
    """

    entries: tuple[BatchEntry, ...]
    copies: tuple[tuple[int, int], ...]
