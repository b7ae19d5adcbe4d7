"""One unit of state (the embedding, a block, the final norm) as flat buffers, so that one
collective moves all of it.

A unit is padded to a multiple of its ranks and split into equal, contiguous shards, one per rank of
its shard axis. A state that the ZeRO stage does not shard is one full buffer, and the shard is a
view of it. A state that is sharded has a buffer of the shard's size, and a full buffer whose
storage exists only while it is needed (`allocate_storage`, `free_storage`); views of it stay valid.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.layout import AxisName
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.offload import Offload
from shardwise.parallel.state_store import STEP_ELEMENTS, Owned
from shardwise.params import ParamSpec, unit_axes
from shardwise.shards import (
    Box,
    allocated_elements,
    boxes,
    boxes_within,
    flat_index,
    flat_strides,
    local_shape,
    partial_axes,
    unit_elements,
)


@dataclass(frozen=True)
class ParamRange:
    """The place of a parameter in the flat buffers of its unit: `shape` is its local shape, `start`
    the index of its first element."""

    spec: ParamSpec
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter as a view of a flat buffer of the unit."""
        return flat[self.start : self.stop].view(self.shape)

    def view_of(self, shard: Tensor, shard_start: int, box: Box) -> Tensor:
        """Return a box of the parameter as a view of `shard`, the elements of the flat buffer from
        `shard_start` on, which hold all of the box."""
        first = self.start + flat_index(box.local, self.shape) - shard_start
        strides = flat_strides(self.shape)
        return shard.as_strided(box.shape, strides, shard.storage_offset() + first)


@dataclass
class Unit:
    """The buffers of one unit of state on this rank.

    Matrices come first, then norms and biases, so that weight decay applies to one range.

    Attributes:
        name: its name.
        ranges: where each parameter lies.
        num_decayed: the elements from the start on that weight decay shrinks.
        shard_axis: the ranks that hold one shard each.
        replicate_axis: the ranks that hold the same shard.
        shard: the elements of the flat buffer that this rank owns.
        leaves: each parameter as a leaf of the autograd graph, a view of `weights`.
        weights, grads: full buffers, in the dtypes of weights and of gradients.
        weight_shard, grad_shard: this rank's shard of them.
        master, exp_avg, exp_avg_sq: optimizer states of the shard, in fp32.
        partial: by axis, the parts of `grads` of which this rank has a partial sum (norms under
            sequence parallel, q/k norms, replicated kv heads), as views.
        is_whole: whether `weights` hold all shards, or a gather in progress will fill them.
        added: parameters whose gradient has had a contribution; the first one overwrites.
        is_reduced: whether `grad_shard` has had a sum in this step, to which the next one adds.
    """

    name: str
    ranges: tuple[ParamRange, ...]
    num_decayed: int
    shard_axis: Axis
    replicate_axis: Axis
    shard: range
    leaves: dict[str, Tensor]
    weights: Tensor
    weight_shard: Tensor
    grads: Tensor
    grad_shard: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    partial: dict[AxisName, list[Tensor]]
    is_whole: bool
    added: set[str] = field(default_factory=set)
    is_reduced: bool = False

    def owned(self, kind: Owned, mesh: Mesh) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """Yield every box of every parameter that lies in the shard, as a view of it."""
        flat = self.grad_shard if kind == "gradient" else getattr(self, kind)
        for param in self.ranges:
            start = max(param.start, self.shard.start)
            stop = min(param.stop, self.shard.stop)
            within = start - param.start, stop - param.start
            for box, _ in boxes_within(param.spec, mesh.layout, mesh.coord, *within):
                yield param.spec, box, param.view_of(flat, self.shard.start, box)

    def zero_gaps(self) -> None:
        """Zero the gaps between and after the parameters in the gradient buffer, which are summed
        with it."""
        stops = [param.stop for param in self.ranges]
        starts = [param.start for param in self.ranges[1:]] + [self.grads.numel()]
        for stop, start in zip(stops, starts, strict=True):
            self.grads[stop:start].zero_()

    def slices(self) -> Iterator[tuple[slice, bool]]:
        """Yield slices of the shard of at most STEP_ELEMENTS, each with whether it is decayed."""
        boundary = min(max(self.num_decayed, self.shard.start), self.shard.stop) - self.shard.start
        for start, stop, decayed in ((0, boundary, True), (boundary, len(self.shard), False)):
            for a in range(start, stop, STEP_ELEMENTS):
                yield slice(a, min(a + STEP_ELEMENTS, stop)), decayed


def make_unit(
    name: str,
    specs: tuple[ParamSpec, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    offload: Offload | None,
) -> Unit:
    """Allocate the buffers of a unit that consists of `specs`."""
    layout = mesh.layout
    ranges = lay_out_params(specs, mesh)
    axes = unit_axes(specs)
    shard_axis = mesh.axes[axes.shard]
    num_decayed = unit_elements((spec for spec in specs if spec.decayed), layout)
    padded = layout.padded(unit_elements(specs, layout), axes)
    each = padded // shard_axis.size
    shard = range(shard_axis.rank * each, (shard_axis.rank + 1) * each)

    def shard_of(full: Tensor, is_sharded: bool) -> Tensor:
        if not is_sharded:
            return full.zero_()[shard.start : shard.stop]
        free_storage(full)
        return full.new_zeros(each)

    weights = torch.empty(padded, dtype=dtype, device=mesh.device)
    # `.data` has its own version counter, so refilling the buffer does not invalidate graphs
    leaves = {param.spec.name: param.of(weights.data).requires_grad_() for param in ranges}
    weight_shard = shard_of(weights, layout.shards("parameters"))
    grads = torch.empty(padded, dtype=grad_dtype, device=mesh.device)
    partial = partial_gradients(ranges, grads, mesh)
    grad_shard = shard_of(grads, layout.shards("gradients"))
    own_master = dtype == torch.float32 and offload is None
    states = [allocate(each, mesh, offload) for _ in range(2 if own_master else 3)]
    master = weight_shard if own_master else states.pop()
    is_whole = not layout.shards("optimizer")
    return Unit(
        name,
        ranges,
        num_decayed,
        shard_axis,
        mesh.axes[axes.replicate],
        shard,
        leaves,
        weights,
        weight_shard,
        grads,
        grad_shard,
        master,
        states[0],
        states[1],
        partial,
        is_whole,
    )


def partial_gradients(
    ranges: tuple[ParamRange, ...], grads: Tensor, mesh: Mesh
) -> dict[AxisName, list[Tensor]]:
    """Return the views of `grads` that must be summed over an axis of more than one rank."""
    views: dict[AxisName, list[Tensor]] = {}
    for param in ranges:
        local_boxes = boxes(param.spec, mesh.layout, mesh.coord)
        for part, box in zip(param.spec.all_parts, local_boxes, strict=True):
            for axis in partial_axes(param.spec, part, mesh.layout):
                if mesh.axes[axis].size > 1:
                    views.setdefault(axis, []).append(param.of(grads)[box.local_slices])
    return views


def allocate(num_elements: int, mesh: Mesh, offload: Offload | None) -> Tensor:
    """Return a flat fp32 state of zeros, offloaded or on the device."""
    if offload is not None:
        return offload.allocate(num_elements)
    return torch.zeros(num_elements, device=mesh.device)


def lay_out_params(specs: tuple[ParamSpec, ...], mesh: Mesh) -> tuple[ParamRange, ...]:
    """Return the ranges of the parameters: decayed ones first, each kind in model order."""
    ranges = []
    start = 0
    for spec in sorted(specs, key=lambda spec: not spec.decayed):
        ranges.append(ParamRange(spec, local_shape(spec, mesh.layout, mesh.coord), start))
        start += allocated_elements(spec, mesh.layout)
    return tuple(ranges)


def allocate_storage(flat: Tensor) -> None:
    """Allocate the storage of a freed buffer, uninitialized; else do nothing."""
    if not flat.untyped_storage().nbytes():
        flat.untyped_storage().resize_(flat.nbytes)


def free_storage(flat: Tensor) -> None:
    """Free the storage of a buffer, which must not be read until it is gathered again
    (`Store.need` asserts that)."""
    flat.untyped_storage().resize_(0)
