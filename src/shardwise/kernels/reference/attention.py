"""Causal attention within the given tokens: its definition, and one that never holds the whole
score matrix.

Shapes: B batch, T tokens, H query heads, K kv heads (each serves G = H / K query heads), C head
dim.

The second goes through the rows of scores block by block, as FlashAttention does (Dao et al. 2022):
scores, softmax and product with the values happen while a block is in the cache, and the backward
works the scores out again instead of keeping them, so memory is linear in T. Since a block is of
whole rows, its softmax needs no online correction. On a CPU it takes half the time of torch's own
flash operation.

Where keys come in parts, as they do around a ring, each part is a rectangle of scores with a
softmax of its own; the logarithms of their sums (log-sum-exp) say afterwards how much each part
counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """q [B, T, H, C], k and v [B, T, K, C] -> [B, T, H, C]: each token sees itself and what came
    before it.

    With `window` only the last `window` tokens, itself included; with `documents` [B, T] only those
    of its document. Scores are scaled by C^-0.5 and summed in fp32.
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
    sight = Sight(0, window, documents, documents)
    every = slice(0, num_tokens)
    mask = None if plain else ~hidden(sight, every, every, q.device)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)


@dataclass(frozen=True)
class Sight:
    """What the rows of a rectangle of scores may see of its columns: tokens that are not later,
    inside the window and the document. The first column is `behind` tokens before the first row;
    documents are [B, rows] and [B, columns]."""

    behind: int = 0
    window: int | None = None
    row_documents: Tensor | None = None
    column_documents: Tensor | None = None

    def columns(self, rows: slice, num_columns: int) -> slice:
        """Beyond these the `rows` see nothing; at least one, for them to have a softmax."""
        first = 0 if self.window is None else max(0, rows.start + self.behind + 1 - self.window)
        return slice(min(first, num_columns - 1), min(num_columns, rows.stop + self.behind))

    def within(self, batch: slice) -> "Sight":
        if self.row_documents is None or self.column_documents is None:
            return self
        return replace(
            self,
            row_documents=self.row_documents[batch],
            column_documents=self.column_documents[batch],
        )


def hidden(sight: Sight, rows: slice, columns: slice, device: torch.device) -> Tensor:
    """[B or 1, rows, columns], true where the token of a row may not see the token of a column."""
    at = torch.arange(rows.start, rows.stop, device=device) + sight.behind
    behind = at[:, None] - torch.arange(columns.start, columns.stop, device=device)
    unseen = behind < 0 if sight.window is None else (behind < 0) | (behind >= sight.window)
    if sight.row_documents is None or sight.column_documents is None:
        return unseen[None]
    return unseen | (sight.row_documents[:, rows, None] != sight.column_documents[:, None, columns])


class RowBlocks(torch.autograd.Function):
    """`causal_attention`, a block of rows at a time. Inside, heads are grouped as [B, K, G, T,
    C]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None
    ) -> Tensor:
        sight = Sight(0, window, documents, documents)
        groups = group(q, k.shape[2])
        keys = heads_first(k)
        values = heads_first(v)
        y = ungroup(
            attend(groups, keys, values, sight)
        ).contiguous()  # what follows reads it head beside head
        ctx.save_for_backward(groups, keys, values, y, documents)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, keys, values, y, documents = ctx.saved_tensors
        (dy,) = grads
        num_kv = keys.shape[1]
        dq = torch.zeros_like(groups)
        dk, dv = (torch.zeros_like(keys, dtype=wide(keys)) for _ in range(2))
        sight = Sight(0, ctx.window, documents, documents)
        attend_backward(
            groups, keys, values, group(dy, num_kv), row_totals(dy, y, num_kv), sight, dq, dk, dv
        )
        return ungroup(dq), heads_last(dk, keys.dtype), heads_last(dv, values.dtype), None, None


def attend(
    groups: Tensor, keys: Tensor, values: Tensor, sight: Sight, sums: Tensor | None = None
) -> Tensor:
    """One rectangle of scores: queries [B, K, G, R, C], keys and values [B, K, S, C] -> [B, K, G,
    R, C].

    `sums` [B, K, G, R, 1], if given, takes the log-sum-exp of each row. Of a row that sees nothing
    here it is the lowest finite number, and what is returned of it means nothing.
    """
    wide_keys = keys.to(wide(keys))
    out = torch.empty_like(groups)
    for at in blocks(groups, keys.shape[2], sight):
        scores = scores_of(groups, wide_keys, at, sight)
        seen = scores.softmax(-1)
        if sums is not None:
            part = sums[at.batch, :, :, at.rows]
            part.copy_(log_sum_exp(scores, seen).view_as(part))
        result = out[at.batch, :, :, at.rows]
        result.copy_(torch.bmm(seen.to(values.dtype), at.columns_of(values)).view_as(result))
    return out


def attend_backward(
    groups: Tensor,
    keys: Tensor,
    values: Tensor,
    d_out: Tensor,
    totals: Tensor,
    sight: Sight,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sums: Tensor | None = None,
) -> None:
    """Add to dq, dk and dv what one rectangle gives to them. With p the probabilities and dp = dy
    v^T, the gradient of the scores is p (dp - sum of dy y).

    `totals` are those sums of dy y, `sums` the log-sum-exp over all rectangles of a row if there
    are others.
    """
    wide_keys = keys.to(wide(keys))
    scale = groups.shape[-1] ** -0.5
    for at in blocks(groups, keys.shape[2], sight):
        scores = scores_of(groups, wide_keys, at, sight)
        p = scores.softmax(-1)
        if sums is not None:
            p.mul_((log_sum_exp(scores, p) - at.rows_of(sums)).exp_())
        rows = at.rows_of(groups)
        d_rows = at.rows_of(d_out)
        at.columns_of(dv).add_(torch.bmm(p.to(rows.dtype).transpose(1, 2), d_rows))
        d_scores = torch.bmm(d_rows, at.columns_of(values).transpose(1, 2)).to(p.dtype)
        d_scores = d_scores.sub_(at.rows_of(totals)).mul_(p).to(rows.dtype)
        part = dq[at.batch, :, :, at.rows]
        part.add_(torch.bmm(d_scores, at.columns_of(keys)).view_as(part), alpha=scale)
        at.columns_of(dk).add_(torch.bmm(d_scores.transpose(1, 2), rows), alpha=scale)


@dataclass(frozen=True)
class Block:
    """Some batch rows, some tokens of them as rows of scores, and the tokens that these may see as
    columns."""

    batch: slice
    rows: slice
    columns: slice

    def rows_of(self, x: Tensor) -> Tensor:
        """[B, K, G, R, C] -> [batch K, G rows, C]."""
        return x[self.batch, :, :, self.rows].flatten(2, 3).flatten(0, 1)

    def columns_of(self, x: Tensor) -> Tensor:
        """[B, K, S, C] -> [batch K, columns, C], a view."""
        part = x[self.batch, :, self.columns]
        return part.view(-1, *part.shape[2:])


def blocks(groups: Tensor, num_columns: int, sight: Sight) -> Iterator[Block]:
    """Blocks of scores of about BLOCK_BYTES: rows first, then as many batch rows as fit."""
    num_batch, num_kv, num_groups, num_rows, _ = groups.shape
    row_bytes = 4 * num_kv * num_groups * max(1, num_columns)
    size = max(1, min(BLOCK_ROWS, num_rows, BLOCK_BYTES // row_bytes))
    batch_size = max(1, BLOCK_BYTES // (row_bytes * size))
    for batch in range(0, num_batch, batch_size):
        for row in range(0, num_rows, size):
            rows = slice(row, min(row + size, num_rows))
            columns = sight.columns(rows, num_columns)
            yield Block(slice(batch, min(batch + batch_size, num_batch)), rows, columns)


def scores_of(groups: Tensor, wide_keys: Tensor, at: Block, sight: Sight) -> Tensor:
    """A block of scores, in fp32, [batch K, G rows, columns]; hidden ones are the lowest finite
    number.

    They are fp32 throughout: rounded to bf16, one of 16 would be off by 0.06, its probability by 6
    %.
    """
    rows = at.rows_of(groups).to(wide_keys.dtype) * groups.shape[-1] ** -0.5
    scores = torch.bmm(rows, at.columns_of(wide_keys).transpose(1, 2))
    num_rows = at.rows.stop - at.rows.start
    lowest = torch.finfo(scores.dtype).min
    split = scores.view(-1, groups.shape[1], groups.shape[2], num_rows, scores.shape[-1])
    if sight.window is not None or sight.row_documents is not None:
        split.masked_fill_(
            hidden(sight.within(at.batch), at.rows, at.columns, scores.device)[:, None, None],
            lowest,
        )
    elif (
        at.rows.start + sight.behind < at.columns.stop - 1
    ):  # only the square on the diagonal holds what comes later
        assert at.columns.stop == at.rows.stop + sight.behind, (
            "parts of a sequence are equally long"
        )
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu_(1)
        split[..., -num_rows:].masked_fill_(later, lowest)
    return scores


def log_sum_exp(scores: Tensor, softmax: Tensor) -> Tensor:
    """[..., 1], from the largest of each row, which a softmax has at hand, and not from all of them
    again."""
    return scores.amax(-1, keepdim=True) - softmax.amax(-1, keepdim=True).log()


def row_totals(dy: Tensor, y: Tensor, num_kv: int) -> Tensor:
    """The sum of dy y of every row, [B, K, G, T, 1]."""
    return group((dy.to(wide(dy)) * y.to(wide(y))).sum(-1, keepdim=True), num_kv)


def group(x: Tensor, num_kv: int) -> Tensor:
    """[B, T, H, C] -> [B, K, G, T, C], contiguous."""
    return x.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4).contiguous()


def ungroup(x: Tensor) -> Tensor:
    """[B, K, G, T, C] -> [B, T, H, C], a view."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def heads_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
