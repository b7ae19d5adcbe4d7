"""Attention over pages in Triton: one kernel for prompts and single tokens, which reads pages where
they lie.

The keys of a sequence are cut at fixed places, every so many positions from its start. Each block
has a softmax of its own, and a row adds up its blocks from the first to the last (online softmax:
Milakov & Gimelshein 2018; FlashAttention: Dao et al. 2022). Where there are too few tiles to fill
the device, the blocks of a tile are made by many programs, and another kernel adds them up in the
same order (flash-decoding). Both add with `merged`, and no multiplication is fused with an
addition, so both have the same bits. So has a row in any company: of the batch nothing matters to
it but the number of rows of its tile, and only numbers are used that were found to agree
(`agreeing_tiles`).

Where keys and values are codes of 8 bits (`kv.py`), products are made of the codes, which every
dtype has exactly; scores are scaled by the scale of their key, and weights by that of their value.

Shapes: as in `tables.py`; H query heads, K kv heads, C head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.serving_interface import AttentionShape
from shardwise.kernels.spans import BLOCK_TOKENS, Span
from shardwise.kernels.triton.batch import RowTiles, TableBatch, table_batch
from shardwise.kernels.triton.pointwise import kind_of, operands, rope_and_write_kv
from shardwise.quant.kv_dtype import KvDtype

TILE_ROWS = (16, 64)
"""Rows of tiles that are tried: the fewest that tensor cores take, for single tokens, and more, for
prompts."""
BLOCK_BYTES = 1 << 14
"""The most that a block of keys takes. With the values, and what comes in ahead, it fits into the
99 KiB of a small multiprocessor, and what is made of it into registers."""
PROGRAMS_PER_MULTIPROCESSOR = 4
LOG2_E = 1.4426950408889634
CHANGING = ["num_blocks", "num_parts", "width"]
"""Arguments for whose value no kernel of its own is compiled."""
INTEGERS = ["tiles", "table", "starts", "lengths", "firsts"]


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """Of fp32 by its own products, not by those of tf32. Triton's interpreter has no bf16; it is
    given the same numbers in fp32 (WIDE)."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def plain(codes, KEPT: tl.constexpr):
    """What codes of 8 bits stand for, in fp32. A float of 8 bits, moved into place, is one of fp32
    2^-120 times as large."""
    if KEPT == "int8":
        made = codes.to(tl.float32)
    else:
        moved = (
            (codes.to(tl.int32) << 24) >> 4
        ) & -0x78100000  # the sign, and the 7 bits below it 4 places lower
        made = moved.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return made


@triton.jit
def merged(highest, total, sums, block_highest, block_total, block_sums):
    """Two parts of a softmax made one: the highest score, the sum of exponentials under it, and of
    what they weigh. A part of which a row sees nothing, whose highest is minus infinity, changes
    nothing."""
    top = tl.maximum(highest, block_highest)
    safe = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(highest - safe)
    added = tl.exp2(block_highest - safe)
    return (
        top,
        total * kept + block_total * added,
        sums * kept[:, None] + block_sums * added[:, None],
    )


@triton.jit
def rows_of(at, kv, starts, lengths, firsts, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of each row of a tile: its token among those of the step, its head, its position, and whether
    there is one."""
    sequence, begin = at
    row = tl.arange(0, ROWS)
    token = begin + row // GROUP
    is_real = (row < ROWS // GROUP * GROUP) & (token < tl.load(lengths + sequence))
    position = tl.load(starts + sequence) + token
    return (
        (tl.load(firsts + sequence) + token).to(tl.int64),
        kv * GROUP + row % GROUP,
        position,
        is_real,
    )


@triton.jit
def blocks_of(at, starts, lengths, GROUP: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr):
    """The first and the last position that any row of a tile sees."""
    sequence, begin = at
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)
    last = start + tl.minimum(begin + ROWS // GROUP, length) - 1
    first = tl.maximum(start + begin + 1 - WINDOW, 0) if WINDOW else start * 0
    return first, last


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=INTEGERS)
def attend_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    part_sums,
    part_highest,
    part_totals,
    tiles,
    table,
    starts,
    lengths,
    firsts,
    q_token,
    q_head,
    kv_head,
    width,
    num_blocks,
    num_parts,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KEPT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (tile, kv head, part): every num_parts-th block of the tile. With SPLIT each is
    written by itself, into part_sums [N, H, num_blocks, C], part_highest and part_totals [N, H,
    num_blocks]; else they are added up."""
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    at = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if tl.load(lengths + at[0]) == 0:
        return
    token, head, position, is_real = rows_of(at, kv, starts, lengths, firsts, GROUP, ROWS)
    first, last = blocks_of(at, starts, lengths, GROUP, ROWS, WINDOW)
    element = tl.arange(0, PADDED)
    is_element = element < SIZE
    q_at = q + token[:, None] * q_token + head[:, None] * q_head + element
    query = tl.load(q_at, mask=is_real[:, None] & is_element, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for block in range(first // BLOCK + part, last // BLOCK + 1, num_parts):
        column = block * BLOCK + tl.arange(0, BLOCK)
        is_seen = (column >= first) & (
            column <= last
        )  # what lies elsewhere may be anything, even NaN
        page = tl.load(table + at[0] * width + column // PAGE, mask=is_seen, other=0).to(tl.int64)
        vector = kv.to(tl.int64) * (kv_head // SIZE) + page * PAGE + column % PAGE
        slot = vector * SIZE
        key = tl.load(keys + slot + element[:, None], mask=is_seen & is_element[:, None], other=0.0)
        if KEPT != "auto":
            key = plain(key, KEPT).to(query.dtype)
        scores = product(query, key, WIDE) * scale
        if KEPT != "auto":
            scores *= tl.load(key_scales + vector, mask=is_seen, other=0.0)
        behind = position[:, None] - column
        visible = is_real[:, None] & (behind >= 0)
        if WINDOW:
            visible &= behind < WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        block_highest = tl.max(scores, 1)
        safe = tl.where(block_highest == float("-inf"), 0.0, block_highest)
        weights = tl.exp2(scores - safe[:, None])
        value = tl.load(
            values + slot[:, None] + element, mask=is_seen[:, None] & is_element, other=0.0
        )
        block_total = tl.sum(weights, 1)
        if KEPT != "auto":
            value_scale = tl.load(value_scales + vector, mask=is_seen, other=0.0)
            weights = tl.where(visible, weights * value_scale, 0.0)
            value = plain(value, KEPT).to(query.dtype)
        block_sums = product(weights.to(value.dtype), value, WIDE)
        if SPLIT:
            place = (token * HEADS + head) * num_blocks + block
            tl.store(part_highest + place, block_highest, mask=is_real)
            tl.store(part_totals + place, block_total, mask=is_real)
            tl.store(
                part_sums + place[:, None] * SIZE + element,
                block_sums,
                mask=is_real[:, None] & is_element,
            )
        else:
            highest, total, sums = merged(
                highest, total, sums, block_highest, block_total, block_sums
            )
    if not SPLIT:
        out_at = out + (token * HEADS + head)[:, None] * SIZE + element
        tl.store(
            out_at,
            sums / tl.where(is_real, total, 1.0)[:, None],
            mask=is_real[:, None] & is_element,
        )


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=INTEGERS)
def add_up_kernel(
    out,
    part_sums,
    part_highest,
    part_totals,
    tiles,
    starts,
    lengths,
    firsts,
    num_blocks,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (tile, kv head): what its blocks have made, added up from the first to the last."""
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    at = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if tl.load(lengths + at[0]) == 0:
        return
    token, head, _, is_real = rows_of(at, kv, starts, lengths, firsts, GROUP, ROWS)
    first, last = blocks_of(at, starts, lengths, GROUP, ROWS, WINDOW)
    element = tl.arange(0, PADDED)
    mask = is_real[:, None] & (element < SIZE)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for block in range(first // BLOCK, last // BLOCK + 1):
        place = (token * HEADS + head) * num_blocks + block
        block_highest = tl.load(part_highest + place, mask=is_real, other=float("-inf"))
        block_total = tl.load(part_totals + place, mask=is_real, other=0.0)
        block_sums = tl.load(part_sums + place[:, None] * SIZE + element, mask=mask, other=0.0)
        highest, total, sums = merged(highest, total, sums, block_highest, block_total, block_sums)
    out_at = out + (token * HEADS + head)[:, None] * SIZE + element
    tl.store(out_at, sums / tl.where(is_real, total, 1.0)[:, None], mask=mask)


INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""Whether kernels are run by Triton's interpreter, on CPUs, as tests do."""


def paged_attention(
    q: Tensor,
    pages: KVPages,
    batch: TableBatch,
    window: int | None,
    wanted_programs: int,
    out: Tensor | None = None,
) -> Tensor:
    """q [N, H, C], pages into which keys and values of the new tokens are written -> [N, H, C].

    Scores are scaled by C^-0.5. Scores, softmax and what is added up are fp32. The blocks of the
    smallest tiles are shared out until there are `wanted_programs`, which changes no bit. `out` may
    have another dtype; where a token only fills the batch up it is left as it was.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for tiles in batch.tiles:
        attend_tiles(q, pages, batch, tiles, window, wanted_programs, out)
    return out


def attend_tiles(
    q: Tensor,
    pages: KVPages,
    batch: TableBatch,
    tiles: RowTiles,
    window: int | None,
    wanted_programs: int,
    out: Tensor,
) -> None:
    num_tokens, num_heads, size = q.shape
    num_kv, _, page_tokens, _ = pages.keys.numbers.shape
    assert q.stride(2) == 1 and out.is_contiguous()
    group = num_heads // num_kv
    kept_as = kind_of(pages)
    block = block_tokens(size, q.dtype, kept_as)
    num_tiles = len(tiles.at)
    num_blocks = -(-batch.table.shape[1] * page_tokens // block)
    shape: dict[str, Any] = {
        "HEADS": num_heads,
        "GROUP": group,
        "SIZE": size,
        "PADDED": padded(size),
        "BLOCK": block,
        "ROWS": tiles.num_rows,
        "WINDOW": window or 0,
        "num_warps": 4 if tiles.num_rows == smallest(group) else 8,
        "enable_fp_fusion": False,
    }
    num_parts = (
        min(num_blocks, wanted_programs // (num_tiles * num_kv))
        if tiles.num_rows == smallest(group)
        else 1
    )
    places = (num_tokens, num_heads, num_blocks) if num_parts > 1 else (0, 0, 0)
    sums, highest, totals = (
        q.new_empty(*places, *last, dtype=torch.float32) for last in ((size,), (), ())
    )
    sequences = batch.starts, batch.lengths, batch.firsts
    attend_kernel[(num_tiles, num_kv, max(1, num_parts))](
        q,
        *operands(pages),
        out,
        sums,
        highest,
        totals,
        tiles.at,
        batch.table,
        *sequences,
        q.stride(0),
        q.stride(1),
        pages.keys.numbers.stride(0),
        batch.table.stride(0),
        num_blocks,
        max(1, num_parts),
        LOG2_E * size**-0.5,
        PAGE=page_tokens,
        SPLIT=num_parts > 1,
        KEPT=kept_as,
        WIDE=INTERPRETED,
        **shape,
        num_stages=2,
    )
    if num_parts > 1:
        add_up_kernel[(num_tiles, num_kv)](
            out, sums, highest, totals, tiles.at, *sequences, num_blocks, **shape
        )


def block_tokens(head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
    """Positions of a block: a fact of the model, whatever the batch. Codes are made plain in
    registers, all of a block at once, so there are half as many."""
    most = BLOCK_BYTES if kv_dtype == "auto" else BLOCK_BYTES // 2
    return min(BLOCK_TOKENS, most // (padded(head_dim) * dtype.itemsize))


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def smallest(group: int) -> int:
    """Rows of the smallest tile: one token's, and no fewer than tensor cores take."""
    return max(TILE_ROWS[0], triton.next_power_of_2(group))


def agreeing_tiles(shape: AttentionShape) -> tuple[int, ...]:
    """The numbers of rows of a tile whose rows have the same bits as in the smallest, found by
    trying, in fp32, since rounding hides much. Raises RuntimeError if the smallest itself depends
    on how its blocks are shared out."""
    num_tokens = max(1, TILE_ROWS[-1] // shape.group)
    starts = 3, 2 * BLOCK_TOKENS + 5
    num_pages = -(-(starts[-1] + num_tokens) // shape.page_tokens)
    spans = [Span(start, num_tokens, tuple(range(num_pages))) for start in starts]
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(shape.device, shape.dtype)

    page_shape = 1, num_pages, shape.page_tokens, shape.head_dim
    pages = KVPages.empty(page_shape, shape.kv_dtype, shape.dtype, shape.device)
    for vectors in (pages.keys, pages.values):
        new = drawn(num_pages * shape.page_tokens, 1, shape.head_dim)
        vectors.write(torch.arange(len(new), device=shape.device), new)
    q = drawn(len(spans) * num_tokens, shape.group, shape.head_dim)

    def found(num_rows: int, wanted_programs: int) -> Tensor:
        batch = table_batch(spans, shape.group, shape.page_tokens, (num_rows,), shape.device)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return paged_attention(q, pages, batch, None, wanted_programs, out)

    least = smallest(shape.group)
    wanted = found(least, 0)
    if not torch.equal(found(least, 1 << 20), wanted):
        raise RuntimeError("attention in Triton has other bits where blocks are shared out")
    return least, *(
        rows for rows in TILE_ROWS if rows > least and torch.equal(found(rows, 0), wanted)
    )


@dataclass(frozen=True)
class TritonAttention:
    """Attention over pages in Triton, for one model. `row_sizes` are numbers of rows of a tile that
    agree."""

    shape: AttentionShape
    row_sizes: tuple[int, ...]
    wanted_programs: int
    is_capturable: bool = True

    @classmethod
    def of(cls, shape: AttentionShape) -> "TritonAttention":
        return cls(
            shape,
            agreeing_tiles(shape),
            PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(shape.device),
        )

    def batch(self, spans: Sequence[Span]) -> TableBatch:
        return table_batch(
            spans, self.shape.group, self.shape.page_tokens, self.row_sizes, self.shape.device
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTables | None,
        pages: KVPages,
        batch: TableBatch,
        window: int | None,
    ) -> Tensor:
        q = rope_and_write_kv(q, k, v, rope, pages, batch.slots)
        return paged_attention(q, pages, batch, window, self.wanted_programs)


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 of a CPU, where the interpreter runs one program after the other."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
