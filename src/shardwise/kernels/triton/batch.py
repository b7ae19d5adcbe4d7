"""A step of serving as GPU kernels read it: page tables, and tiles of query rows.

It is integers in one piece of memory, so a step costs one copy to the device. A later batch of the
same shape can be written into the same memory (`serve/engine/cuda_graphs.py`).

Shapes: N tokens of the step, S sequences, W pages of the longest; G query heads share a kv head; P
tokens of a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.page_table import TokenSpan, padded_page_tables

NO_SLOT = -1
"""The slot of a padding token."""
ALIGNED = 4
"""Integer arrays start at multiples of 16 bytes. For other alignments Triton would compile another
kernel."""


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `num_rows` query rows: the heads that share a kv head, of as many tokens of one
    sequence as fit.

    Attributes:
        num_rows: Rows of a tile.
        origins: [tiles, 2], the sequence of each tile, and its first token among those that the
            sequence runs in this step.
    """

    num_rows: int
    origins: Tensor


@dataclass(frozen=True)
class TableBatch:
    """The metadata of a step, in int32.

    Attributes:
        slots: [N], where in its pages each token is written (page * P + offset), or NO_SLOT.
        page_table: [S, W], the pages of each sequence.
        starts: [S], the position of its first token in this step.
        lengths: [S], its tokens in this step; 0 for padding.
        first_tokens: [S], which of the N tokens is its first.
        tiles: The query rows of all tokens, by the size of tiles.
    """

    slots: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor
    first_tokens: Tensor
    tiles: tuple[RowTiles, ...]


def table_batch(
    spans: Sequence[TokenSpan],
    group: int,
    page_tokens: int,
    sizes: Sequence[int],
    device: torch.device,
) -> TableBatch:
    """Return the batch of all tokens of `spans`, in order.

    A sequence is one tile of the smallest of `sizes` that holds it, or several of the largest.
    """
    page_table = torch.tensor(padded_page_tables(spans), dtype=torch.int32)
    starts, lengths = torch.tensor([(span.start, span.num_tokens) for span in spans]).t()
    first_tokens = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(len(spans)), lengths)
    positions = starts[owner] + torch.arange(len(owner)) - first_tokens[owner]
    slots = page_table[owner, positions // page_tokens] * page_tokens + positions % page_tokens
    tiles = {
        size: tile for size in sizes if (tile := list(tile_origins(spans, group, size, sizes)))
    }
    arrays = [slots, page_table, starts, lengths, first_tokens]
    arrays += [torch.tensor(tile) for tile in tiles.values()]
    slots, page_table, starts, lengths, first_tokens, *origins = copy_to_device(arrays, device)
    row_tiles = tuple(map(RowTiles, tiles, origins))
    return TableBatch(slots, page_table, starts, lengths, first_tokens, row_tiles)


def tile_origins(
    spans: Sequence[TokenSpan], group: int, num_rows: int, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (sequence, first token) of each tile of that many rows."""
    max_tokens = num_rows // group
    for index, span in enumerate(spans):
        fitting = next((size for size in sizes if span.num_tokens * group <= size), sizes[-1])
        if num_rows == fitting:
            yield from ((index, first) for first in range(0, span.num_tokens, max_tokens))


def copy_to_device(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integers of several shapes to the device, as int32, in one copy."""
    padded = [-(-array.numel() // ALIGNED) * ALIGNED for array in arrays]
    host = torch.zeros(sum(padded), dtype=torch.int32)
    for target, array in zip(host.split(padded), arrays, strict=True):
        target[: array.numel()] = array.flatten()
    on_device = host.to(device).split(padded)
    return [
        flat[: array.numel()].view(array.shape)
        for flat, array in zip(on_device, arrays, strict=True)
    ]


def decode_batch(
    starts: Tensor, slots: Tensor, lengths: Tensor, page_table: Tensor, num_rows: int
) -> TableBatch:
    """Return the batch of one token per sequence, over integers that are already on the device.

    Their addresses do not change, so the batch stays valid when others are written over them.
    """
    first_tokens = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    origins = torch.stack((first_tokens, torch.zeros_like(first_tokens)), 1)
    tiles = RowTiles(num_rows, origins)
    return TableBatch(slots, page_table, starts, lengths, first_tokens, (tiles,))
