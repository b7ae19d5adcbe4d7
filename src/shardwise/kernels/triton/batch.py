"""A step of serving as a GPU's kernels read it: block tables, and tiles of query rows.

It is integers in one piece of memory, so a step costs one copy to the device. A batch of the same
shape can be written over it (see `serve/graphs.py`).

Shapes: N tokens of the step, S sequences, W pages of the longest; G query heads share a kv head; P
tokens of a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.spans import Span, padded_page_tables

NOWHERE = -1
"""The slot of a token that is only there to fill a batch up."""
ALIGNED = 4
"""Parts of the integers start at multiples of 16 bytes: for others Triton would compile a kernel of
its own."""


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `num_rows` query rows: the heads that share a kv head, of as many tokens of one
    sequence as fit. `at` [tiles, 2]: its sequence, and its first token among those that the
    sequence runs in this step."""

    num_rows: int
    at: Tensor


@dataclass(frozen=True)
class TableBatch:
    """Where the tokens of a step are and what they see, in int32.

    slots [N]: where each goes (page * P + offset), or NOWHERE. table [S, W]: pages of each
    sequence. Of each sequence [S] too: starts, the position of its first token in this step;
    lengths, how many tokens of it are run, 0 for one that is only there to fill the batch up;
    firsts, which of the N tokens is its first.
    """

    slots: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    firsts: Tensor
    tiles: tuple[RowTiles, ...]


def table_batch(
    spans: Sequence[Span], group: int, page_tokens: int, sizes: Sequence[int], device: torch.device
) -> TableBatch:
    """The batch of all tokens of `spans`, one after the other. A sequence is one tile of the
    smallest of `sizes` that holds it, or several of the largest."""
    table = torch.tensor(padded_page_tables(spans), dtype=torch.int32)
    starts, lengths = torch.tensor([(span.start, span.num_tokens) for span in spans]).t()
    firsts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(len(spans)), lengths)
    positions = starts[owner] + torch.arange(len(owner)) - firsts[owner]
    slots = table[owner, positions // page_tokens] * page_tokens + positions % page_tokens
    tiles = {size: at for size in sizes if (at := list(tiles_of(spans, group, size, sizes)))}
    parts = [slots, table, starts, lengths, firsts, *(torch.tensor(at) for at in tiles.values())]
    slots, table, starts, lengths, firsts, *ats = moved(parts, device)
    return TableBatch(slots, table, starts, lengths, firsts, tuple(map(RowTiles, tiles, ats)))


def tiles_of(
    spans: Sequence[Span], group: int, num_rows: int, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(sequence, first token) of each tile of that many rows."""
    most = num_rows // group
    for number, span in enumerate(spans):
        fitting = next((size for size in sizes if span.num_tokens * group <= size), sizes[-1])
        if num_rows == fitting:
            yield from ((number, begin) for begin in range(0, span.num_tokens, most))


def moved(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Integers of several shapes, brought to the device in one copy."""
    padded = [-(-part.numel() // ALIGNED) * ALIGNED for part in parts]
    whole = torch.zeros(sum(padded), dtype=torch.int32)
    for place, part in zip(whole.split(padded), parts, strict=True):
        place[: part.numel()] = part.flatten()
    places = whole.to(device).split(padded)
    return [
        place[: part.numel()].view(part.shape) for place, part in zip(places, parts, strict=True)
    ]


def decode_batch(
    starts: Tensor, slots: Tensor, lengths: Tensor, table: Tensor, num_rows: int
) -> TableBatch:
    """The batch of one token of each sequence, over integers that are already on the device. Where
    they are does not change, so it stays true when others are written over them."""
    firsts = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    tiles = RowTiles(num_rows, torch.stack((firsts, torch.zeros_like(firsts)), 1))
    return TableBatch(slots, table, starts, lengths, firsts, (tiles,))
