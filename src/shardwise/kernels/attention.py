"""Causal attention within the given tokens: its definition, and one that never holds the whole score matrix.

Shapes: B batch, T tokens, H query heads, K kv heads (each serves G = H / K query heads), C head dim.

The second goes through the rows of scores block by block, as FlashAttention does (Dao et al. 2022): scores, softmax and
product with the values happen while a block is in the cache, and the backward works the scores out again instead of
keeping them, so memory is linear in T. Since a block is of whole rows, its softmax needs no online correction. On a CPU
it takes half the time of torch's own flash operation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64
BLOCK_BYTES = 4 << 20
"""Scores of one block, in fp32."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """q [B, T, H, C], k and v [B, T, K, C] -> [B, T, H, C]: each token sees itself and what came before it.

    With `window` only the last `window` tokens, itself included; with `documents` [B, T] only those of its document.
    Scores are scaled by C^-0.5 and summed in fp32.
    """
    if q.device.type == "cpu":
        out: Tensor = RowBlocks.apply(q, k, v, window, documents)
        return out
    return attention_naive(q, k, v, window, documents)


def attention_naive(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """The definition, through torch's operation: the softmax of what is seen, times the values."""
    num_tokens = q.shape[1]
    plain = documents is None and (window is None or window >= num_tokens)
    mask = None if plain else ~hidden(slice(0, num_tokens), slice(0, num_tokens), window, documents, q.device)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped).transpose(1, 2)


def hidden(rows: slice, columns: slice, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, rows, columns], true where the token of a row may not see the token of a column."""
    at = torch.arange(rows.start, rows.stop, device=device)
    behind = at[:, None] - torch.arange(columns.start, columns.stop, device=device)
    unseen = behind < 0 if window is None else (behind < 0) | (behind >= window)
    if documents is None:
        return unseen[None]
    return unseen | (documents[:, rows, None] != documents[:, None, columns])


class RowBlocks(torch.autograd.Function):
    """`causal_attention`, a block of rows at a time. Inside, heads are grouped as [B, K, G, T, C]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
        groups, keys, values = group(q, k.shape[2]), heads_first(k), heads_first(v)
        wide_keys, out = keys.to(wide(q)), torch.empty_like(groups)
        for at in blocks(groups, window):
            seen = probabilities(groups, wide_keys, at, window, documents).to(q.dtype)
            out[at.batch, :, :, at.rows] = torch.bmm(seen, at.columns_of(values)).view_as(out[at.batch, :, :, at.rows])
        y = ungroup(out)
        ctx.save_for_backward(q, k, v, y, documents)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With p the probabilities and dp = dy v^T, the scores' gradient is p (dp - sum of dy y)."""
        q, k, v, y, documents = ctx.saved_tensors
        (dy,) = grads
        groups, keys, values, d_out = group(q, k.shape[2]), heads_first(k), heads_first(v), group(dy, k.shape[2])
        wide_keys = keys.to(wide(q))
        totals = group((dy.to(wide(q)) * y.to(wide(q))).sum(-1, keepdim=True), k.shape[2])
        dq, dk, dv = torch.empty_like(groups), torch.zeros_like(wide_keys), torch.zeros_like(wide_keys)
        scale = q.shape[-1] ** -0.5
        for at in blocks(groups, ctx.window):
            p = probabilities(groups, wide_keys, at, ctx.window, documents)
            rows, d_rows = at.rows_of(groups), at.rows_of(d_out)
            at.columns_of(dv).add_(torch.bmm(p.to(q.dtype).transpose(1, 2), d_rows))
            d_scores = torch.bmm(d_rows, at.columns_of(values).transpose(1, 2)).to(wide(q))
            d_scores = d_scores.sub_(at.rows_of(totals)).mul_(p).mul_(scale).to(q.dtype)
            part = dq[at.batch, :, :, at.rows]
            part.copy_(torch.bmm(d_scores, at.columns_of(keys)).view_as(part))
            at.columns_of(dk).add_(torch.bmm(d_scores.transpose(1, 2), rows))
        return ungroup(dq), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype), None, None


@dataclass(frozen=True)
class Block:
    """Some batch rows, some tokens of them as rows of scores, and the tokens that these may see as columns."""

    batch: slice
    rows: slice
    columns: slice

    def rows_of(self, x: Tensor) -> Tensor:
        """[B, K, G, T, C] -> [batch K, G rows, C]."""
        return x[self.batch, :, :, self.rows].flatten(2, 3).flatten(0, 1)

    def columns_of(self, x: Tensor) -> Tensor:
        """[B, K, T, C] -> [batch K, columns, C], a view."""
        part = x[self.batch, :, self.columns]
        return part.view(-1, *part.shape[2:])


def blocks(groups: Tensor, window: int | None) -> Iterator[Block]:
    """Blocks of scores of about BLOCK_BYTES: rows first, then as many batch rows as fit."""
    num_batch, num_kv, num_groups, num_tokens, _ = groups.shape
    row_bytes = 4 * num_kv * num_groups * max(1, num_tokens)
    size = max(1, min(BLOCK_ROWS, num_tokens, BLOCK_BYTES // row_bytes))
    batch_size = max(1, BLOCK_BYTES // (row_bytes * size))
    for batch in range(0, num_batch, batch_size):
        for row in range(0, num_tokens, size):
            first = 0 if window is None else max(0, row + 1 - window)
            stop = min(row + size, num_tokens)
            yield Block(slice(batch, min(batch + batch_size, num_batch)), slice(row, stop), slice(first, stop))


def probabilities(groups: Tensor, wide_keys: Tensor, at: Block, window: int | None, documents: Tensor | None) -> Tensor:
    """The softmax of a block of scores, in fp32, [batch K, G rows, columns].

    The scores too are fp32 throughout: rounded to bf16, one of 16 would be off by 0.06, its probability by 6 %.
    """
    rows = at.rows_of(groups).to(wide_keys.dtype) * groups.shape[-1] ** -0.5
    scores = torch.bmm(rows, at.columns_of(wide_keys).transpose(1, 2))
    num_rows = at.rows.stop - at.rows.start
    split = scores.view(-1, groups.shape[1], groups.shape[2], num_rows, scores.shape[-1])
    if window is None and documents is None:  # only the square on the diagonal holds what comes later
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu_(1)
        split[..., -num_rows:].masked_fill_(later, -torch.inf)
    else:
        theirs = None if documents is None else documents[at.batch]
        split.masked_fill_(hidden(at.rows, at.columns, window, theirs, scores.device)[:, None, None], -torch.inf)
    return scores.softmax(-1)


def group(x: Tensor, num_kv: int) -> Tensor:
    """[B, T, H, C] -> [B, K, G, T, C], contiguous."""
    return x.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4).contiguous()


def ungroup(x: Tensor) -> Tensor:
    """[B, K, G, T, C] -> [B, T, H, C]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
