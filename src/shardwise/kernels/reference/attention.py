"""Causal attention within the given tokens: the definition, and a version that never holds the
whole score matrix.

The second computes the rows of scores block by block, as FlashAttention does (Dao et al. 2022):
scores, softmax and product with the values while a block is in the cache. The backward recomputes
the scores, so memory is linear in T. A block has whole rows, so its softmax needs no online
correction. On a CPU it takes half the time of torch's flash operation.

Ring attention gives it one rectangle of scores at a time, some queries by some keys. Each has its
own softmax, and the log-sum-exp (lse) of its rows weighs it in the merged result.

Shapes: B batch, T tokens, H query heads, K kv heads (each serves G = H / K query heads), C head
dim; R query rows and S key columns of a rectangle.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64
BLOCK_BYTES = 4 << 20
"""Bytes of the scores of one block, in fp32."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """Attend from q [B, T, H, C] to k and v [B, T, K, C]: [B, T, H, C].

    Each token attends to itself and to earlier tokens: with `window` to the last `window` tokens,
    itself included; with `documents` [B, T] to those of the same document. Scores are scaled by
    C^-0.5 and summed in fp32.
    """
    if q.device.type == "cpu":
        out: Tensor = BlockedAttention.apply(q, k, v, window, documents)
        return out
    return attention_naive(q, k, v, window, documents)


def attention_naive(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """Compute `causal_attention` with torch's operation: the definition."""
    num_tokens = q.shape[1]
    is_plain_causal = documents is None and (window is None or window >= num_tokens)
    mask = None
    if not is_plain_causal:
        spec = MaskSpec(0, window, documents, documents)
        every = slice(0, num_tokens)
        mask = ~build_mask(spec, every, every, q.device)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)


@dataclass(frozen=True)
class MaskSpec:
    """The mask of a rectangle of scores: a row attends to tokens that are not later, inside the
    window and the document.

    Attributes:
        offset: Tokens from the first column to the first row.
        window: Tokens that a row attends to, itself included; None: all.
        row_documents: Document ids [B, R] of the rows, or None.
        column_documents: Document ids [B, S] of the columns, or None.
    """

    offset: int = 0
    window: int | None = None
    row_documents: Tensor | None = None
    column_documents: Tensor | None = None

    def columns(self, rows: slice, num_columns: int) -> slice:
        """Return the columns outside which `rows` attend to nothing; at least one, so that each row
        has a softmax."""
        first = 0 if self.window is None else max(0, rows.start + self.offset + 1 - self.window)
        return slice(min(first, num_columns - 1), min(num_columns, rows.stop + self.offset))

    def within(self, batch: slice) -> "MaskSpec":
        """Return the mask of some rows of the batch."""
        if self.row_documents is None or self.column_documents is None:
            return self
        return replace(
            self,
            row_documents=self.row_documents[batch],
            column_documents=self.column_documents[batch],
        )


def build_mask(spec: MaskSpec, rows: slice, columns: slice, device: torch.device) -> Tensor:
    """Return [B or 1, rows, columns], True where the row must not attend to the column."""
    row_positions = torch.arange(rows.start, rows.stop, device=device) + spec.offset
    distance = row_positions[:, None] - torch.arange(columns.start, columns.stop, device=device)
    mask = distance < 0
    if spec.window is not None:
        mask = mask | (distance >= spec.window)
    if spec.row_documents is None or spec.column_documents is None:
        return mask[None]
    return mask | (spec.row_documents[:, rows, None] != spec.column_documents[:, None, columns])


class BlockedAttention(torch.autograd.Function):
    """`causal_attention`, a block of rows at a time. Inside, heads are grouped: [B, K, G, T, C]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None
    ) -> Tensor:
        spec = MaskSpec(0, window, documents, documents)
        queries = group_heads(q, k.shape[2])
        keys = heads_first(k)
        values = heads_first(v)
        # Contiguous: the output projection reads the heads of a token together.
        y = ungroup_heads(attend_rectangle(queries, keys, values, spec)).contiguous()
        ctx.save_for_backward(queries, keys, values, y, documents)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, y, documents = ctx.saved_tensors
        (dy,) = grads
        num_kv = keys.shape[1]
        dq = torch.zeros_like(queries)
        dk, dv = (torch.zeros_like(keys, dtype=fp32_or_wider(keys)) for _ in range(2))
        spec = MaskSpec(0, ctx.window, documents, documents)
        delta = row_delta(dy, y, num_kv)
        d_out = group_heads(dy, num_kv)
        attend_rectangle_backward(queries, keys, values, d_out, delta, spec, dq, dk, dv)
        dk, dv = (tokens_first(each, keys.dtype) for each in (dk, dv))
        return ungroup_heads(dq), dk, dv, None, None


def attend_rectangle(
    queries: Tensor, keys: Tensor, values: Tensor, spec: MaskSpec, lse: Tensor | None = None
) -> Tensor:
    """Attend from queries [B, K, G, R, C] to keys and values [B, K, S, C]: [B, K, G, R, C].

    Writes the log-sum-exp of each row into `lse` [B, K, G, R, 1], if given. For a row that attends
    to nothing here it is the lowest finite number, and the output is undefined.
    """
    wide_keys = keys.to(fp32_or_wider(keys))
    out = torch.empty_like(queries)
    for block in score_blocks(queries, keys.shape[2], spec):
        scores = block_scores(queries, wide_keys, block, spec)
        probabilities = scores.softmax(-1)
        if lse is not None:
            block_lse = lse[block.batch, :, :, block.rows]
            block_lse.copy_(log_sum_exp(scores, probabilities).view_as(block_lse))
        block_out = out[block.batch, :, :, block.rows]
        product = torch.bmm(probabilities.to(values.dtype), block.take_columns(values))
        block_out.copy_(product.view_as(block_out))
    return out


def attend_rectangle_backward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    d_out: Tensor,
    delta: Tensor,
    spec: MaskSpec,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Add the gradients of one rectangle to dq, dk and dv.

    With p the probabilities and dp = d_out v^T, the gradient of the scores is p (dp - delta), where
    `delta` is the sum of d_out * out of each row. `lse` is the log-sum-exp over all rectangles of a
    row, if there are several.
    """
    wide_keys = keys.to(fp32_or_wider(keys))
    scale = queries.shape[-1] ** -0.5
    for block in score_blocks(queries, keys.shape[2], spec):
        scores = block_scores(queries, wide_keys, block, spec)
        p = scores.softmax(-1)
        if lse is not None:
            p.mul_((log_sum_exp(scores, p) - block.take_rows(lse)).exp_())
        rows = block.take_rows(queries)
        d_rows = block.take_rows(d_out)
        block.take_columns(dv).add_(torch.bmm(p.to(rows.dtype).transpose(1, 2), d_rows))
        d_scores = torch.bmm(d_rows, block.take_columns(values).transpose(1, 2)).to(p.dtype)
        d_scores = d_scores.sub_(block.take_rows(delta)).mul_(p).to(rows.dtype)
        block_dq = dq[block.batch, :, :, block.rows]
        product = torch.bmm(d_scores, block.take_columns(keys))
        block_dq.add_(product.view_as(block_dq), alpha=scale)
        block.take_columns(dk).add_(torch.bmm(d_scores.transpose(1, 2), rows), alpha=scale)


@dataclass(frozen=True)
class ScoreBlock:
    """Some rows of the batch, some tokens of them as rows of scores, and the tokens that these
    attend to as columns."""

    batch: slice
    rows: slice
    columns: slice

    def take_rows(self, x: Tensor) -> Tensor:
        """[B, K, G, R, C] -> [batch K, G rows, C]."""
        return x[self.batch, :, :, self.rows].flatten(2, 3).flatten(0, 1)

    def take_columns(self, x: Tensor) -> Tensor:
        """[B, K, S, C] -> [batch K, columns, C], a view."""
        part = x[self.batch, :, self.columns]
        return part.view(-1, *part.shape[2:])


def score_blocks(queries: Tensor, num_columns: int, spec: MaskSpec) -> Iterator[ScoreBlock]:
    """Yield blocks of scores of about BLOCK_BYTES: up to BLOCK_ROWS rows, then as many batch rows
    as fit."""
    num_batch, num_kv, num_groups, num_rows, _ = queries.shape
    row_bytes = 4 * num_kv * num_groups * max(1, num_columns)
    size = max(1, min(BLOCK_ROWS, num_rows, BLOCK_BYTES // row_bytes))
    batch_size = max(1, BLOCK_BYTES // (row_bytes * size))
    for batch in range(0, num_batch, batch_size):
        for row in range(0, num_rows, size):
            rows = slice(row, min(row + size, num_rows))
            columns = spec.columns(rows, num_columns)
            yield ScoreBlock(slice(batch, min(batch + batch_size, num_batch)), rows, columns)


def block_scores(queries: Tensor, wide_keys: Tensor, block: ScoreBlock, spec: MaskSpec) -> Tensor:
    """Return a block of scores, in fp32, [batch K, G rows, columns]; masked ones are the lowest
    finite number.

    They are fp32 throughout: rounded to bf16, a score of 16 would be off by 0.06, and its
    probability by 6 %.
    """
    rows = block.take_rows(queries).to(wide_keys.dtype) * queries.shape[-1] ** -0.5
    scores = torch.bmm(rows, block.take_columns(wide_keys).transpose(1, 2))
    num_rows = block.rows.stop - block.rows.start
    lowest = torch.finfo(scores.dtype).min
    by_head = scores.view(-1, queries.shape[1], queries.shape[2], num_rows, scores.shape[-1])
    if spec.window is not None or spec.row_documents is not None:
        mask = build_mask(spec.within(block.batch), block.rows, block.columns, scores.device)
        by_head.masked_fill_(mask[:, None, None], lowest)
    elif block.rows.start + spec.offset < block.columns.stop - 1:
        # Only the square on the diagonal has later tokens.
        assert block.columns.stop == block.rows.stop + spec.offset, (
            "rows and columns are equally long parts of a sequence"
        )
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu_(1)
        by_head[..., -num_rows:].masked_fill_(later, lowest)
    return scores


def log_sum_exp(scores: Tensor, softmax: Tensor) -> Tensor:
    """Return the log-sum-exp [..., 1] of each row, from the maximum of the scores and that of their
    softmax, without another pass of exponentials."""
    return scores.amax(-1, keepdim=True) - softmax.amax(-1, keepdim=True).log()


def row_delta(d_out: Tensor, out: Tensor, num_kv: int) -> Tensor:
    """Return delta, the sum of d_out * out of every row, [B, K, G, T, 1]."""
    products = d_out.to(fp32_or_wider(d_out)) * out.to(fp32_or_wider(out))
    return group_heads(products.sum(-1, keepdim=True), num_kv)


def group_heads(x: Tensor, num_kv: int) -> Tensor:
    """[B, T, H, C] -> [B, K, G, T, C], contiguous."""
    return x.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4).contiguous()


def ungroup_heads(x: Tensor) -> Tensor:
    """[B, K, G, T, C] -> [B, T, H, C], a view."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def heads_first(x: Tensor) -> Tensor:
    """[B, T, K, C] -> [B, K, T, C], contiguous."""
    return x.transpose(1, 2).contiguous()


def tokens_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K, T, C] -> [B, T, K, C] in `dtype`."""
    return x.transpose(1, 2).to(dtype)


def fp32_or_wider(x: Tensor) -> torch.dtype:
    """Return fp32, or fp64 for a tensor of it."""
    return torch.promote_types(x.dtype, torch.float32)
