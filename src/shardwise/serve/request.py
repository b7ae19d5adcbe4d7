"""Requests and their outputs. Imports no torch."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json", "json_schema", "regex", "choice", "grammar"]
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, and of when a completion ends.

    Names, ranges and defaults are those of OpenAI and vLLM, except for the range of
    repetition_penalty.

    Attributes:
        temperature: Divides the logits; 0 is greedy decoding.
        top_k: Sample among the k most probable tokens; 0 or -1 is all.
        top_p: Sample among the fewest most probable tokens whose probabilities sum to this.
        min_p: Minimum probability of a token, relative to the most probable token.
        repetition_penalty: Divides positive logits of tokens in the prompt or the completion,
            multiplies negative ones.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the completion.
        presence_penalty: Subtracted from the logit of each token in the completion.
        logit_bias: Added to the logits of these token ids.
        seed: Seed, reproducible regardless of batch composition. None: random.
        n: Completions of the prompt, each with a seed of its own.
        max_tokens: Maximum number of tokens to generate. None: up to the context length.
        min_tokens: Minimum number of tokens; end tokens and stop strings are ignored until then.
        stop: Texts that end the completion. One that is the text of a special token ends it at that
            token.
        stop_token_ids: Token ids that end the completion.
        include_stop_str_in_output: Keep the stop string, or the text of the end token, in the text.
        skip_special_tokens: Leave special tokens out of the text.
        ignore_eos: Treat the model's end tokens like any other token.
        allowed_token_ids: Token ids that may be generated; None: all. A model's end tokens are not
            allowed unless they are among them.
        bad_words: Texts that are not generated: no token completes the tokens of one, at the start
            of a text or after a space.
        logprobs: Most probable tokens to return next to each sampled one, with their
            log-probabilities under the unmodified logits; None returns no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        structure: Constraint on the whole completion: ("json_schema", schema),
            ("regex", pattern), ("choice", JSON list of texts), ("grammar", grammar in Lark or
            GBNF), or ("json", "") for any JSON object.

    Raises ValueError for a value out of range, with the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: tuple[GrammarKind, str] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise ValueError(f"{name} must contain non-empty strings.")
        for name, value, allowed, is_valid in self._rules():
            if not is_valid:
                raise ValueError(f"{name} is {value}, but it must be {allowed}.")

    def _rules(self) -> Iterator[tuple[str, object, str, bool]]:
        """Yield (field, value, what is allowed, whether the value is valid)."""
        for name, low, high in (
            ("frequency_penalty", -2, 2),
            ("presence_penalty", -2, 2),
            ("min_p", 0, 1),
        ):
            value = getattr(self, name)
            yield name, value, f"between {low} and {high}", low <= value <= high
        temperature = self.temperature
        is_valid = math.isfinite(temperature) and temperature >= 0
        yield "temperature", temperature, "0 (greedy) or a positive number", is_valid
        is_valid = self.top_k >= -1 and self.top_k == int(self.top_k)
        yield "top_k", self.top_k, "a whole number, 0 for all tokens", is_valid
        yield "top_p", self.top_p, "above 0 and at most 1 (all tokens)", 0 < self.top_p <= 1
        penalty = self.repetition_penalty  # out of this range, logits overflow
        yield "repetition_penalty", penalty, "from 0.01 to 100", 0.01 <= penalty <= 100
        yield "n", self.n, "at least 1", self.n >= 1
        is_valid = self.seed is None or -(2**63) <= self.seed < 2**63
        yield "seed", self.seed, "a whole number of 64 bits", is_valid
        limit = math.inf if self.max_tokens is None else self.max_tokens
        yield "max_tokens", self.max_tokens, "at least 1", limit >= 1
        allowed = "at least 0" if self.max_tokens is None else f"from 0 to {limit}, the most tokens"
        yield "min_tokens", self.min_tokens, allowed, 0 <= self.min_tokens <= limit
        for name in ("logprobs", "prompt_logprobs"):
            num = getattr(self, name)
            is_valid = num is None or 0 <= num <= MAX_LOGPROBS
            yield name, num, f"from 0 to {MAX_LOGPROBS}", is_valid
        is_valid = self.allowed_token_ids is None or bool(self.allowed_token_ids)
        yield "allowed_token_ids", "empty", "left out, or have a token id", is_valid
        for token, bias in self.logit_bias.items():
            allowed = "between -100 and 100, for a token id of 0 or more"
            yield f"logit_bias of {token}", bias, allowed, abs(bias) <= 100 and token >= 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a field has a token id outside the vocabulary."""
        check_ids("logit_bias", self.logit_bias, vocab_size)
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError if the field `name` has an id outside the vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} must contain token ids from 0 to {vocab_size - 1}, but has {token!s:.30}"
            )


class ContextLengthExceeded(ValueError):
    """A prompt and its completion exceed the context length.

    `param` is the field to change, or None if the prompt itself is too long.
    """

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def check_length(
    num_prompt: int, params: SamplingParams, max_len: int, limit_name: str = "max_tokens"
) -> int:
    """Return `max_tokens` of a request, or what `max_len` leaves after the prompt if it is None.

    Raises ValueError for an empty prompt, and ContextLengthExceeded, with what would work, if
    prompt and completion together exceed `max_len` tokens. `limit_name` is the name under which the
    request has `max_tokens`.
    """
    if num_prompt == 0:
        raise ValueError("the prompt is empty; give it at least one token")
    num_left = max_len - num_prompt
    num_new = max(1, num_left) if params.max_tokens is None else params.max_tokens
    if num_new > num_left:
        works = f"{limit_name}={num_left}" if num_left > 0 else f"a prompt of {max_len - 1} tokens"
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and {limit_name}={num_new} exceed the {max_len} tokens "
            f"that a request may have; {works} works",
            limit_name if num_left > 0 else None,
        )
    if params.min_tokens > num_new:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and min_tokens={params.min_tokens} exceed the {max_len} "
            f"tokens that a request may have; min_tokens={num_new} works",
            "min_tokens",
        )
    return num_new


@dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters, as a client asks for them.

    Attributes:
        tokens: The prompt.
        params: How to sample, and when to stop.
        priority: Lower is served first.
        salt: Requests share the prefix cache only if their salts are equal.
        starts_text: The completion is a text of its own, as a message of a chat; otherwise it
            continues the text of the prompt. SentencePiece vocabularies drop the space before the
            first word of a text.
        request_id: Identifies the request within one engine; whoever submits it assigns it.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    request_id: int = 0
    starts_text: bool = False


@dataclass(frozen=True)
class Logprob:
    """A token with its log-probability, and the most probable tokens at its position with theirs,
    most probable first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """The addition of one step to one completion of a request.

    Attributes:
        request_id: The request.
        index: Which of its n completions.
        text: Text that no later token can change.
        tokens: The sampled tokens.
        logprobs: Their log-probabilities, if requested.
        finish_reason: Set in the last delta of the completion.
        stop_reason: The stop string or stop token id that ended it.
        prompt_logprobs: In the first delta of completion 0, if requested: the log-probabilities
            of the prompt's tokens from the second on.
        num_cached_tokens: In the first delta of completion 0: prompt tokens whose keys and values
            were in the prefix cache.
    """

    request_id: int
    index: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    num_cached_tokens: int = 0


@dataclass
class CompletionOutput:
    """One of the n completions of a request: the sum of its deltas so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass
class RequestOutput:
    """A request and its completions so far.

    `prompt` is None if the prompt was given as token ids; `prompt_logprobs` begin with its second
    token.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprob] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def empty(cls, request: Request, prompt: str | None = None) -> "RequestOutput":
        """Return the output of a request before its first delta."""
        outputs = [CompletionOutput(index) for index in range(request.params.n)]
        return cls(request.request_id, prompt, list(request.tokens), outputs)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def add(self, delta: Delta) -> None:
        self.outputs[delta.index].add(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
