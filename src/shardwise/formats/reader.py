"""`Reader`, the interface of everything that stores weights, and reading the shards of a rank
through it.

Tensors are read one after the other, in strips of a few megabytes, so that a rank needs little more
memory than its own shards.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from shardwise.layout import Coord, Layout
from shardwise.params import ParamSpec
from shardwise.shards import Box, block_of, boxes, local_shape

STRIP_ELEMENTS = 1 << 20


class Reader(Protocol):
    """An open source of weights; `dtype` is the dtype of most elements, bf16 for quantized ones."""

    dtype: torch.dtype

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        """Return a box of a parameter on the CPU, in any floating dtype; it may be read-only."""
        ...

    def close(self) -> None: ...


def read_param(
    reader: Reader,
    spec: ParamSpec,
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the shard of a parameter on the rank at `coord`; padding is zero."""
    shape = local_shape(spec, layout, coord)
    local_boxes = boxes(spec, layout, coord)
    is_padded = sum(math.prod(box.shape) for box in local_boxes) < math.prod(shape)
    local = (torch.zeros if is_padded else torch.empty)(shape, dtype=dtype, device=device)
    for box in local_boxes:
        read_box(reader, spec, box, local[box.local_slices])
    return local


def read_box(reader: Reader, spec: ParamSpec, box: Box, out: Tensor) -> None:
    """Read a box of a parameter into `out`, which has its shape."""
    start = box.start[0]
    stop = box.start[0] + box.shape[0]
    head = max(block_of(spec, part.dim) for part in spec.all_parts)
    first = start // head * head
    last = min(-(-stop // head) * head, spec.shape[0])  # some files permute within heads
    whole = replace(box, start=(first, *box.start[1:]), shape=(last - first, *box.shape[1:]))
    for strip in strips(whole, head):
        values = reader.read(spec, strip)
        a = max(strip.start[0], start)
        b = min(strip.start[0] + strip.shape[0], stop)
        out[a - start : b - start].copy_(values[a - strip.start[0] : b - strip.start[0]])


def strips(box: Box, block: int) -> Iterator[Box]:
    """Split a box into strips of about STRIP_ELEMENTS, each of whole rows and of a multiple of
    `block` rows."""
    num_rows, *columns = box.shape
    row_elements = math.prod(columns)
    step = max(1, STRIP_ELEMENTS // max(1, row_elements) // block) * block
    for row in range(0, num_rows if row_elements else 0, step):
        yield replace(
            box,
            start=(box.start[0] + row, *box.start[1:]),
            local=(box.local[0] + row, *box.local[1:]),
            shape=(min(step, num_rows - row), *columns),
        )
