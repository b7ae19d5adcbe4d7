"""Attention over keys and values that lie in pages (Kwon et al. 2023, PagedAttention), for many
sequences at once.

The keys of a sequence are cut at fixed places, every BLOCK_TOKENS positions from its start. Each
block has a softmax of its own, and blocks are added up from the first to the last, weighted by
their log-sum-exp (as FlashAttention does, Dao et al. 2022). So what a token sees is added in one
order, whether it comes alone or in a chunk, and in any company; a block that a token does not see
at all has a weight of exactly zero.

Query rows are the tokens of a sequence times the heads that share a kv head, in tiles; a tile has
one of a few numbers of rows, at which products are known to agree (see `rows.py`). A pair is a tile
and a block it sees.

Shapes: N tokens of the step, H query heads, K kv heads, G = H / K, C head dim, P tokens of a page;
M rows of a tile.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.reference.attention import log_sum_exp
from shardwise.kernels.reference.batch_invariant import agreeing_sizes, cancelling
from shardwise.kernels.spans import BLOCK_TOKENS, Span, padded_page_tables

TILE_MAX_ROWS = 128
GROUP_PAIRS = 64
"""Pairs of tile and block that are worked on at once, if tiles have few rows: what is gathered
stays in the cache."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of the same number of rows and the blocks they see. Pairs come block by block: first
    those of every tile with its first block, then of every tile that has a second; tiles with more
    blocks come first.

    rows [tiles * M]: which of the G * N query rows; tile_of [pairs]; pages [pairs * pages of a
    block]; hidden [pairs, M, BLOCK_TOKENS]: what a row may not see. What no row sees may be
    anything, even NaN: in place of a page of which nothing is seen another of its block is read,
    and `stale` are the slots, of pairs * BLOCK_TOKENS, that no row sees even so. counts: how many
    tiles have a first block, a second, ...
    """

    rows: Tensor
    tile_of: Tensor
    pages: Tensor
    hidden: Tensor
    stale: Tensor
    counts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[1]


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of a step are and what they see: made once, used by every layer. `slots` [N]
    says where in its pages each token goes (page * P + offset); `tiles` are by window."""

    slots: Tensor
    tiles: dict[int | None, tuple[Tiles, ...]]


def paged_batch(
    spans: Sequence[Span],
    group: int,
    page_tokens: int,
    windows: Iterable[int | None],
    sizes: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """The batch of all tokens of `spans`, one after the other. `group` is G, `sizes` come from
    `attention_sizes`."""
    assert BLOCK_TOKENS % page_tokens == 0, "a block is of whole pages"
    table = torch.tensor(padded_page_tables(spans))
    owner = torch.repeat_interleave(
        torch.arange(len(spans)), torch.tensor([span.num_tokens for span in spans])
    )
    positions = torch.cat(
        [torch.arange(span.start, span.start + span.num_tokens) for span in spans]
    )
    slots = table[owner, positions // page_tokens] * page_tokens + positions % page_tokens
    cuts = sorted(tiles_of(spans, group, sizes), key=lambda cut: cut.num_rows)
    step = Step(table, positions, page_tokens, group)
    tiles = {
        window: tuple(
            step.tiles(part, num_rows, window, device)
            for num_rows, same in groupby(cuts, lambda cut: cut.num_rows)
            for part in parts(list(same), window)
        )
        for window in set(windows)
    }
    return PagedBatch(slots.to(device), tiles)


@dataclass(frozen=True)
class Cut:
    """One tile: some tokens of a span, `first` among those of the step, at position `start`; padded
    to `num_rows`."""

    span: int
    first: int
    start: int
    num_tokens: int
    num_rows: int

    def blocks(self, window: int | None) -> range:
        lowest = 0 if window is None else max(0, self.start + 1 - window)
        return range(lowest // BLOCK_TOKENS, (self.start + self.num_tokens - 1) // BLOCK_TOKENS + 1)


def tiles_of(spans: Sequence[Span], group: int, sizes: tuple[int, ...]) -> Iterator[Cut]:
    """Tiles of at most TILE_MAX_ROWS, or of one token where its heads are more."""
    fitting = [size for size in sizes if size <= TILE_MAX_ROWS]
    most = max(1, max(fitting, default=sizes[0]) // group)
    first = 0
    for number, span in enumerate(spans):
        for at in range(0, span.num_tokens, most):
            count = min(most, span.num_tokens - at)
            num_rows = min((size for size in sizes if size >= count * group), default=count * group)
            yield Cut(number, first + at, span.start + at, count, num_rows)
        first += span.num_tokens


def parts(cuts: list[Cut], window: int | None) -> Iterator[list[Cut]]:
    """The tiles in parts that are worked on one after the other, those that see most blocks
    first."""
    cuts = sorted(cuts, key=lambda cut: -len(cut.blocks(window)))
    limit = max(1, GROUP_PAIRS * 4 // max(4, cuts[0].num_rows))
    part: list[Cut] = []
    num_pairs = 0
    for cut in cuts:
        count = len(cut.blocks(window))
        if part and num_pairs + count > limit:
            yield part
            part = []
            num_pairs = 0
        part.append(cut)
        num_pairs += count
    yield part


@dataclass(frozen=True)
class Step:
    """What tiles are made from: block tables [spans, pages], positions [N] of all tokens."""

    table: Tensor
    positions: Tensor
    page_tokens: int
    group: int

    def tiles(
        self, cuts: list[Cut], num_rows: int, window: int | None, device: torch.device | str
    ) -> Tiles:
        blocks = [cut.blocks(window) for cut in cuts]
        counts = tuple(
            sum(len(each) > number for each in blocks) for number in range(len(blocks[0]))
        )
        tile_of = torch.cat([torch.arange(count) for count in counts])
        number = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        begin = (
            torch.tensor([each.start for each in blocks])[tile_of] + number
        ) * BLOCK_TOKENS  # [pairs]
        column = begin[:, None] + torch.arange(BLOCK_TOKENS)
        tokens = self.tokens(cuts, num_rows)
        row_at = self.positions[tokens][tile_of]  # [pairs, M]
        behind = row_at[:, :, None] - column[:, None, :]
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        span = torch.tensor([cut.span for cut in cuts])[tile_of]
        unseen = hidden.all(1).view(len(span), -1, self.page_tokens)
        stands_for = instead_of(unseen)
        pages = self.table[span[:, None], begin[:, None] // self.page_tokens + stands_for]
        stale = unseen[torch.arange(len(span))[:, None], stands_for].flatten().nonzero()[:, 0]
        head = torch.arange(num_rows) % self.group
        rows = (head * len(self.positions) + tokens).flatten()
        return Tiles(
            rows.to(device),
            tile_of.to(device),
            pages.flatten().to(device),
            hidden.to(device),
            stale.to(device),
            counts,
        )

    def tokens(self, cuts: list[Cut], num_rows: int) -> Tensor:
        """The token [tiles, M] of each row; padded rows repeat the last."""
        place = torch.arange(num_rows) // self.group
        first, last = (
            torch.tensor(each)[:, None]
            for each in ([c.first for c in cuts], [c.num_tokens - 1 for c in cuts])
        )
        return first + torch.minimum(place[None], last)


def instead_of(unseen: Tensor) -> Tensor:
    """Which page of its block each page [pairs, pages] is read from, by the slots [pairs, pages, P]
    that no row sees: from itself, or, if all of it is unseen, from the one of which most is
    seen."""
    most_seen = unseen.sum(2).argmin(1, keepdim=True)
    return torch.where(unseen.all(2), most_seen, torch.arange(unseen.shape[1]))


def paged_attention(q: Tensor, pages: KVPages, batch: PagedBatch, window: int | None) -> Tensor:
    """q [N, H, C], pages into which keys and values of the new tokens are written -> [N, H, C].

    Scores are scaled by C^-0.5. Scores, softmax and what is added up are fp32.
    """
    num_tokens, num_heads, size = q.shape
    queries = q.transpose(0, 1).reshape(len(pages.keys.numbers), -1, size)
    out = torch.empty_like(queries)
    for tiles in batch.tiles[window]:
        out.index_copy_(1, tiles.rows, attend_tiles(queries, pages, tiles))
    return out.view(num_heads, num_tokens, size).transpose(0, 1)


def attend_tiles(queries: Tensor, pages: KVPages, tiles: Tiles) -> Tensor:
    """queries [K, G * N, C] -> [K, tiles * M, C]."""
    num_kv, _, size = queries.shape
    num_rows = tiles.num_rows
    num_pairs = len(tiles.tile_of)
    rows = (
        queries.index_select(1, tiles.rows)
        .view(num_kv, -1, num_rows, size)
        .index_select(1, tiles.tile_of)
    )
    keys, scales = pages.keys.gather(tiles.pages, queries.dtype)
    scores = exact_scores(rows.view(-1, num_rows, size), keys.view(-1, BLOCK_TOKENS, size)).mul_(
        size**-0.5
    )
    if scales is not None:
        scores.mul_(scales.view(-1, 1, BLOCK_TOKENS))
    scores.view(num_kv, num_pairs, num_rows, -1).masked_fill_(
        tiles.hidden, torch.finfo(scores.dtype).min
    )
    seen = scores.softmax(-1)
    sums = log_sum_exp(scores, seen).view(num_kv, num_pairs, num_rows, 1)
    values, scales = pages.values.gather(tiles.pages, queries.dtype)
    if scales is not None:
        seen.mul_(scales.index_fill_(1, tiles.stale, 0).view(-1, 1, BLOCK_TOKENS))
    values.index_fill_(1, tiles.stale, 0)
    made = torch.bmm(seen.to(values.dtype), values.view(-1, BLOCK_TOKENS, size))
    return (
        add_up(made.view(num_kv, num_pairs, num_rows, size), sums, tiles)
        .flatten(1, 2)
        .to(queries.dtype)
    )


def exact_scores(rows: Tensor, blocks: Tensor) -> Tensor:
    """rows [b, M, C] by blocks [b, BLOCK_TOKENS, C], in fp32. Where the product is rounded, what
    rounding lost is asked for too, by a second product whose sums start at what is to be taken
    off."""
    blocks = blocks.transpose(1, 2)
    rounded = torch.bmm(rows, blocks)
    if rounded.dtype == torch.float32:
        return rounded
    return rounded.float().add_(torch.baddbmm(rounded, rows, blocks, beta=-1))


def add_up(made: Tensor, sums: Tensor, tiles: Tiles) -> Tensor:
    """What the blocks of a tile made [K, pairs, M, C], each weighted by the exponential of its
    log-sum-exp [K, pairs, M, 1] over their sum: [K, tiles, M, C] in fp32, added from the first
    block to the last."""
    first, *later = tiles.counts
    if not later:
        return made.float()
    highest = sums[:, :first].clone()
    at = first
    for count in later:
        part = highest[:, :count]
        torch.maximum(part, sums[:, at : at + count], out=part)
        at += count
    weights = (sums - highest.index_select(1, tiles.tile_of)).exp_()
    weighted = made * weights
    total = weights[:, :first].clone()
    out = weighted[:, :first].clone()
    at = first
    for count in later:
        total[:, :count] += weights[:, at : at + count]
        out[:, :count] += weighted[:, at : at + count]
        at += count
    return out.div_(total)


def attention_sizes(
    head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[int, ...]:
    """The numbers of rows of a tile at which both products give rows of the same bits, alone or as
    one of many."""
    like = torch.empty(0, dtype=dtype, device=device)
    key = cancelling(like.new_empty(BLOCK_TOKENS, head_dim))
    value = cancelling(like.new_empty(head_dim, BLOCK_TOKENS))

    def scores(rows: Tensor) -> Tensor:
        return alone_or_not(exact_scores, rows, key)

    def sums(rows: Tensor) -> Tensor:
        return alone_or_not(torch.bmm, rows, value.t().contiguous())

    agreeing = agreeing_sizes(sums, value)
    return tuple(size for size in agreeing_sizes(scores, key) if size in agreeing)


def alone_or_not(
    product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, matrix: Tensor
) -> Tensor:
    """The product, and NaN where it has other bits as the last of 2 or of 24."""
    alone = product(rows[None], matrix[None])[0]
    for number in (2, 24):
        other = product(*(x.expand(number, *x.shape).contiguous() for x in (rows, matrix)))[-1]
        alone = torch.where(alone == other, alone, torch.nan)
    return alone
