"""First weights that do not depend on the layout: every block of rows has its own seed, made of the
parameter's name.

So any cut of any layout starts from one model, and no rank draws a whole tensor at once: of a
matrix cut by rows it draws what it holds and little more, of one cut by columns every block, one
after the other.
"""

import hashlib

import torch
from torch import Tensor

from shardwise.layout import Coord, Layout
from shardwise.params import Box, ParamSpec, boxes, local_shape

BLOCK_ELEMENTS = 1 << 18
"""Rows are drawn in blocks of about this many elements. It is part of the definition: changing it
changes every seed's weights."""


def init_weights(
    spec: ParamSpec, layout: Layout, coord: Coord, seed: int, dtype: torch.dtype
) -> Tensor:
    """The local tensor of `spec` at `coord`; padding is zero."""
    weights = torch.zeros(local_shape(spec, layout, coord), dtype=dtype)
    for box in boxes(spec, layout, coord):
        fill(weights[box.local_slices], spec, box, seed)
    return weights


def fill(out: Tensor, spec: ParamSpec, box: Box, seed: int) -> None:
    """Write the elements of `box` into `out`, one seeded block of rows after the other."""
    if spec.init.kind != "normal":
        out.fill_(1.0 if spec.init.kind == "ones" else 0.0)
        return
    num_rows = spec.shape[0]
    row_shape = spec.shape[1:]
    block = max(1, BLOCK_ELEMENTS // (spec.numel // num_rows))
    first = box.start[0]
    last = box.start[0] + box.shape[0]
    for index in range(first // block, -(-last // block) if last > first else first // block):
        start = index * block
        stop = min((index + 1) * block, num_rows)
        drawn = torch.randn(
            stop - start, *row_shape, generator=generator_of(seed, spec.name, index)
        )
        a = max(start, first)
        b = min(stop, last)
        out[a - first : b - first] = drawn[(slice(a - start, b - start), *box.slices[1:])].mul_(
            spec.init.std
        )


def generator_of(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
