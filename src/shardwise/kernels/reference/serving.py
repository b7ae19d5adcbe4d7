"""The reference kernels of serving, in torch operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.reference.batch_invariant import head_of, row_weights
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.logprobs import log_probabilities
from shardwise.kernels.reference.norm import rms_norm
from shardwise.kernels.reference.paged_attention import (
    PagedBatch,
    attention_sizes,
    paged_attention,
    paged_batch,
)
from shardwise.kernels.reference.rope import apply_rope
from shardwise.kernels.reference.sampling import sample_rows
from shardwise.kernels.serving_interface import AttentionShape, PagedAttention, ServingKernels


@dataclass(frozen=True)
class ReferenceAttention:
    """Paged attention in torch operations. It copies the pages of each sequence together."""

    shape: AttentionShape
    row_sizes: tuple[int, ...]
    is_capturable: bool = False

    @classmethod
    def of(cls, shape: AttentionShape) -> "ReferenceAttention":
        return cls(shape, attention_sizes(shape.head_dim, shape.dtype, shape.device))

    def batch(self, spans: Sequence[TokenSpan]) -> PagedBatch:
        shape = self.shape
        return paged_batch(
            spans, shape.group, shape.page_tokens, shape.windows, self.row_sizes, shape.device
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTables | None,
        pages: KVPages,
        batch: PagedBatch,
        window: int | None,
    ) -> Tensor:
        if rope is not None:
            q = apply_rope(q, *rope)
            k = apply_rope(k, *rope)
        pages.keys.write(batch.slots, k)
        pages.values.write(batch.slots, v)
        return paged_attention(q, pages, batch, window)


def no_decoder(
    config: ModelConfig,
    weights: Mapping[str, Any],
    attention: PagedAttention,
    pages: Sequence[KVPages],
) -> None:
    """Return None: the model runs its blocks one by one."""


REFERENCE = ServingKernels(
    name="torch",
    multiplies_codes=False,
    rms_norm=rms_norm,
    gated=gated,
    apply_rope=apply_rope,
    paged_attention=ReferenceAttention.of,
    pack_weights=row_weights,
    pack_head=head_of,
    decoder_blocks=no_decoder,
    sample=sample_rows,
    log_probabilities=log_probabilities,
)
