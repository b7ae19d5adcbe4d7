"""Types of the operations of serving: paged attention, packed weights, sampling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import ModelKernels, RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.page_table import TokenSpan
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.weight import QuantizedWeight


@dataclass(frozen=True)
class AttentionShape:
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


class PagedAttention(Protocol):
    """Attention over the paged KV cache of one model."""

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Numbers of query rows per tile at which a row has the same bits."""
        ...

    @property
    def is_capturable(self) -> bool:
        """True if a batch is tensors of fixed shape on the device (`triton/batch.py`), so that a
        CUDA graph can capture a step and replay it."""
        ...

    def batch(self, spans: Sequence[TokenSpan]) -> Any:
        """Return the metadata of a step, which all layers share."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTables | None,
        pages: KVPages,
        batch: Any,
        window: int | None,
    ) -> Tensor:
        """Apply RoPE to q [N, H, C] and k [N, K, C] unless `rope` is None, write k and v [N, K, C]
        into the pages, and return the attention output [N, H, C]."""
        ...


class DecoderBlocks(Protocol):
    """All blocks of a decoder in one call."""

    def run(self, x: Tensor, rope: RopeTables, batch: Any) -> Tensor:
        """x [N, D] -> [N, D]; may write to x."""
        ...


class SamplingRow(NamedTuple):
    """Sampling parameters of one row of logits.

    Attributes:
        temperature: 0 is greedy: the largest logit, and of equal ones the lowest id.
        min_p: Drops tokens below this share of the largest probability.
        top_k: Keeps that many of the most probable tokens; 0 keeps all.
        top_p: Keeps the most probable tokens that add up to this probability.
        uniform: A random number in [0, 1), for a draw from the inverse CDF in the order of ids.
    """

    temperature: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.0


TokenLogprobs = tuple[list[list[int]], list[list[float]]]
"""Ids and log-probabilities of the token of each row and of the most probable tokens."""


@dataclass(frozen=True)
class ServingKernels(ModelKernels):
    """Operations of serving.

    Attributes:
        multiplies_codes: Products run on 8- and 4-bit codes; otherwise quantized weights are
            dequantized for every product.
        paged_attention: Makes the attention for a shape.
        pack_weights: Packs the weights of a model for its products and removes them from the dict.
        pack_head: (weight [V, D], dtype) -> the output projection, and the embedding table if the
            two are tied.
        decoder_blocks: (config, weights, attention, pages) -> all blocks in one call, or None where
            the model runs them one by one.
        sample: (rows of logits, parameters) -> one token per row; None where a row has no finite
            logit to choose.
        log_probabilities: (rows of logits, tokens, number of most probable tokens).
    """

    multiplies_codes: bool
    paged_attention: Callable[[AttentionShape], PagedAttention]
    pack_weights: Callable[[dict[str, Tensor | QuantizedWeight]], Any]
    pack_head: Callable[[Tensor | QuantizedWeight, torch.dtype], tuple[Any, Any]]
    decoder_blocks: Callable[
        [ModelConfig, Mapping[str, Any], PagedAttention, Sequence[KVPages]], DecoderBlocks | None
    ]
    sample: Callable[[Sequence[Tensor], Sequence[SamplingRow]], list[int | None]]
    log_probabilities: Callable[[Sequence[Tensor] | Tensor, Sequence[int], int], TokenLogprobs]
