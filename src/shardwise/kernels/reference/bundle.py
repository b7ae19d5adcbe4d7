"""The reference kernels, in torch's own operations: one bundle for serving, one for training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import Attention, Heads, Kernels, Span, TrainingKernels, Turns
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.batch_invariant import head_of, row_weights
from shardwise.kernels.reference.cross_entropy import softmax_less_one_
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.logprobs import log_probabilities
from shardwise.kernels.reference.norm import rms_norm
from shardwise.kernels.reference.paged_attention import (
    PagedBatch,
    attention_sizes,
    paged_attention,
    paged_batch,
)
from shardwise.kernels.reference.rotary import rotate
from shardwise.kernels.reference.sampling import choose_each


@dataclass(frozen=True)
class TorchAttention:
    """Plain torch: pages are gathered."""

    heads: Heads
    sizes: tuple[int, ...]
    reads_tables: bool = False

    @classmethod
    def of(cls, heads: Heads) -> "TorchAttention":
        return cls(heads, attention_sizes(heads.head_dim, heads.dtype, heads.device))

    def batch(self, spans: Sequence[Span]) -> PagedBatch:
        heads = self.heads
        return paged_batch(
            spans, heads.group, heads.page_tokens, heads.windows, self.sizes, heads.device
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turns: Turns | None,
        pages: KVPages,
        batch: PagedBatch,
        window: int | None,
    ) -> Tensor:
        if turns is not None:
            q = rotate(q, *turns)
            k = rotate(k, *turns)
        pages.keys.write(batch.slots, k)
        pages.values.write(batch.slots, v)
        return paged_attention(q, pages, batch, window)


def no_blocks(
    config: ModelConfig, weights: Mapping[str, Any], attention: Attention, pages: Sequence[KVPages]
) -> None:
    """Blocks run one by one."""


TORCH = Kernels(
    name="torch",
    rms_norm=rms_norm,
    gated=gated,
    rotate=rotate,
    attention=TorchAttention.of,
    weights=row_weights,
    head=head_of,
    blocks=no_blocks,
    choose=choose_each,
    log_probabilities=log_probabilities,
)
TRAINING_IN_TORCH = TrainingKernels(
    "torch", rms_norm, gated, rotate, causal_attention, softmax_less_one_
)
