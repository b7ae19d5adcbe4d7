"""Context parallel: a long sequence is sharded by tokens, and each rank runs the whole model on its
own tokens. Only attention reads other tokens, so only there do ranks communicate, in one of two
ways:

- a ring (Ring Attention, Liu et al. 2023): keys and values pass around the ring, each hop while
  attention to those of the hop before is computed; the parts are merged by their log-sum-exp, in
  fp32
- an all-to-all (DeepSpeed Ulysses, Jacobs et al. 2023): ranks exchange tokens for heads, so that
  each has some heads of the whole sequence, and exchange back

Attention is causal, so the last chunk of a sequence is the most work. In the ring each rank takes
one chunk from either end (zigzag): of 2c chunks rank r has r and 2c - 1 - r, and at every hop all
ranks have equal work.

Shape letters: B batch, T tokens, H query heads, K kv heads, G = H/K, C head dim, c context ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import CausalAttention
from shardwise.kernels.reference.attention import (
    MaskSpec,
    attend_rectangle,
    attend_rectangle_backward,
    causal_attention,
    fp32_or_wider,
    group_heads,
    heads_first,
    row_delta,
    tokens_first,
    ungroup_heads,
)
from shardwise.layout import Layout
from shardwise.model.batch import MicroBatch
from shardwise.model.layers import Attend, Causal
from shardwise.model.loss import IGNORE_INDEX
from shardwise.parallel.mesh import Axis, Pending
from shardwise.parallel.tensor import Conjugate

# -- tokens of a rank
# --------------------------------------------------------------------------------


def chunks_of(rank: int, layout: Layout) -> tuple[int, ...]:
    """Return the chunks of a sequence that context rank `rank` holds, of `layout.sequence_chunks`,
    in order."""
    return both_ends(rank, layout.cp) if layout.sequence_chunks > layout.cp else (rank,)


def both_ends(rank: int, size: int) -> tuple[int, int]:
    """Return the two chunks of a rank among 2 `size`: one from the beginning, one from the end."""
    return rank, 2 * size - 1 - rank


def local_part(whole: MicroBatch, layout: Layout, rank: int) -> MicroBatch:
    """Return this rank's tokens of a micro-batch, whose sequences are padded so that all ranks have
    equally many. Padding comes last, where no token attends to it, and has no target."""
    chunks = chunks_of(rank, layout)

    def part(x: Tensor, padding: int) -> Tensor:
        parts = padded(x, layout, padding).chunk(layout.sequence_chunks, 1)
        return torch.cat([parts[chunk] for chunk in chunks], 1)

    documents = None if whole.documents is None else part(whole.documents, -1)
    return MicroBatch(
        part(whole.tokens, 0),
        part(whole.targets, IGNORE_INDEX),
        part(whole.positions, 0),
        documents,
    )


def padded(x: Tensor, layout: Layout, padding: int) -> Tensor:
    """Pad x [B, T] with the value `padding` to the length that the layout needs."""
    return F.pad(x, (0, layout.padded_tokens(x.shape[1]) - x.shape[1]), value=padding)


def make_attend(
    config: ModelConfig,
    layout: Layout,
    axis: Axis,
    documents: Tensor | None,
    attention: CausalAttention = causal_attention,
) -> Attend:
    """Return the attention of this rank's tokens to their whole sequences.

    `documents` [B, T] are the document ids of the whole sequences, or None. `attention` runs on
    ranks that have whole sequences (of all or some heads); a ring has its own.
    """
    if documents is not None:
        documents = padded(documents, layout, -1)
    if axis.size == 1:
        return Causal(config, attention, documents)
    if layout.all_to_all:
        return AllToAll(config, axis, documents, attention)
    return Ring(config, axis, documents)


# -- the ring
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Ring attention: called with q [B, T/c, H, C] and k, v [B, T/c, K, C] of this rank's two
    chunks."""

    config: ModelConfig
    axis: Axis
    documents: Tensor | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = Pairs(self.axis, self.config.window(layer), self.documents)
        y: Tensor = RingAttention.apply(q, k, v, pairs)
        return y


@dataclass(frozen=True)
class Pairs:
    """The pairs of a chunk of queries and a chunk of keys whose scores are not all masked."""

    axis: Axis
    window: int | None
    documents: Tensor | None

    def of(self, source: int, num_tokens: int) -> Iterator[tuple[slice, slice, MaskSpec]]:
        """Yield (rows of queries, columns of keys, mask) for the keys of rank `source`, as slices
        of the `num_tokens` tokens of each rank. A query's own chunk comes first, so that no row is
        empty when another part is merged into it."""
        size = num_tokens // 2
        num_ranks = self.axis.size
        for i, row in enumerate(both_ends(self.axis.rank, num_ranks)):
            for j, column in reversed(tuple(enumerate(both_ends(source, num_ranks)))):
                behind = (row - column) * size
                if behind >= 0 and (self.window is None or behind - size + 1 < self.window):
                    documents = (self.documents_of(row, size), self.documents_of(column, size))
                    yield chunk(i, size), chunk(j, size), MaskSpec(behind, self.window, *documents)

    def documents_of(self, index: int, size: int) -> Tensor | None:
        return None if self.documents is None else self.documents[:, chunk(index, size)]


def chunk(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


class RingAttention(torch.autograd.Function):
    """Ring attention with its backward. Inside, queries are [B, K, G, T/c, C], and keys and values
    are one tensor [2, B, K, T/c, C]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> Tensor:
        queries = group_heads(q, k.shape[2])
        kv = torch.stack((heads_first(k), heads_first(v)))
        out = torch.zeros_like(queries, dtype=fp32_or_wider(q))
        lse = torch.full_like(out[..., :1], torch.finfo(out.dtype).min)
        for source, (keys, values) in going_round(kv, pairs.axis):
            for rows, columns, spec in pairs.of(source, q.shape[1]):
                part_lse = torch.empty_like(lse[:, :, :, rows])
                part = attend_rectangle(
                    queries[:, :, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    spec,
                    part_lse,
                )
                merge(out[:, :, :, rows], lse[:, :, :, rows], part, part_lse)
        y = ungroup_heads(out.to(q.dtype)).contiguous()
        ctx.save_for_backward(queries, kv, y, lse)
        ctx.pairs = pairs
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Pass keys and values around the ring again. Their gradients follow one hop behind: they
        start at the rank after the owner, every rank adds its part, and the owner adds the last."""
        queries, kv, y, lse = ctx.saved_tensors
        (dy,) = grads
        pairs = ctx.pairs
        axis = ctx.pairs.axis
        num_kv = kv.shape[2]
        d_out = group_heads(dy, num_kv)
        delta = row_delta(dy, y, num_kv)
        dq = torch.zeros_like(queries, dtype=lse.dtype)
        own = passing = None
        for source, (keys, values) in going_round(kv, axis):
            dkv = torch.zeros_like(kv, dtype=lse.dtype)
            for rows, columns, spec in pairs.of(source, y.shape[1]):
                attend_rectangle_backward(
                    queries[:, :, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    d_out[:, :, :, rows],
                    delta[:, :, :, rows],
                    spec,
                    dq[:, :, :, rows],
                    dkv[0][:, :, columns],
                    dkv[1][:, :, columns],
                    lse[:, :, :, rows],
                )
            if source == axis.rank:
                own = dkv
                continue
            if passing is not None:
                dkv += passing.arrived()
            passing = pass_on(dkv, axis)
        assert own is not None and passing is not None
        dk, dv = (tokens_first(each, kv.dtype) for each in own.add_(passing.arrived()))
        return ungroup_heads(dq.to(kv.dtype)), dk, dv, None


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to one part of the keys into attention to the parts before, in place: each is
    weighted by its share of the sum of exponentials (Milakov & Gimelshein 2018). For every row at
    least one of the two has unmasked keys."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_()).add_(part * (part_lse - both).exp_())
    lse.copy_(both)


@dataclass(frozen=True)
class Passing:
    """A tensor that is being sent to the next rank, and the buffer for that of the rank before."""

    sent: Tensor
    received: Tensor
    pending: Pending

    def arrived(self) -> Tensor:
        self.pending.wait()
        return self.received


def pass_on(x: Tensor, axis: Axis) -> Passing:
    received = torch.empty_like(x)
    return Passing(x, received, axis.pass_on(x, received))


def going_round(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its keys and values) for all ranks, from this rank backwards. While the caller
    works with one, the next is being received."""
    for hop in range(axis.size):
        passing = pass_on(kv, axis) if hop + 1 < axis.size else None
        yield (axis.rank - hop) % axis.size, kv
        if passing is not None:
            kv = passing.arrived()


# -- the all-to-all
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllToAll:
    """Attention by all-to-all: called with q [B, T/c, H, C] and k, v [B, T/c, K, C]; each rank
    attends with H/c and K/c heads over T tokens."""

    config: ModelConfig
    axis: Axis
    documents: Tensor | None
    attention: CausalAttention

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = self.axis.size
        by_rank = torch.cat([x.unflatten(2, (size, -1)) for x in (q, k, v)], 3).flatten(2, 3)
        local: Tensor = Conjugate.apply(by_rank, heads_for_tokens, tokens_for_heads, self.axis)
        q, k, v = local.split([x.shape[2] // size for x in (q, k, v)], 2)
        attended = self.attention(q, k, v, self.config.window(layer), self.documents)
        y: Tensor = Conjugate.apply(attended, tokens_for_heads, heads_for_tokens, self.axis)
        return y


def heads_for_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Exchange [B, T/c, H, C] for [B, T, H/c, C]: send every rank its heads of these tokens,
    receive this rank's heads of all tokens."""
    return (
        exchanged(x.unflatten(2, (axis.size, -1)).movedim(2, 0), axis).movedim(0, 1).flatten(1, 2)
    )


def tokens_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """Exchange [B, T, H/c, C] for [B, T/c, H, C], the inverse."""
    return (
        exchanged(x.unflatten(1, (axis.size, -1)).movedim(1, 0), axis).movedim(0, 2).flatten(2, 3)
    )


def exchanged(x: Tensor, axis: Axis) -> Tensor:
    """Send row i of x [c, ...] to rank i; row i of the result comes from rank i."""
    x = x.contiguous()
    out = torch.empty_like(x)
    axis.all_to_all(x, out).wait()
    return out
