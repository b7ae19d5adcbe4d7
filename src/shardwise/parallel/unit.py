"""One unit of state (the embedding, a block, the final norm) as flat buffers, so that one
collective moves all of it.

A unit is padded to a multiple of the data ranks and cut into equal, contiguous shards, one for each
`shard` rank. What a stage of ZeRO leaves whole is one buffer, of which the shard is a view. What it
cuts is a buffer of the shard's size, and one of the whole unit whose storage is there only while it
is needed (`fill`, `empty`); views into that stay valid.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwise.formats.run_checkpoint import State
from shardwise.layout import AxisName, Layout
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.offload import Offload
from shardwise.params import Box, ParamSpec, boxes, boxes_within, local_shape, partial_axes

Owned = State | Literal["gradient"]

SLICE_ELEMENTS = 1 << 21
"""The step works through a shard in slices of this many elements: what it casts stays in the
cache."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the flat buffers of its unit."""

    spec: ParamSpec
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass
class Unit:
    """The buffers of one unit. Matrices come first, then norms and biases, so that weight decay
    covers one range."""

    name: str
    places: tuple[Place, ...]
    num_decayed: int
    shard: range
    leaves: dict[str, Tensor]
    """Each parameter as a leaf of the graph, a view of `weights`."""
    weights: Tensor
    weight_shard: Tensor
    grads: Tensor
    grad_shard: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    terms: dict[AxisName, list[Tensor]]
    """By axis, the parts of the whole gradient of which this rank has one term (norms under
    sequence parallel, q/k norms, replicated kv heads), as views."""
    is_whole: bool
    """Whether `weights` hold, or a gather under way is about to bring, what every shard holds."""
    added: set[str] = field(default_factory=set)
    """Parameters whose gradient has begun: the first contribution overwrites what was there."""
    is_reduced: bool = False
    """Whether `grad_shard` has had a sum in this step: another one adds to it."""

    def owned(self, kind: Owned, mesh: Mesh) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """Every rectangle of every parameter that lies in the shard, as a view of it."""
        flat = self.grad_shard if kind == "gradient" else getattr(self, kind)
        for place in self.places:
            start = max(place.start, self.shard.start)
            stop = min(place.stop, self.shard.stop)
            within = start - place.start, stop - place.start
            for box, first in boxes_within(place.spec, mesh.layout, mesh.coord, *within):
                at = place.start + first - self.shard.start
                yield place.spec, box, flat[at : at + torch.Size(box.shape).numel()].view(box.shape)

    def zero_gaps(self) -> None:
        """Clear what lies between and after the parameters in the whole gradient, which is summed
        with it."""
        stops = [place.stop for place in self.places]
        starts = [place.start for place in self.places[1:]] + [self.grads.numel()]
        for stop, start in zip(stops, starts, strict=True):
            self.grads[stop:start].zero_()

    def slices(self) -> Iterator[tuple[slice, bool]]:
        """Ranges of the shard with whether they decay."""
        boundary = min(max(self.num_decayed, self.shard.start), self.shard.stop) - self.shard.start
        for start, stop, decayed in ((0, boundary, True), (boundary, len(self.shard), False)):
            for a in range(start, stop, SLICE_ELEMENTS):
                yield slice(a, min(a + SLICE_ELEMENTS, stop)), decayed


def make_unit(
    name: str,
    specs: tuple[ParamSpec, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    offload: Offload | None,
) -> Unit:
    layout = mesh.layout
    places = lay_out(specs, mesh)
    num_decayed = sum(room(spec, layout) for spec in specs if spec.decayed)
    padded = layout.padded(sum(room(spec, layout) for spec in specs))
    each = padded // mesh.shard.size
    shard = range(mesh.shard.rank * each, (mesh.shard.rank + 1) * each)

    def part_of(whole: Tensor, cut: bool) -> Tensor:
        if not cut:
            return whole.zero_()[shard.start : shard.stop]
        empty(whole)
        return whole.new_zeros(each)

    weights = torch.empty(padded, dtype=dtype, device=mesh.device)
    # `.data` has a version counter of its own: refilling the buffer does not upset the graphs that
    # read it
    leaves = {place.spec.name: place.of(weights.data).requires_grad_() for place in places}
    weight_shard = part_of(weights, layout.cuts("parameters"))
    grads = torch.empty(padded, dtype=grad_dtype, device=mesh.device)
    terms = partial_terms(places, grads, mesh)
    grad_shard = part_of(grads, layout.cuts("gradients"))
    own_master = dtype == torch.float32 and offload is None
    states = [allocate(each, mesh, offload) for _ in range(2 if own_master else 3)]
    master = weight_shard if own_master else states.pop()
    is_whole = not layout.cuts("optimizer")
    return Unit(
        name,
        places,
        num_decayed,
        shard,
        leaves,
        weights,
        weight_shard,
        grads,
        grad_shard,
        master,
        states[0],
        states[1],
        terms,
        is_whole,
    )


def partial_terms(
    places: tuple[Place, ...], grads: Tensor, mesh: Mesh
) -> dict[AxisName, list[Tensor]]:
    """The views of `grads` that must be summed over an axis of more than one rank."""
    found: dict[AxisName, list[Tensor]] = {}
    for place in places:
        held = boxes(place.spec, mesh.layout, mesh.coord)
        for part, box in zip(place.spec.rows, held, strict=True):
            for axis in partial_axes(place.spec, part, mesh.layout):
                if mesh.axes[axis].size > 1:
                    found.setdefault(axis, []).append(place.of(grads)[box.local_slices])
    return found


def allocate(num_elements: int, mesh: Mesh, offload: Offload | None) -> Tensor:
    return (
        offload.allocate(num_elements) if offload else torch.zeros(num_elements, device=mesh.device)
    )


def lay_out(specs: tuple[ParamSpec, ...], mesh: Mesh) -> tuple[Place, ...]:
    """Those that decay first, each kind in model order."""
    places = []
    start = 0
    for spec in sorted(specs, key=lambda spec: not spec.decayed):
        places.append(Place(spec, local_shape(spec, mesh.layout, mesh.coord), start))
        start += room(spec, mesh.layout)
    return tuple(places)


def room(spec: ParamSpec, layout: Layout) -> int:
    """Elements that every rank sets aside for a parameter: as many as the fullest needs. So what
    tensor ranks share lies at the same place on all of them, and goes through the same
    arithmetic."""
    return math.prod(local_shape(spec, layout, layout.coord(0)))


def fill(flat: Tensor) -> None:
    """Give a buffer its storage, with nothing in particular in it; a full one stays as it is."""
    if not flat.untyped_storage().nbytes():
        flat.untyped_storage().resize_(flat.nbytes)


def empty(flat: Tensor) -> None:
    """Take a buffer's storage. Nobody may read it before it is filled again: `Store.need` sees to
    that."""
    flat.untyped_storage().resize_(0)
