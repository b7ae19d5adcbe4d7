"""What a user asks of a generation, and what comes back."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Form = Literal["json", "json_schema", "regex"]
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends; names, ranges and defaults are OpenAI's and
    vLLM's.

    temperature: 0 always takes the most probable token; otherwise logits are divided by it (1
    leaves them alone). top_k: choose among the k most probable tokens; 0 or -1 means all. top_p:
    choose among the fewest most probable tokens that together have at least this probability.
    min_p: choose among tokens at least this times as probable as the most probable one.
    repetition_penalty: divides positive logits of tokens in prompt or answer by this, multiplies
    negative ones. frequency_penalty: taken from a token's logit once for each time that the answer
    has it. presence_penalty: taken from the logit of a token that the answer has. logit_bias: added
    to the logits of these ids. seed: makes the choice repeatable, whatever else is in the batch. n:
    how many answers to one prompt, each with a seed of its own. max_tokens: how many tokens are
    generated at most; None: as many as there is room for. min_tokens: before that many, no end
    token is chosen and no stop string ends it. stop: texts that end the generation and are not part
    of it; stop_token_ids: ids that do. ignore_eos: the model's own end tokens are tokens like
    others. logprobs: how many of the most probable tokens are told beside the chosen one, with
    their log-probabilities under the logits as they came; None: none, not even that of the chosen.
    prompt_logprobs: the same of the prompt's tokens. structure: what all of the answer must follow:
    a JSON schema or a regex, as text, or any JSON object ("json", "").
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: tuple[Form, str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop must be texts that are not empty.")
        for name, value, says, holds in self._rules():
            if not holds:
                raise ValueError(f"{name} is {value}, but it must be {says}.")

    def _rules(self) -> Iterator[tuple[str, object, str, bool]]:
        """(name, value, what it must be, whether it is)."""
        for name, least, most in (
            ("frequency_penalty", -2, 2),
            ("presence_penalty", -2, 2),
            ("min_p", 0, 1),
        ):
            value = getattr(self, name)
            yield name, value, f"between {least} and {most}", least <= value <= most
        yield (
            "temperature",
            self.temperature,
            "0 (greedy) or a positive number",
            math.isfinite(self.temperature) and self.temperature >= 0,
        )
        top_k = self.top_k
        yield (
            "top_k",
            top_k,
            "a whole number, 0 for all tokens",
            top_k >= -1 and top_k == int(top_k),
        )
        yield "top_p", self.top_p, "above 0 and at most 1 (all tokens)", 0 < self.top_p <= 1
        penalty = self.repetition_penalty
        yield (
            "repetition_penalty",
            penalty,
            "from 0.01 to 100",
            0.01 <= penalty <= 100,
        )  # beyond, logits overflow
        yield "n", self.n, "at least 1", self.n >= 1
        yield (
            "seed",
            self.seed,
            "a whole number of 64 bits",
            self.seed is None or -(2**63) <= self.seed < 2**63,
        )
        yield (
            "max_tokens",
            self.max_tokens,
            "at least 1",
            self.max_tokens is None or self.max_tokens >= 1,
        )
        longest = math.inf if self.max_tokens is None else self.max_tokens
        yield "min_tokens", self.min_tokens, "from 0 to max_tokens", 0 <= self.min_tokens <= longest
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            yield (
                name,
                asked,
                f"from 0 to {MAX_LOGPROBS}",
                asked is None or 0 <= asked <= MAX_LOGPROBS,
            )
        for id, bias in self.logit_bias.items():
            yield (
                f"logit_bias of {id}",
                bias,
                "between -100 and 100, of an id from 0 up",
                abs(bias) <= 100 and id >= 0,
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token is named that the vocabulary does not have."""
        check_ids("logit_bias", self.logit_bias, vocab_size)
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    @property
    def greedy(self) -> bool:
        """Whether chance has no part in it."""
        return self.temperature == 0


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError if the field `name` has an id that is no token's."""
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < vocab_size:
            says = f"{name} must have ids of the vocabulary, from 0 to {vocab_size - 1}, and {id!s:.30} is not"
            raise ValueError(says)


@dataclass(frozen=True)
class Ask:
    """A request as it reaches the engine: a prompt as ids, and what is wanted. Lower `priority`
    goes first; prompts share what was computed of them only under the same `salt`."""

    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True)
class Logprob:
    """A token with its log-probability, and the most probable tokens at its place with theirs,
    likeliest first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one of a request's n answers has got since the last: ids, the text that is certain by
    now, and at the end why it ended. `stopped_by` is the stop string or id that ended it. `prompt`
    comes once, with the first piece of answer 0, if prompt_logprobs were asked for: of the prompt's
    tokens from the second on."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    prompt: tuple[Logprob, ...] | None = None
    num_cached_tokens: int = 0
    """Of the prompt, those whose keys and values were there already."""
