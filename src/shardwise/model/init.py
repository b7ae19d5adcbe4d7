"""Initial weights that do not depend on the layout: each block of rows has its own random seed,
derived from the name of the parameter.

All shardings of a model therefore start from the same weights, and no rank draws a whole tensor at
once. A rank draws little more than its shard of a matrix sharded by rows, and every block, one at a
time, of a matrix sharded by columns.
"""

import hashlib

import torch
from torch import Tensor

from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec
from shardwise.shards import Box, boxes, local_shape

BLOCK_ELEMENTS = 1 << 18
"""Approximate number of elements of a block of rows. It is part of the definition: another value
changes the weights of every seed."""


def init_weights(
    spec: ParamSpec, layout: Layout, coord: Coord, seed: int, dtype: torch.dtype
) -> Tensor:
    """Return the initial local tensor of `spec` on the rank at `coord`; padding is zero."""
    weights = torch.zeros(local_shape(spec, layout, coord), dtype=dtype)
    for box in boxes(spec, layout, coord):
        init_box(weights[box.local_slices], spec, box, seed)
    return weights


def init_box(out: Tensor, spec: ParamSpec, box: Box, seed: int) -> None:
    """Write the initial elements of `box` into `out`, one seeded block of rows at a time."""
    if spec.init.kind != "normal":
        out.fill_(1.0 if spec.init.kind == "ones" else 0.0)
        return
    num_rows, *row_shape = spec.shape
    block = max(1, BLOCK_ELEMENTS // (spec.numel // num_rows))
    first = box.start[0]
    last = first + box.shape[0]
    if first == last:
        return
    for index in range(first // block, -(-last // block)):
        start = index * block
        stop = min(start + block, num_rows)
        generator = seeded_generator(seed, spec.name, index)
        values = torch.randn(stop - start, *row_shape, generator=generator)
        a = max(start, first)
        b = min(stop, last)
        shard = values[(slice(a - start, b - start), *box.slices[1:])]
        out[a - first : b - first] = shard.mul_(spec.init.std)


def seeded_generator(seed: int, name: str, block: int) -> torch.Generator:
    """Return a generator whose seed is a hash of the arguments."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
