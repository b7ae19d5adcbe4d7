"""What one sequence has said and what it asked for, and how that changes its next logits before any
filter.

In the order in which vLLM applies them, on a row z of logits:

    allowed             z = -inf where a grammar does not go on (structured output)
    min_tokens          z = -inf at the ids that would end the answer, until it has that many tokens
    logit_bias          z + bias at its ids
    repetition_penalty  z / r where z > 0, else z * r, at tokens of prompt or answer (Keskar et al. 2019)
    frequency_penalty   z - f * how often the answer has the token
    presence_penalty    z - p if the answer has the token

A sequence has few different tokens beside its vocabulary, so what is kept and changed is those
alone.
"""

import copy
import hashlib
from array import array
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.serve.request import SamplingParams


class Sampling:
    """One sequence's part in sampling, from its first token to its last: parameters, generator,
    counts of tokens.

    It holds nothing of a page, so preemption leaves it as it is. `add` takes each token that was
    chosen. `index` is which of a request's n answers this is, `end_ids` those that end it (see
    answer.py).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        end_ids: Collection[int] = (),
        index: int = 0,
    ) -> None:
        self.params = params
        self.generator = generator_for(params, index)
        self.num_tokens = 0
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._place: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("f")
        self._counts_tokens = params.frequency_penalty != 0 or params.presence_penalty != 0
        if params.repetition_penalty != 1:
            self._counts_tokens = True
            for token in prompt:
                self._place_of(token)

    def add(self, token: int) -> None:
        """The next token of the answer."""
        self.num_tokens += 1
        if self._counts_tokens:
            self._counts[self._place_of(token)] += 1

    def fork(self, index: int) -> "Sampling":
        """Another answer that goes on from here, by chances of its own."""
        other = copy.copy(self)
        other.generator = generator_for(self.params, index)
        other._place = self._place.copy()
        other._ids = self._ids[:]
        other._counts = self._counts[:]
        return other

    def point(self) -> float:
        """The next random number in [0, 1): one a token, so it depends on nobody else and on no
        logits."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    @property
    def changes(self) -> bool:
        """Whether `change` does anything before the next token."""
        return bool(self._ids) or len(self._bias_ids) > 0 or self._bans

    def change(self, logits: Tensor) -> None:
        """Change this sequence's next logits [V] (fp32) in place; the generator is not touched."""
        if self._bans:
            logits[self._end_ids.to(logits.device)] = -torch.inf
        if len(self._bias_ids):
            logits[self._bias_ids.to(logits.device)] += self._bias.to(logits.device)
        if self._ids:
            ids = torch.from_numpy(np.frombuffer(self._ids, np.int64)).to(logits.device)
            counts = torch.from_numpy(np.frombuffer(self._counts, np.float32)).to(logits.device)
            logits[ids] = self._penalized(logits[ids], counts)

    def _penalized(self, logits: Tensor, counts: Tensor) -> Tensor:
        """The logits of the tokens that were seen, with how often the answer has each."""
        penalty = self.params.repetition_penalty
        if penalty != 1:
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = logits - self.params.frequency_penalty * counts
        return logits - self.params.presence_penalty * (counts > 0)

    @property
    def _bans(self) -> bool:
        return self.num_tokens < self.params.min_tokens and len(self._end_ids) > 0

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return place


def generator_for(params: SamplingParams, index: int = 0) -> torch.Generator:
    """The generator of answer `index`: answer 0 has the request's seed itself, others one drawn
    from (seed, index).

    (seed + index would make answer 1 of one seed the answer 0 of the next.) Without a seed it
    starts anywhere.
    """
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    elif index == 0:
        generator.manual_seed(params.seed)
    else:
        digest = hashlib.blake2b(f"{params.seed} {index}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
    return generator
