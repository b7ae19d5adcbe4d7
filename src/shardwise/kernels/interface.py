"""Interfaces of the kernels: the operations that a model calls, as types.

`registry.py` chooses an implementation; `reference/` defines what each operation computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.kv_cache import KVPages
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.weight import QuantizedWeight


@dataclass(frozen=True)
class ModelKernels:
    """Operations that the model itself calls, in training and in serving.

    rms_norm(x, weight, eps), gated(inner, activation) and rotate(x, cos, sin).
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated: Callable[[Tensor, str], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]


Reduce = Callable[[Tensor], Tensor]
"""Over the ranks that hold the vocabulary's other blocks, in place."""


@dataclass(frozen=True)
class Aims:
    """What each row of logits is to predict, as columns [R, 1]: `at` is the number of the target's
    column, 0 where the target `is_here` not, in another rank's block or, if the row has no target
    (`has_target`), nowhere. Columns from `num_real` on are padding. `highest` and `total` are the
    maximum and the sum over ranks."""

    at: Tensor
    is_here: Tensor
    has_target: Tensor
    num_real: int
    highest: Reduce
    total: Reduce


CausalAttention = Callable[[Tensor, Tensor, Tensor, int | None, Tensor | None], Tensor]
"""A version of `causal_attention`: (q, k, v, window, documents)."""


@dataclass(frozen=True)
class TrainingKernels(ModelKernels):
    """Operations of training. Each saves for its backward what the reference saves
    (plan/activations.py)."""

    attention: CausalAttention
    softmax: Callable[[Tensor, Aims, bool], Tensor]
    """Of the loss: `softmax_less_one_`."""


@dataclass(frozen=True)
class Heads:
    """The shape of a model's attention on one rank: H query heads, K kv heads of C elements; pages
    of P tokens."""

    num_heads: int
    num_kv: int
    head_dim: int
    page_tokens: int
    windows: frozenset[int | None]
    dtype: torch.dtype
    device: torch.device
    kv_dtype: KvDtype = "auto"

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv


Turns = tuple[Tensor, Tensor]
"""Cosine and sine [N, 1, C/2] of the angles by which the tokens of a step are turned."""


@dataclass(frozen=True)
class Span:
    """The tokens of a sequence that a step runs, `num_tokens` from position `start`, and the pages
    of all so far."""

    start: int
    num_tokens: int
    pages: tuple[int, ...]


class Attention(Protocol):
    """Attention over pages for one model."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of query rows that are worked on together, at which rows have the same
        bits."""
        ...

    @property
    def reads_tables(self) -> bool:
        """Whether a batch is tables (`tables.py`), so that a step can be captured once and run
        again."""
        ...

    def batch(self, spans: Sequence[Span]) -> Any:
        """What all layers need to know of a step."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turns: Turns | None,
        pages: KVPages,
        batch: Any,
        window: int | None,
    ) -> Tensor:
        """Turn q [N, H, C] and k [N, K, C], write k and v into the pages, and attend: [N, H, C]."""
        ...


class Blocks(Protocol):
    """All blocks of a decoder at once."""

    def run(self, x: Tensor, turns: Turns, batch: Any) -> Tensor:
        """x [N, D] -> [N, D]; x may be written to."""
        ...


class Draw(NamedTuple):
    """How a row's token is chosen: with temperature 0 it is the largest, of equal ones the lowest
    id."""

    temperature: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    point: float = 0.0
    """In [0, 1): when the probabilities that are left lie end to end by id, the token on whose
    piece it falls."""


Told = tuple[list[list[int]], list[list[float]]]
"""Of each row: the ids of its token and of the most probable ones, and their log-probabilities."""


@dataclass(frozen=True)
class Kernels(ModelKernels):
    """Operations of serving.

    attention(heads): attention over pages. weights(dict): packs the weights of a model for its
    products, and takes them out of the dict. head(weight [V, D], dtype): the output projection, and
    the embedding lookup if they are tied. blocks(config, weights, attention, pages): all blocks of
    a decoder at once, or None where they run one by one. On a CPU: choose(rows, draws) samples a
    token a row, log_probabilities(rows, tokens, num_top).
    """

    attention: Callable[[Heads], Attention]
    weights: Callable[[dict[str, Tensor | QuantizedWeight]], Any]
    head: Callable[[Tensor | QuantizedWeight, torch.dtype], tuple[Any, Any]]
    blocks: Callable[[ModelConfig, Mapping[str, Any], Attention, Sequence[KVPages]], Blocks | None]
    choose: Callable[[Sequence[Tensor], Sequence[Draw]], list[int | None]]
    log_probabilities: Callable[[Sequence[Tensor] | Tensor, Sequence[int], int], Told]
