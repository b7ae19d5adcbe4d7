"""The sampler state of one sequence: its random numbers, and how its parameters and tokens modify
the next logits before any filter.

In the order of vLLM, on a row z of logits:

    constraints         z = -inf where the token may not come next (constraints.py, sampler.py)
    logit_bias          z + bias at its ids
    repetition_penalty  z / r where z > 0, else z * r, at tokens of prompt or completion
                        (Keskar et al. 2019)
    frequency_penalty   z - f * occurrences in the completion
    presence_penalty    z - p if the completion has the token

A sequence has few different tokens compared with its vocabulary, so only those are counted and
modified.
"""

import copy
import hashlib
import secrets
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.serve.request import SamplingParams


@dataclass
class Draws:
    """The random numbers of sample `index` of a request: hashes of (seed, index, how many came
    before), so that all 64 bits of a seed count.
    """

    seed: int
    index: int
    num_drawn: int = 0

    @classmethod
    def of(cls, params: SamplingParams, index: int = 0) -> "Draws":
        """Return the draws of a request's seed, or of a random one without."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return cls(seed, index)

    def next(self) -> float:
        """Return a uniform random number in [0, 1), a multiple of 2^-53."""
        place = struct.pack("<qqq", self.seed, self.index, self.num_drawn)
        self.num_drawn += 1
        digest = hashlib.blake2b(place, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SamplerState:
    """Sampling parameters, random numbers and token counts of one sequence.

    It does not depend on pages, so preemption leaves it as it is. Call `add` with each sampled
    token. `index` is which of the request's n samples this is.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = (), index: int = 0) -> None:
        self.params = params
        self.draws = Draws.of(params, index)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._slots: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("f")
        self._counts_tokens = params.frequency_penalty != 0 or params.presence_penalty != 0
        if params.repetition_penalty != 1:
            self._counts_tokens = True
            for token in prompt:
                self._slot_of(token)

    def add(self, token: int) -> None:
        """Count the next token of the completion."""
        if self._counts_tokens:
            self._counts[self._slot_of(token)] += 1

    def fork(self, index: int) -> "SamplerState":
        """Return a copy that continues from here with the random numbers of sample `index`."""
        other = copy.copy(self)
        other.draws = Draws.of(self.params, index)
        other._slots = self._slots.copy()
        other._ids = self._ids[:]
        other._counts = self._counts[:]
        return other

    def uniform(self) -> float:
        """Return the next random number in [0, 1): one per token, so it depends neither on other
        sequences nor on logits.
        """
        return self.draws.next()

    @property
    def changes(self) -> bool:
        """True if `change` modifies the next logits."""
        return bool(self._ids) or len(self._bias_ids) > 0

    def change(self, logits: Tensor) -> None:
        """Modify the next logits [V] (fp32) in place; takes no random number."""
        if len(self._bias_ids):
            logits[self._bias_ids.to(logits.device)] += self._bias.to(logits.device)
        if self._ids:
            ids = torch.from_numpy(np.frombuffer(self._ids, np.int64)).to(logits.device)
            counts = torch.from_numpy(np.frombuffer(self._counts, np.float32)).to(logits.device)
            logits[ids] = self._penalized(logits[ids], counts)

    def _penalized(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the penalized logits of the tokens that were seen, `counts` times each in the
        completion.
        """
        penalty = self.params.repetition_penalty
        if penalty != 1:
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = logits - self.params.frequency_penalty * counts
        return logits - self.params.presence_penalty * (counts > 0)

    def _slot_of(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return slot
