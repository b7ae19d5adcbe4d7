"""Attention over a paged KV cache (Kwon et al. 2023, PagedAttention), for many sequences at once.

The context of a sequence is split at fixed positions, every BLOCK_TOKENS from its start. Each block
has its own softmax, and blocks are merged from the first to the last, weighted by their log-sum-exp
(as in FlashAttention, Dao et al. 2022). So a token's sums have one order, whether it comes alone or
in a chunk: attention is batch-invariant. A block that a token does not attend to has a weight of
exactly zero.

Query rows are the tokens of a sequence times the heads that share a kv head, in tiles. A tile has
one of a few numbers of rows, at which products agree (`batch_invariant.py`). A pair is a tile and a
block that it attends to.

Shapes: N tokens of the step, H query heads, K kv heads, G = H / K, C head dim, P tokens of a page;
M rows of a tile.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.page_table import BLOCK_TOKENS, TokenSpan, padded_page_tables
from shardwise.kernels.reference.attention import log_sum_exp
from shardwise.kernels.reference.batch_invariant import agreeing_sizes, cancelling

TILE_MAX_ROWS = 128
GROUP_PAIRS = 64
"""Pairs of tile and block that are computed at once, for tiles of few rows: what is gathered stays
in the cache."""


@dataclass(frozen=True)
class TileGroup:
    """Tiles of the same number of rows, and the blocks that they attend to.

    Pairs are ordered by block: first every tile with its first block, then every tile that has a
    second one. Tiles with more blocks come first.

    Masked slots may hold anything, even NaN. Where all rows mask a whole page, another page of the
    block is read in its place; `stale` are the slots that all rows mask even so.

    Attributes:
        rows: [tiles * M], the index of each row among the G * N query rows.
        tile_of: [pairs].
        pages: [pairs * pages of a block].
        mask: [pairs, M, BLOCK_TOKENS], true where a row must not attend.
        stale: Indices among pairs * BLOCK_TOKENS slots.
        counts: The number of tiles that have a first block, a second, ...
    """

    rows: Tensor
    tile_of: Tensor
    pages: Tensor
    mask: Tensor
    stale: Tensor
    counts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.mask.shape[1]


@dataclass(frozen=True)
class PagedBatch:
    """The metadata of a step, which all layers share.

    Attributes:
        slots: [N], where in its pages each token is written (page * P + offset).
        tiles: The tiles by attention window.
    """

    slots: Tensor
    tiles: dict[int | None, tuple[TileGroup, ...]]


def paged_batch(
    spans: Sequence[TokenSpan],
    group: int,
    page_tokens: int,
    windows: Iterable[int | None],
    sizes: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """Return the batch of all tokens of `spans`, in order. `group` is G; `sizes` come from
    `attention_sizes`."""
    assert BLOCK_TOKENS % page_tokens == 0, "a block is whole pages"
    page_table = torch.tensor(padded_page_tables(spans))
    owner = torch.repeat_interleave(
        torch.arange(len(spans)), torch.tensor([span.num_tokens for span in spans])
    )
    positions = torch.cat(
        [torch.arange(span.start, span.start + span.num_tokens) for span in spans]
    )
    slots = page_table[owner, positions // page_tokens] * page_tokens + positions % page_tokens
    tiles = sorted(split_tiles(spans, group, sizes), key=lambda tile: tile.num_rows)
    builder = TileBuilder(page_table, positions, page_tokens, group)
    groups = {
        window: tuple(
            builder.build(part, num_rows, window, device)
            for num_rows, same_size in groupby(tiles, lambda tile: tile.num_rows)
            for part in split_by_pairs(list(same_size), window)
        )
        for window in set(windows)
    }
    return PagedBatch(slots.to(device), groups)


@dataclass(frozen=True)
class Tile:
    """Some tokens of a span: `num_tokens` from position `start`, of which the first is token
    `first` of the step; padded to `num_rows` query rows."""

    span: int
    first: int
    start: int
    num_tokens: int
    num_rows: int

    def blocks(self, window: int | None) -> range:
        lowest = 0 if window is None else max(0, self.start + 1 - window)
        return range(lowest // BLOCK_TOKENS, (self.start + self.num_tokens - 1) // BLOCK_TOKENS + 1)


def split_tiles(spans: Sequence[TokenSpan], group: int, sizes: tuple[int, ...]) -> Iterator[Tile]:
    """Yield tiles of at most TILE_MAX_ROWS, or of one token if its heads are more."""
    fitting = [size for size in sizes if size <= TILE_MAX_ROWS]
    max_tokens = max(1, max(fitting, default=sizes[0]) // group)
    first = 0
    for index, span in enumerate(spans):
        for start in range(0, span.num_tokens, max_tokens):
            count = min(max_tokens, span.num_tokens - start)
            num_rows = min((size for size in sizes if size >= count * group), default=count * group)
            yield Tile(index, first + start, span.start + start, count, num_rows)
        first += span.num_tokens


def split_by_pairs(tiles: list[Tile], window: int | None) -> Iterator[list[Tile]]:
    """Yield groups of tiles with a limited number of pairs, tiles with most blocks first."""
    tiles = sorted(tiles, key=lambda tile: -len(tile.blocks(window)))
    limit = max(1, GROUP_PAIRS * 4 // max(4, tiles[0].num_rows))
    part: list[Tile] = []
    num_pairs = 0
    for tile in tiles:
        count = len(tile.blocks(window))
        if part and num_pairs + count > limit:
            yield part
            part = []
            num_pairs = 0
        part.append(tile)
        num_pairs += count
    yield part


@dataclass(frozen=True)
class TileBuilder:
    """Inputs of tile groups: page tables [spans, pages] and positions [N] of all tokens."""

    page_table: Tensor
    positions: Tensor
    page_tokens: int
    group: int

    def build(
        self, tiles: list[Tile], num_rows: int, window: int | None, device: torch.device | str
    ) -> TileGroup:
        blocks = [tile.blocks(window) for tile in tiles]
        counts = tuple(sum(len(each) > index for each in blocks) for index in range(len(blocks[0])))
        tile_of = torch.cat([torch.arange(count) for count in counts])
        block_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        first_block = torch.tensor([each.start for each in blocks])[tile_of]
        block_start = (first_block + block_index) * BLOCK_TOKENS  # [pairs]
        column = block_start[:, None] + torch.arange(BLOCK_TOKENS)
        tokens = self.row_tokens(tiles, num_rows)
        row_position = self.positions[tokens][tile_of]  # [pairs, M]
        distance = row_position[:, :, None] - column[:, None, :]
        mask = distance < 0
        if window is not None:
            mask = mask | (distance >= window)
        span = torch.tensor([tile.span for tile in tiles])[tile_of]
        masked_slots = mask.all(1).view(len(span), -1, self.page_tokens)
        page_index = substitute_pages(masked_slots)
        pages = self.page_table[
            span[:, None], block_start[:, None] // self.page_tokens + page_index
        ]
        stale = masked_slots[torch.arange(len(span))[:, None], page_index].flatten().nonzero()[:, 0]
        head = torch.arange(num_rows) % self.group
        rows = (head * len(self.positions) + tokens).flatten()
        return TileGroup(
            rows.to(device),
            tile_of.to(device),
            pages.flatten().to(device),
            mask.to(device),
            stale.to(device),
            counts,
        )

    def row_tokens(self, tiles: list[Tile], num_rows: int) -> Tensor:
        """Return the token [tiles, M] of each row; padding rows repeat the last one."""
        offset = torch.arange(num_rows) // self.group
        first = torch.tensor([tile.first for tile in tiles])[:, None]
        last = torch.tensor([tile.num_tokens - 1 for tile in tiles])[:, None]
        return first + torch.minimum(offset[None], last)


def substitute_pages(masked_slots: Tensor) -> Tensor:
    """Return the page index [pairs, pages] that each page of a block is read from, for masked slots
    [pairs, pages, P]: itself, or the least masked page of the block where all of it is masked."""
    least_masked = masked_slots.sum(2).argmin(1, keepdim=True)
    return torch.where(masked_slots.all(2), least_masked, torch.arange(masked_slots.shape[1]))


def paged_attention(q: Tensor, pages: KVPages, batch: PagedBatch, window: int | None) -> Tensor:
    """Attend from q [N, H, C] to pages that already hold the new tokens: [N, H, C].

    Scores are scaled by C^-0.5. Scores, softmax and sums are fp32.
    """
    num_tokens, num_heads, head_dim = q.shape
    queries = q.transpose(0, 1).reshape(len(pages.keys.numbers), -1, head_dim)
    out = torch.empty_like(queries)
    for tiles in batch.tiles[window]:
        out.index_copy_(1, tiles.rows, attend_tile_group(queries, pages, tiles))
    return out.view(num_heads, num_tokens, head_dim).transpose(0, 1)


def attend_tile_group(queries: Tensor, pages: KVPages, tiles: TileGroup) -> Tensor:
    """Attend from queries [K, G * N, C]: [K, tiles * M, C]."""
    num_kv, _, head_dim = queries.shape
    num_rows = tiles.num_rows
    by_pair = (num_kv, len(tiles.tile_of), num_rows)
    tile_rows = queries.index_select(1, tiles.rows).view(num_kv, -1, num_rows, head_dim)
    rows = tile_rows.index_select(1, tiles.tile_of).view(-1, num_rows, head_dim)
    keys, scales = pages.keys.gather(tiles.pages, queries.dtype)
    scores = exact_scores(rows, keys.view(-1, BLOCK_TOKENS, head_dim)).mul_(head_dim**-0.5)
    if scales is not None:
        scores.mul_(scales.view(-1, 1, BLOCK_TOKENS))
    scores.view(*by_pair, -1).masked_fill_(tiles.mask, torch.finfo(scores.dtype).min)
    probabilities = scores.softmax(-1)
    lse = log_sum_exp(scores, probabilities).view(*by_pair, 1)
    values, scales = pages.values.gather(tiles.pages, queries.dtype)
    if scales is not None:
        probabilities.mul_(scales.index_fill_(1, tiles.stale, 0).view(-1, 1, BLOCK_TOKENS))
    values.index_fill_(1, tiles.stale, 0)
    out = torch.bmm(probabilities.to(values.dtype), values.view(-1, BLOCK_TOKENS, head_dim))
    merged = merge_blocks(out.view(*by_pair, head_dim), lse, tiles)
    return merged.flatten(1, 2).to(queries.dtype)


def exact_scores(rows: Tensor, blocks: Tensor) -> Tensor:
    """Return the products of rows [b, M, C] and blocks [b, BLOCK_TOKENS, C], in fp32.

    Where the product is rounded, a second product that starts from its negative gives the rounding
    error.
    """
    blocks = blocks.transpose(1, 2)
    rounded = torch.bmm(rows, blocks)
    if rounded.dtype == torch.float32:
        return rounded
    return rounded.float().add_(torch.baddbmm(rounded, rows, blocks, beta=-1))


def merge_blocks(out: Tensor, lse: Tensor, tiles: TileGroup) -> Tensor:
    """Merge the outputs [K, pairs, M, C] of the blocks of each tile: [K, tiles, M, C] in fp32.

    Each block is weighted by the exponential of its log-sum-exp [K, pairs, M, 1] over their sum,
    and added from the first block to the last.
    """
    first, *later = tiles.counts
    if not later:
        return out.float()
    max_lse = lse[:, :first].clone()
    start = first
    for count in later:
        part = max_lse[:, :count]
        torch.maximum(part, lse[:, start : start + count], out=part)
        start += count
    weights = (lse - max_lse.index_select(1, tiles.tile_of)).exp_()
    weighted = out * weights
    weight_sum = weights[:, :first].clone()
    merged = weighted[:, :first].clone()
    start = first
    for count in later:
        weight_sum[:, :count] += weights[:, start : start + count]
        merged[:, :count] += weighted[:, start : start + count]
        start += count
    return merged.div_(weight_sum)


def attention_sizes(
    head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[int, ...]:
    """Return the numbers of rows of a tile at which both products of attention are batch-invariant,
    alone and as one of many."""
    like = torch.empty(0, dtype=dtype, device=device)
    key = cancelling(like.new_empty(BLOCK_TOKENS, head_dim))
    value = cancelling(like.new_empty(head_dim, BLOCK_TOKENS))

    def scores(rows: Tensor) -> Tensor:
        return alone_or_nan(exact_scores, rows, key)

    def sums(rows: Tensor) -> Tensor:
        return alone_or_nan(torch.bmm, rows, value.t().contiguous())

    agreeing = agreeing_sizes(sums, value)
    return tuple(size for size in agreeing_sizes(scores, key) if size in agreeing)


def alone_or_nan(
    product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, matrix: Tensor
) -> Tensor:
    """Return the product, with NaN where it has other bits as the last of a batch of 2 or 24."""
    alone = product(rows[None], matrix[None])[0]
    for number in (2, 24):
        other = product(*(x.expand(number, *x.shape).contiguous() for x in (rows, matrix)))[-1]
        alone = torch.where(alone == other, alone, torch.nan)
    return alone
