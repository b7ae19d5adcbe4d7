"""Paged attention in Triton: one kernel for prefill and decode, which reads pages in place.

The context of a sequence is split at fixed positions. Each block has its own softmax, and a row
merges its blocks from the first to the last (online softmax: Milakov & Gimelshein 2018;
FlashAttention: Dao et al. 2022). Where there are too few tiles to fill the device, many programs
compute the blocks of a tile, and a second kernel merges them in the same order (flash-decoding).
Both use `merge_softmax`, and no multiplication is fused with an addition, so their results are
bit-identical. A row depends on nothing of the batch but the number of rows of its tile, and only
numbers that agree are used (`agreeing_tiles`): attention is batch-invariant.

For a KV cache of 8-bit codes (`kv_cache.py`) products use the codes, which every dtype represents
exactly. Scores are multiplied by the scale of their key, and probabilities by that of their value.

Shapes: as in `batch.py`; H query heads, K kv heads, C head dim.
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
from shardwise.kernels.page_table import BLOCK_TOKENS, TokenSpan
from shardwise.kernels.serving_interface import AttentionShape
from shardwise.kernels.triton.batch import RowTiles, TableBatch, table_batch
from shardwise.kernels.triton.pointwise import kv_dtype_of, page_operands, rope_and_write_kv
from shardwise.quant.kv_dtype import KvDtype

TILE_ROWS = (16, 64)
"""Rows of a tile: the fewest that tensor cores take, for decode, and more, for prefill."""
BLOCK_BYTES = 1 << 14
"""Most bytes of a block of keys. With the values and the next block it fits into the 99 KiB of a
small multiprocessor, and the results into registers."""
PROGRAMS_PER_MULTIPROCESSOR = 4
LOG2_E = 1.4426950408889634
NOT_SPECIALIZED = ["num_blocks", "num_parts", "width"]
"""Arguments whose values must not compile another kernel."""
NOT_ALIGNED = ["tiles", "table", "starts", "lengths", "first_tokens"]
"""Arguments whose alignment must not compile another kernel."""


@triton.jit
def dot(a, b, WIDE: tl.constexpr):
    """Return the product, with IEEE fp32 instead of TF32. Triton's interpreter has no bf16, so it
    gets the same numbers in fp32 (WIDE)."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def decode_codes(codes, KV_DTYPE: tl.constexpr):
    """Return the numbers of 8-bit codes, in fp32. The bits of an e4m3 float, shifted into place,
    are an fp32 number 2^-120 times as large."""
    if KV_DTYPE == "int8":
        numbers = codes.to(tl.float32)
    else:
        # The sign, and the 7 bits below it 4 places lower.
        shifted = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
        numbers = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return numbers


@triton.jit
def merge_softmax(row_max, row_sum, out, block_max, block_sum, block_out):
    """Merge two parts of a softmax: the largest score, the sum of exponentials relative to it, and
    the weighted values.

    A part that is masked for a row, whose maximum is minus infinity, changes nothing.
    """
    merged_max = tl.maximum(row_max, block_max)
    safe_max = tl.where(merged_max == float("-inf"), 0.0, merged_max)
    scale = tl.exp2(row_max - safe_max)
    block_scale = tl.exp2(block_max - safe_max)
    return (
        merged_max,
        row_sum * scale + block_sum * block_scale,
        out * scale[:, None] + block_out * block_scale[:, None],
    )


@triton.jit
def tile_rows(origin, kv, starts, lengths, first_tokens, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return for each row of a tile its token of the step, its head, its position, and whether it
    is not padding."""
    sequence, first = origin
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    is_real = (row < ROWS // GROUP * GROUP) & (token < tl.load(lengths + sequence))
    position = tl.load(starts + sequence) + token
    return (
        (tl.load(first_tokens + sequence) + token).to(tl.int64),
        kv * GROUP + row % GROUP,
        position,
        is_real,
    )


@triton.jit
def visible_range(
    origin, starts, lengths, GROUP: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the first and the last position that any row of a tile attends to."""
    sequence, begin = origin
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence)
    last = start + tl.minimum(begin + ROWS // GROUP, length) - 1
    first = tl.maximum(start + begin + 1 - WINDOW, 0) if WINDOW else start * 0
    return first, last


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=NOT_ALIGNED)
def attend_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    part_out,
    part_max,
    part_sum,
    tiles,
    table,
    starts,
    lengths,
    first_tokens,
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
    KV_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (tile, kv head, part): every num_parts-th block of the tile.

    With SPLIT each block is written separately, into part_out [N, H, num_blocks, C], part_max and
    part_sum [N, H, num_blocks]; else the program merges them into out [N, H, C].
    """
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    origin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if tl.load(lengths + origin[0]) == 0:
        return
    token, head, position, is_real = tile_rows(
        origin, kv, starts, lengths, first_tokens, GROUP, ROWS
    )
    first, last = visible_range(origin, starts, lengths, GROUP, ROWS, WINDOW)
    element = tl.arange(0, PADDED)
    is_element = element < SIZE
    q_at = q + token[:, None] * q_token + head[:, None] * q_head + element
    query = tl.load(q_at, mask=is_real[:, None] & is_element, other=0.0)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_out = tl.zeros((ROWS, PADDED), tl.float32)
    for block in range(first // BLOCK + part, last // BLOCK + 1, num_parts):
        column = block * BLOCK + tl.arange(0, BLOCK)
        # Slots outside the range may hold anything, even NaN.
        in_range = (column >= first) & (column <= last)
        page_at = table + origin[0] * width + column // PAGE
        page = tl.load(page_at, mask=in_range, other=0).to(tl.int64)
        vector = kv.to(tl.int64) * (kv_head // SIZE) + page * PAGE + column % PAGE
        slot = vector * SIZE
        key_at = keys + slot + element[:, None]
        key = tl.load(key_at, mask=in_range & is_element[:, None], other=0.0)
        if KV_DTYPE != "auto":
            key = decode_codes(key, KV_DTYPE).to(query.dtype)
        scores = dot(query, key, WIDE) * scale
        if KV_DTYPE != "auto":
            scores *= tl.load(key_scales + vector, mask=in_range, other=0.0)
        distance = position[:, None] - column
        visible = is_real[:, None] & (distance >= 0)
        if WINDOW:
            visible &= distance < WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        block_max = tl.max(scores, 1)
        safe_max = tl.where(block_max == float("-inf"), 0.0, block_max)
        weights = tl.exp2(scores - safe_max[:, None])
        value_at = values + slot[:, None] + element
        value = tl.load(value_at, mask=in_range[:, None] & is_element, other=0.0)
        block_sum = tl.sum(weights, 1)
        if KV_DTYPE != "auto":
            value_scale = tl.load(value_scales + vector, mask=in_range, other=0.0)
            weights = tl.where(visible, weights * value_scale, 0.0)
            value = decode_codes(value, KV_DTYPE).to(query.dtype)
        block_out = dot(weights.to(value.dtype), value, WIDE)
        if SPLIT:
            result = (token * HEADS + head) * num_blocks + block
            tl.store(part_max + result, block_max, mask=is_real)
            tl.store(part_sum + result, block_sum, mask=is_real)
            part_out_at = part_out + result[:, None] * SIZE + element
            tl.store(part_out_at, block_out, mask=is_real[:, None] & is_element)
        else:
            row_max, row_sum, row_out = merge_softmax(
                row_max, row_sum, row_out, block_max, block_sum, block_out
            )
    if not SPLIT:
        out_at = out + (token * HEADS + head)[:, None] * SIZE + element
        tl.store(
            out_at,
            row_out / tl.where(is_real, row_sum, 1.0)[:, None],
            mask=is_real[:, None] & is_element,
        )


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=NOT_ALIGNED)
def merge_blocks_kernel(
    out,
    part_out,
    part_max,
    part_sum,
    tiles,
    starts,
    lengths,
    first_tokens,
    num_blocks,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (tile, kv head): merges the results of its blocks from the first to the last."""
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    origin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if tl.load(lengths + origin[0]) == 0:
        return
    token, head, _, is_real = tile_rows(origin, kv, starts, lengths, first_tokens, GROUP, ROWS)
    first, last = visible_range(origin, starts, lengths, GROUP, ROWS, WINDOW)
    element = tl.arange(0, PADDED)
    mask = is_real[:, None] & (element < SIZE)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_out = tl.zeros((ROWS, PADDED), tl.float32)
    for block in range(first // BLOCK, last // BLOCK + 1):
        result = (token * HEADS + head) * num_blocks + block
        block_max = tl.load(part_max + result, mask=is_real, other=float("-inf"))
        block_sum = tl.load(part_sum + result, mask=is_real, other=0.0)
        block_out = tl.load(part_out + result[:, None] * SIZE + element, mask=mask, other=0.0)
        row_max, row_sum, row_out = merge_softmax(
            row_max, row_sum, row_out, block_max, block_sum, block_out
        )
    out_at = out + (token * HEADS + head)[:, None] * SIZE + element
    tl.store(out_at, row_out / tl.where(is_real, row_sum, 1.0)[:, None], mask=mask)


INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""True where Triton's interpreter runs the kernels, on CPUs, as in tests."""


def triton_paged_attention(
    q: Tensor,
    pages: KVPages,
    batch: TableBatch,
    window: int | None,
    min_programs: int,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from q [N, H, C] to pages that already hold the new tokens: [N, H, C].

    Scores are scaled by C^-0.5. Scores, softmax and sums are fp32. The blocks of the smallest tiles
    are split over programs until there are `min_programs`; results are bit-identical. `out` may
    have another dtype; rows of padding tokens are left as they were.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for tiles in batch.tiles:
        launch_tiles(q, pages, batch, tiles, window, min_programs, out)
    return out


def launch_tiles(
    q: Tensor,
    pages: KVPages,
    batch: TableBatch,
    tiles: RowTiles,
    window: int | None,
    min_programs: int,
    out: Tensor,
) -> None:
    """Write the attention output of the rows of `tiles` into `out`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv, _, page_tokens, _ = pages.keys.numbers.shape
    assert q.stride(2) == 1 and out.is_contiguous()
    group = num_heads // num_kv
    kv_dtype = kv_dtype_of(pages)
    block = block_tokens(head_dim, q.dtype, kv_dtype)
    num_tiles = len(tiles.origins)
    num_blocks = -(-batch.page_table.shape[1] * page_tokens // block)
    is_smallest = tiles.num_rows == smallest_tile(group)
    options: dict[str, Any] = {
        "HEADS": num_heads,
        "GROUP": group,
        "SIZE": head_dim,
        "PADDED": padded_head_dim(head_dim),
        "BLOCK": block,
        "ROWS": tiles.num_rows,
        "WINDOW": window or 0,
        "num_warps": 4 if is_smallest else 8,
        "enable_fp_fusion": False,
    }
    num_parts = min(num_blocks, min_programs // (num_tiles * num_kv)) if is_smallest else 1
    part_shape = (num_tokens, num_heads, num_blocks) if num_parts > 1 else (0, 0, 0)
    part_out = q.new_empty(*part_shape, head_dim, dtype=torch.float32)
    part_max, part_sum = (q.new_empty(*part_shape, dtype=torch.float32) for _ in range(2))
    sequences = batch.starts, batch.lengths, batch.first_tokens
    attend_kernel[(num_tiles, num_kv, max(1, num_parts))](
        q,
        *page_operands(pages),
        out,
        part_out,
        part_max,
        part_sum,
        tiles.origins,
        batch.page_table,
        *sequences,
        q.stride(0),
        q.stride(1),
        pages.keys.numbers.stride(0),
        batch.page_table.stride(0),
        num_blocks,
        max(1, num_parts),
        LOG2_E * head_dim**-0.5,
        PAGE=page_tokens,
        SPLIT=num_parts > 1,
        KV_DTYPE=kv_dtype,
        WIDE=INTERPRETED,
        **options,
        num_stages=2,
    )
    if num_parts > 1:
        merge_blocks_kernel[(num_tiles, num_kv)](
            out, part_out, part_max, part_sum, tiles.origins, *sequences, num_blocks, **options
        )


def block_tokens(head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
    """Return the positions of a block. It depends on the model alone, not on the batch.

    Codes are decoded in registers, a whole block at once, so blocks of codes are half as long.
    """
    max_bytes = BLOCK_BYTES if kv_dtype == "auto" else BLOCK_BYTES // 2
    return min(BLOCK_TOKENS, max_bytes // (padded_head_dim(head_dim) * dtype.itemsize))


def padded_head_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def smallest_tile(group: int) -> int:
    """Return the rows of the smallest tile: those of one token, and no fewer than tensor cores
    take."""
    return max(TILE_ROWS[0], triton.next_power_of_2(group))


def agreeing_tiles(shape: AttentionShape) -> tuple[int, ...]:
    """Return the numbers of rows of a tile whose results are bit-identical to those of the
    smallest.

    They are measured in fp32, since rounding hides differences. Raises RuntimeError if the results
    of the smallest tile depend on how its blocks are split over programs.
    """
    num_tokens = max(1, TILE_ROWS[-1] // shape.group)
    starts = 3, 2 * BLOCK_TOKENS + 5
    num_pages = -(-(starts[-1] + num_tokens) // shape.page_tokens)
    spans = [TokenSpan(start, num_tokens, tuple(range(num_pages))) for start in starts]
    random = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(shape.device, shape.dtype)

    page_shape = 1, num_pages, shape.page_tokens, shape.head_dim
    pages = KVPages.empty(page_shape, shape.kv_dtype, shape.dtype, shape.device)
    for vectors in (pages.keys, pages.values):
        new = normal(num_pages * shape.page_tokens, 1, shape.head_dim)
        vectors.write(torch.arange(len(new), device=shape.device), new)
    q = normal(len(spans) * num_tokens, shape.group, shape.head_dim)

    def attend(num_rows: int, min_programs: int) -> Tensor:
        batch = table_batch(spans, shape.group, shape.page_tokens, (num_rows,), shape.device)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return triton_paged_attention(q, pages, batch, None, min_programs, out)

    smallest = smallest_tile(shape.group)
    expected = attend(smallest, 0)
    if not torch.equal(attend(smallest, 1 << 20), expected):
        raise RuntimeError("attention in Triton has other bits where its blocks are split")
    return smallest, *(
        rows for rows in TILE_ROWS if rows > smallest and torch.equal(attend(rows, 0), expected)
    )


@dataclass(frozen=True)
class TritonAttention:
    """Paged attention in Triton, for one model. `row_sizes` are the numbers of rows of a tile that
    agree."""

    shape: AttentionShape
    row_sizes: tuple[int, ...]
    min_programs: int
    is_capturable: bool = True

    @classmethod
    def of(cls, shape: AttentionShape) -> "TritonAttention":
        min_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(shape.device)
        return cls(shape, agreeing_tiles(shape), min_programs)

    def batch(self, spans: Sequence[TokenSpan]) -> TableBatch:
        shape = self.shape
        return table_batch(spans, shape.group, shape.page_tokens, self.row_sizes, shape.device)

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
        return triton_paged_attention(q, pages, batch, window, self.min_programs)


def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for a CPU, where the interpreter runs one program
    after the other."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
