"""ZeRO (Rajbhandari et al. 2020): training states are sharded over data ranks, and gathered when
they are needed.

In data parallel every rank holds the same weights, gradients, master weights and moments. Stage 1
shards the optimizer states over the `shard` axis of each unit, stage 2 also the gradients, stage 3
also the weights. The store owns all of them, unit by unit; a stage decides what stays sharded:

    GATHER  all-gather the weights of a unit
            stages 1 and 2: once per step; stage 3: for each use, then FREE
    REDUCE  reduce-scatter the gradient of a unit
            stage 1: once per step; stages 2 and 3: once per micro-batch
    step    update this rank's shard

If nothing is sharded, a shard is the whole unit, and its gradient is summed over `replicate`, which
is then all data ranks: plain data parallel (`data.py` shows that alone and is the file to read
first). Hybrid sharding lies in between: sharded within groups, summed over groups.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.parallel.mesh import Mesh, Pending
from shardwise.parallel.offload import Offload
from shardwise.parallel.pipeline.actions import BUCKET_BYTES, IN_FLIGHT, bucket_elements
from shardwise.parallel.state_store import (
    STEP_ELEMENTS,
    Owned,
    StateStore,
    Update,
    storage_bytes,
    sum_partial,
)
from shardwise.parallel.unit import Unit, allocate_storage, free_storage, make_unit
from shardwise.params import ParamSpec
from shardwise.shards import Box


@dataclass(frozen=True)
class Sum:
    """A sum of gradients in progress. `is_last`: it is the unit's last bucket. `first_half`: it is
    the first half of its collective, which holds a receive buffer."""

    unit: Unit
    pending: Pending
    is_last: bool
    first_half: bool = True


class Store(StateStore):
    """Weights, gradients and optimizer states of one rank, sharded by ZeRO.

    The optimizer updates fp32 master weights; with fp32 and without offload these are the weights
    themselves. Gradients are sums over micro-batches and ranks, never means: the loss is scaled
    before.

    Args:
        mesh: the axes of this rank.
        units: the parameters of each unit of state on this rank.
        dtype: the dtype of weights.
        grad_dtype: the dtype in which gradients are accumulated and sent.
        update: the optimizer.
        reduce_dtype: the dtype in which ranks sum gradients.
        bucket_bytes: maximum bucket size in bytes.
        overlap: overlap reductions with computation; otherwise wait for each one.
        offload: where optimizer states are stored, if not on the device.
        tied: the units that the first and the last stage both hold.
    """

    def __init__(
        self,
        mesh: Mesh,
        units: dict[str, tuple[ParamSpec, ...]],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        update: Update,
        reduce_dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        offload: Offload | None = None,
        tied: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(mesh, update)
        self.offload = offload
        self.reduce_dtype = reduce_dtype
        self.bucket_bytes = bucket_bytes
        self.overlap = overlap
        self.tied = tied if mesh.tied.size > 1 else frozenset()
        self.units = {
            name: make_unit(name, specs, mesh, dtype, grad_dtype, offload)
            for name, specs in units.items()
        }
        self._locations = {
            param.spec.name: (unit, param) for unit in self.units.values() for param in unit.ranges
        }
        self._gathers: dict[str, Pending] = {}
        self._sums: deque[Sum] = deque()

    # -- weights
    # ----------------------------------------------------------------------------------------------

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return parameters as leaves of the autograd graph: views of the flat buffers. In stage 3
        they are valid between `need` and `free`."""
        return {name: self._locations[name][0].leaves[name] for name in names}

    def gather(self, name: str) -> None:
        """Start to gather the weights of a unit over its `shard` axis, unless they are complete."""
        unit = self.units[name]
        if not unit.is_whole:
            allocate_storage(unit.weights)
            self._gathers[name] = unit.shard_axis.all_gather(unit.weight_shard, unit.weights)
            unit.is_whole = True

    def need(self, names: Iterable[str]) -> None:
        """Wait until the weights of these units are complete."""
        for name in names:
            assert self.units[name].is_whole, f"the weights of {name} were not gathered"
            if name in self._gathers:
                self._gathers.pop(name).wait()

    def free(self, name: str) -> None:
        """Free the gathered weights of a unit, in stage 3."""
        if self.mesh.layout.shards("parameters"):
            self.need([name])
            free_storage(self.units[name].weights)
            self.units[name].is_whole = False

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, unit in self.units.items():
            self.gather(name)
            self.need([name])
            for param in unit.ranges:
                yield param.spec.name, param.of(unit.weights)
            self.free(name)

    # -- gradients
    # --------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """Add one contribution to the gradient of a parameter: a dense tensor of its local shape,
        or a sparse one."""
        unit, param = self._locations[name]
        if not unit.added:
            while any(each.unit is unit for each in self._sums):
                self._advance()
            allocate_storage(unit.grads)
            unit.zero_gaps()
        total = param.of(unit.grads)
        if name in unit.added:
            total.add_(grad)
        elif grad.is_sparse:
            total.zero_().add_(grad)
        else:
            total.copy_(grad)
        unit.added.add(name)

    def reduce(self, name: str) -> None:
        """Start to sum the gradient of a unit over its axes. All contributions must be added
        before."""
        unit = self.units[name]
        missing = [param.spec.name for param in unit.ranges if param.spec.name not in unit.added]
        assert not missing, f"no gradient was added for {missing}"
        unit.added.clear()
        for axis, grads in unit.partial.items():
            sum_partial(grads, self.mesh.axes[axis])
        for bucket in self._buckets(unit):
            while sum(each.first_half for each in self._sums) >= IN_FLIGHT:
                self._advance()
            self._sums.append(self._start(unit, bucket))
            while self._sums and not self.overlap:
                self._advance()
        unit.is_reduced = True

    def _buckets(self, unit: Unit) -> Iterator[slice]:
        """Yield ranges of the shard: the same range of all shards is a bucket of at most
        `bucket_bytes`."""
        ranks = unit.shard_axis.size, unit.replicate_axis.size
        most = bucket_elements(*ranks, unit.grads.element_size(), self.bucket_bytes)
        for start in range(0, len(unit.shard), most):
            yield slice(start, min(start + most, len(unit.shard)))

    def _start(self, unit: Unit, bucket: slice) -> Sum:
        """Start to sum one bucket of a unit's gradient."""
        last = bucket.stop == len(unit.shard)
        if not self._scatters(unit):
            pending = unit.replicate_axis.all_reduce(unit.grads[bucket], dtype=self.reduce_dtype)
            return Sum(unit, pending, last)
        shards = unit.grads.view(unit.shard_axis.size, -1)
        rows = shards[:, bucket].contiguous()  # no copy if the unit is one bucket
        out = unit.grad_shard[bucket]
        pending = unit.shard_axis.reduce_scatter(rows, out, self.reduce_dtype, unit.is_reduced)
        return Sum(unit, pending, last)

    def _scatters(self, unit: Unit) -> bool:
        """Return whether sums of the unit go to a shard, which `finish` sums over replicas."""
        return unit.shard_axis.size > 1 or self.mesh.layout.shards("gradients")

    def _advance(self) -> None:
        """Wait for the oldest sum, or for its first half and start its second. Every rank does so
        at the same places of its table."""
        done = self._sums.popleft()
        following = done.pending.advance()
        if following is not None:
            self._sums.append(replace(done, pending=following, first_half=False))
        elif done.is_last and self.mesh.layout.shards("gradients"):
            free_storage(done.unit.grads)

    def finish(self) -> None:
        """Complete all gradients: wait for the sums into shards, then sum those over replicas and
        over the stages of a tied embedding."""
        while self._sums:
            self._advance()
        for unit in self.units.values():
            assert unit.is_reduced and not unit.added, (
                f"the gradient of {unit.name} was not reduced"
            )
            for bucket in self._buckets(unit) if self._scatters(unit) else ():
                unit.replicate_axis.all_reduce(
                    unit.grad_shard[bucket], dtype=self.reduce_dtype
                ).wait()
            unit.is_reduced = False
        for name in sorted(self.tied & self.units.keys()):
            for part in self.units[name].grad_shard.split(STEP_ELEMENTS):
                sum_partial([part], self.mesh.tied)

    def _counted(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank contributes to the norm; replicas are excluded. Yields
        whole shards where no tensor rank or stage holds the same."""
        if self.mesh.tp.size == 1 and not self.tied:
            for unit in self.units.values():
                if unit.replicate_axis.rank == 0:
                    yield unit.grad_shard
            return
        yield from super()._counted()

    # -- optimizer
    # --------------------------------------------------------------------------------------------

    def step(self, lr: float) -> None:
        self.num_steps += 1
        for unit in self.units.values():
            for part, decayed in unit.slices():
                grad = unit.grad_shard[part].to(unit.master.device).float() * self._grad_scale
                master = unit.master[part]
                exp_avg = unit.exp_avg[part]
                exp_avg_sq = unit.exp_avg_sq[part]
                self.update(master, grad, exp_avg, exp_avg_sq, self.num_steps, lr, decayed)
                if unit.master is not unit.weight_shard:
                    unit.weight_shard[part].copy_(master)
                self._release(master, exp_avg, exp_avg_sq)
            unit.is_whole = not self.mesh.layout.shards("optimizer")

    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        for unit in self.units.values():
            for spec, box, view in unit.owned(kind, self.mesh):
                yield spec, box, view
                if kind != "gradient":
                    self._release(view)

    def refresh(self) -> None:
        assert not self._gathers and not self._sums
        for unit in self.units.values():
            if unit.master is not unit.weight_shard:
                unit.weight_shard.copy_(unit.master)
                self._release(unit.master)
            unit.is_whole = not self.mesh.layout.shards("optimizer")

    def _release(self, *states: Tensor) -> None:
        if self.offload is not None:
            for flat in states:
                self.offload.release(flat)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of the buffers that this rank holds now, by the planner's rows;
        `offloaded` are those of optimizer states elsewhere."""
        units = self.units.values()
        states = (flat for unit in units for flat in (unit.master, unit.exp_avg, unit.exp_avg_sq))
        weights = [flat for unit in units for flat in (unit.weights, unit.weight_shard)]
        grads = [flat for unit in units for flat in (unit.grads, unit.grad_shard)]
        own_master = {id(flat) for flat in weights}
        optimizer = storage_bytes(flat for flat in states if id(flat) not in own_master)
        held = {"parameters": storage_bytes(weights), "gradients": storage_bytes(grads)}
        if self.offload is not None:
            return {**held, "optimizer": 0, "offloaded": optimizer}
        return {**held, "optimizer": optimizer}
