"""ZeRO (Rajbhandari et al. 2020): who holds the states of training, and how they come together when
they are needed.

Data-parallel ranks would each hold the same weights, gradients, master weights and moments. Stage 1
cuts the optimizer's share of them over the `shard` ranks, stage 2 the gradients as well, stage 3
the weights too. The store owns them all, unit by unit, and a stage is only what stays cut:

    GATHER  the shards' weights into the whole unit          stages 1 and 2: once a step; 3: around each use, then FREE
    REDUCE  the whole gradient into each rank's shard        stage 1: once a step; 2 and 3: each micro-batch
    step    the optimizer, on this rank's shard alone

With nothing cut a shard is the whole unit, and its gradient is summed over `replicate`, which then
is all data ranks: plain data parallel (`data.py` is that alone, to read first). In between lies
hybrid sharding, cut in groups and summed over them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shardwise.parallel.mesh import Axis, Mesh, Pending
from shardwise.parallel.offload import Offload
from shardwise.parallel.pipeline.actions import BUCKET_BYTES, IN_FLIGHT, bucket_elements
from shardwise.parallel.unit import SLICE_ELEMENTS, Owned, Unit, empty, fill, make_unit
from shardwise.params import Box, ParamSpec, is_first_holder

Update = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool], None]
"""update(master, grad, exp_avg, exp_avg_sq, step, lr, decayed): one optimizer step, in place, on
fp32 slices."""


class States(Protocol):
    """What training asks of a store, ours or that of FSDP."""

    num_steps: int

    def finish(self) -> None: ...
    def clip(self, max_norm: float) -> float: ...
    def step(self, lr: float) -> None: ...
    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]: ...
    def refresh(self) -> None: ...
    def gathered(self) -> Iterator[tuple[str, Tensor]]: ...
    def held_bytes(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Sum:
    """A sum of gradients under way. Its first half holds a buffer in which rows arrive."""

    unit: Unit
    pending: Pending
    is_last: bool
    """Whether it is of the unit's last bucket."""
    first_half: bool = True


class Store:
    """Weights, gradients and optimizer state of one rank.

    With bf16 the optimizer works on fp32 master weights, with fp32 on the weights themselves.
    Gradients are sums over micro-batches and ranks, never means: the loss was scaled. They travel
    in buckets of at most `bucket_bytes`; without `overlap` each sum is waited for where it is
    started.
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
        self.mesh = mesh
        self.update = update
        self.offload = offload
        self.num_steps = 0
        self.reduce_dtype = reduce_dtype
        self.bucket_bytes = bucket_bytes
        self.overlap = overlap
        self.tied = tied if mesh.tied.size > 1 else frozenset()
        """Units that the first and the last stage both hold."""
        self.units = {
            name: make_unit(name, specs, mesh, dtype, grad_dtype, offload)
            for name, specs in units.items()
        }
        self._place = {
            place.spec.name: (unit, place) for unit in self.units.values() for place in unit.places
        }
        self._gathers: dict[str, Pending] = {}
        self._sums: deque[Sum] = deque()
        self._grad_scale = 1.0
        self.scatters = mesh.shard.size > 1 or mesh.layout.cuts("gradients")

    # -- weights
    # ----------------------------------------------------------------------------------------------

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Leaves of the graph, views of the flat buffers. At stage 3 read them between `need` and
        `free`."""
        return {name: self._place[name][0].leaves[name] for name in names}

    def gather(self, name: str) -> None:
        """Start to collect a unit's weights from the ranks that share it, unless they are here."""
        unit = self.units[name]
        if not unit.is_whole:
            fill(unit.weights)
            self._gathers[name] = self.mesh.shard.all_gather(unit.weight_shard, unit.weights)
            unit.is_whole = True

    def need(self, names: Iterable[str]) -> None:
        """Wait until the weights of these units are whole."""
        for name in names:
            assert self.units[name].is_whole, f"the weights of {name} were not gathered"
            if name in self._gathers:
                self._gathers.pop(name).wait()

    def free(self, name: str) -> None:
        """Give back what a gather collected, at stage 3."""
        if self.mesh.layout.cuts("parameters"):
            self.need([name])
            empty(self.units[name].weights)
            self.units[name].is_whole = False

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, as computing sees it, by name; it is there until the next is asked
        for."""
        for name, unit in self.units.items():
            self.gather(name)
            self.need([name])
            for place in unit.places:
                yield place.spec.name, place.of(unit.weights)
            self.free(name)

    # -- gradients
    # --------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """Add one contribution to the gradient of a parameter, dense or sparse."""
        unit, place = self._place[name]
        if not unit.added:
            while any(each.unit is unit for each in self._sums):
                self._advance()
            fill(unit.grads)
            unit.zero_gaps()
        total = place.of(unit.grads)
        if name in unit.added:
            total.add_(grad)
        elif grad.is_sparse:
            total.zero_().add_(grad)
        else:
            total.copy_(grad)
        unit.added.add(name)

    def reduce(self, name: str) -> None:
        """Start the sum of a unit's gradient, which has had its last contribution, over the ranks
        that share it."""
        unit = self.units[name]
        missing = [place.spec.name for place in unit.places if place.spec.name not in unit.added]
        assert not missing, f"no gradient came for {missing}"
        unit.added.clear()
        for axis, terms in unit.terms.items():
            add_terms(terms, self.mesh.axes[axis])
        for bucket in self._buckets(unit):
            while sum(each.first_half for each in self._sums) >= IN_FLIGHT:
                self._advance()
            self._sums.append(self._start(unit, bucket))
            while self._sums and not self.overlap:
                self._advance()
        unit.is_reduced = True

    def _buckets(self, unit: Unit) -> Iterator[slice]:
        """Ranges of every rank's shard, such that a bucket of all of them has at most
        `bucket_bytes`."""
        most = bucket_elements(self.mesh.layout, unit.grads.element_size(), self.bucket_bytes)
        for start in range(0, len(unit.shard), most):
            yield slice(start, min(start + most, len(unit.shard)))

    def _start(self, unit: Unit, bucket: slice) -> Sum:
        """Start the sum of one bucket of a unit's gradient."""
        last = bucket.stop == len(unit.shard)
        if not self.scatters:
            return Sum(
                unit,
                self.mesh.replicate.all_reduce(unit.grads[bucket], dtype=self.reduce_dtype),
                last,
            )
        rows = unit.grads.view(self.mesh.shard.size, -1)[
            :, bucket
        ].contiguous()  # no copy if the unit is one bucket
        out = unit.grad_shard[bucket]
        return Sum(
            unit,
            self.mesh.shard.reduce_scatter(rows, out, self.reduce_dtype, unit.is_reduced),
            last,
        )

    def _advance(self) -> None:
        """Finish what was started first, or its first half. Every rank does so at the same places
        of its table."""
        done = self._sums.popleft()
        following = done.pending.advance()
        if following is not None:
            self._sums.append(replace(done, pending=following, first_half=False))
        elif done.is_last and self.mesh.layout.cuts("gradients"):
            empty(done.unit.grads)

    def finish(self) -> None:
        """Wait until every gradient is whole: in its shard, and there summed over the replicas."""
        while self._sums:
            self._advance()
        for unit in self.units.values():
            assert unit.is_reduced and not unit.added, (
                f"the gradient of {unit.name} was not reduced"
            )
            for bucket in self._buckets(unit) if self.scatters else ():
                self.mesh.replicate.all_reduce(
                    unit.grad_shard[bucket], dtype=self.reduce_dtype
                ).wait()
            unit.is_reduced = False
        for name in sorted(self.tied & self.units.keys()):
            for part in self.units[name].grad_shard.split(SLICE_ELEMENTS):
                add_terms([part], self.mesh.tied)

    def clip(self, max_norm: float) -> float:
        """The 2-norm of the whole gradient, each logical element counted once, summed in fp32 and
        fp64. The next step scales gradients so that it is at most `max_norm` (0: as they are)."""
        mine = (
            sum(sum_of_squares(grad) for grad in self._counted())
            if self.mesh.replicate.rank == 0
            else 0.0
        )
        norm = self.mesh.world.sum(mine)[0] ** 0.5
        self._grad_scale = min(1.0, max_norm / norm) if max_norm and norm else 1.0
        return norm

    def _counted(self) -> Iterator[Tensor]:
        """What the norm counts of this rank's gradients, flat: what several tensor ranks hold, on
        the first."""
        if self.mesh.tp.size == 1 and not self.tied:
            yield from (unit.grad_shard for unit in self.units.values())
            return
        for spec, box, view in self.owned("gradient"):
            if is_first_holder(spec, spec.part(box.part), self.mesh.layout, self.mesh.coord):
                yield view.flatten()

    # -- optimizer
    # --------------------------------------------------------------------------------------------

    def step(self, lr: float) -> None:
        """One optimizer step on this rank's shards; the gradients stay as they are."""
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
            unit.is_whole = not self.mesh.layout.cuts("optimizer")

    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """This rank's share of every parameter, rectangle by rectangle, as views: reading and
        writing both work. Those of `replicate` hold the same."""
        for unit in self.units.values():
            for spec, box, view in unit.owned(kind, self.mesh):
                yield spec, box, view
                if kind != "gradient":
                    self._release(view)

    def refresh(self) -> None:
        """Bring the weights in line with master weights that were written from outside."""
        assert not self._gathers and not self._sums
        for unit in self.units.values():
            if unit.master is not unit.weight_shard:
                unit.weight_shard.copy_(unit.master)
                self._release(unit.master)
            unit.is_whole = not self.mesh.layout.cuts("optimizer")

    def _release(self, *states: Tensor) -> None:
        if self.offload is not None:
            for flat in states:
                self.offload.release(flat)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that this rank holds now, by the planner's rows; what lies elsewhere
        is `offloaded`."""
        units = self.units.values()
        optimizer = storage_bytes(
            flat
            for unit in units
            for flat in (unit.master, unit.exp_avg, unit.exp_avg_sq)
            if flat is not unit.weight_shard
        )
        return {
            "parameters": storage_bytes(
                flat for unit in units for flat in (unit.weights, unit.weight_shard)
            ),
            "gradients": storage_bytes(
                flat for unit in units for flat in (unit.grads, unit.grad_shard)
            ),
            **(
                {"optimizer": optimizer}
                if self.offload is None
                else {"optimizer": 0, "offloaded": optimizer}
            ),
        }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes behind `tensors`, those of views that share counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def add_terms(terms: list[Tensor], axis: Axis) -> None:
    """Sum over an axis, in place and in fp32, what each of its ranks has one term of."""
    total = torch.cat([term.flatten().float() for term in terms])
    axis.all_reduce(total).wait()
    for term, summed in zip(terms, total.split([term.numel() for term in terms]), strict=True):
        term.copy_(summed.view_as(term))


def sum_of_squares(flat: Tensor) -> float:
    """In rows of fp32 sums, which are then added in fp64: long fp32 sums lose digits."""
    rows = flat[: flat.numel() // 4096 * 4096].view(-1, 4096)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32), flat[rows.numel() :].float()
    return sum(float(part.double().square().sum()) for part in norms)
