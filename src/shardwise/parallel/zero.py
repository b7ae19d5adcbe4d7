"""Who holds the states of training. The store owns every weight, gradient, master weight and moment of this rank, unit
by unit (the embedding, each block, the final norm), each unit flat so that one collective moves all of it.

ZeRO (Rajbhandari et al. 2020) cuts the flat units over the `shard` ranks. With nothing cut, a shard is the whole unit
and its gradient is summed over `replicate`, which then is all data ranks: plain data parallel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.model.checkpoint import STATES, State
from shardwise.parallel.mesh import Mesh, Pending
from shardwise.params import ParamSpec, local_shape

SLICE_ELEMENTS = 1 << 21
"""The step works through a unit in slices of this many elements: what it casts stays in the cache."""

Update = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool], None]
"""update(master, grad, exp_avg, exp_avg_sq, step, lr, decayed): one optimizer step, in place, on fp32 slices."""


@dataclass
class Unit:
    """One unit of state: matrices first, then norms and biases, so that weight decay covers one contiguous range."""

    name: str
    specs: tuple[ParamSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    weights: Tensor
    grads: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_decayed: int
    added: set[str] = field(default_factory=set)
    """Parameters whose gradient of this step has begun: the first contribution overwrites what the last step left."""

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The flat buffer's part of each parameter, in its shape."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        pieces = zip(self.specs, self.shapes, flat.split(sizes), strict=True)
        return {spec.name: part.view(shape) for spec, shape, part in pieces}

    def slices(self) -> Iterator[tuple[slice, bool]]:
        """Ranges of the flat buffer with whether they decay."""
        for start, stop, decayed in ((0, self.num_decayed, True), (self.num_decayed, self.weights.numel(), False)):
            for a in range(start, stop, SLICE_ELEMENTS):
                yield slice(a, min(a + SLICE_ELEMENTS, stop)), decayed


class Store:
    """Weights, gradients and optimizer state of one rank.

    `weights` are leaf views of the flat buffers in `dtype`; with bf16 the optimizer works on fp32 master weights, with
    fp32 on the weights themselves. Gradients are sums over micro-batches and ranks, never means: the loss was scaled.
    """

    def __init__(
        self, mesh: Mesh, units: dict[str, tuple[ParamSpec, ...]], dtype: torch.dtype, grad_dtype: torch.dtype,
        update: Update,
    ) -> None:  # fmt: skip
        assert mesh.shard.size == 1, "ZeRO stages are not cut yet"
        self.mesh, self.update, self.num_steps = mesh, update, 0
        self.units = {name: make_unit(name, specs, mesh, dtype, grad_dtype) for name, specs in units.items()}
        self._weights: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._unit_of: dict[str, Unit] = {}
        self._pending: list[Pending] = []
        self._grad_scale = 1.0
        for unit in self.units.values():
            leaves = {name: view.requires_grad_() for name, view in unit.views(unit.weights.data).items()}
            self._weights |= leaves
            self._grads |= unit.views(unit.grads)
            self._unit_of |= dict.fromkeys(leaves, unit)

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: self._weights[name] for name in names}

    def add(self, name: str, grad: Tensor) -> None:
        """Add one contribution to the gradient of a parameter."""
        added = self._unit_of[name].added
        if name in added:
            self._grads[name].add_(grad)
        else:
            self._grads[name].copy_(grad)
            added.add(name)

    def reduce(self, name: str) -> None:
        """Start the sum of a unit's gradient, which has had its last contribution, over the replicas."""
        unit = self.units[name]
        missing = [spec.name for spec in unit.specs if spec.name not in unit.added]
        assert not missing, f"no gradient came for {missing}"
        unit.added.clear()
        self._pending.append(self.mesh.replicate.all_reduce(unit.grads, dtype=torch.float32))

    def finish(self) -> None:
        """Wait until every gradient is whole."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def clip(self, max_norm: float) -> float:
        """The 2-norm of the whole gradient, each logical element counted once, summed in fp32 and fp64. The next step
        scales gradients so that it is at most `max_norm` (0: as they are)."""
        owned = self.mesh.replicate.rank == 0
        mine = sum(sum_of_squares(unit.grads) for unit in self.units.values()) if owned else 0.0
        norm = self.mesh.world.sum(mine)[0] ** 0.5
        self._grad_scale = min(1.0, max_norm / norm) if max_norm and norm else 1.0
        return norm

    def step(self, lr: float) -> None:
        """One optimizer step on what this rank owns; the gradients stay as they are."""
        self.num_steps += 1
        for unit in self.units.values():
            for part, decayed in unit.slices():
                grad = unit.grads[part].float() * self._grad_scale
                master = unit.master[part]
                self.update(master, grad, unit.exp_avg[part], unit.exp_avg_sq[part], self.num_steps, lr, decayed)
                if unit.master is not unit.weights:
                    unit.weights[part].copy_(master)

    def state(self) -> Iterator[tuple[str, State, Tensor]]:
        """Every parameter's master weight and moments in its local shape, as views: reading and writing both work."""
        for unit in self.units.values():
            for kind in STATES:
                for name, view in unit.views(getattr(unit, kind)).items():
                    yield name, kind, view

    def set_weights(self, name: str, values: Tensor) -> None:
        """Set a parameter (in its local shape) before the first step."""
        unit = self._unit_of[name]
        unit.views(unit.master)[name].copy_(values)
        unit.views(unit.weights)[name].copy_(values)

    def refresh(self) -> None:
        """Bring the weights in line with master weights that were written from outside."""
        for unit in self.units.values():
            if unit.master is not unit.weights:
                unit.weights.copy_(unit.master)


def make_unit(name: str, specs: tuple[ParamSpec, ...], mesh: Mesh, dtype: torch.dtype, grad_dtype: torch.dtype) -> Unit:
    ordered = tuple(sorted(specs, key=lambda spec: not spec.decayed))  # stable: model order within each kind
    shapes = tuple(local_shape(spec, mesh.layout, mesh.coord) for spec in ordered)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    num_decayed = sum(size for spec, size in zip(ordered, sizes, strict=True) if spec.decayed)

    def flat(of: torch.dtype) -> Tensor:
        return torch.zeros(sum(sizes), dtype=of, device=mesh.device)

    weights = flat(dtype)
    master = weights if dtype == torch.float32 else flat(torch.float32)
    moments = flat(torch.float32), flat(torch.float32)
    return Unit(name, ordered, shapes, weights, flat(grad_dtype), master, *moments, num_decayed)


def sum_of_squares(flat: Tensor) -> float:
    """In rows of fp32 sums, which are then added in fp64: long fp32 sums lose digits."""
    rows = flat[: flat.numel() // 4096 * 4096].view(-1, 4096)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32), flat[rows.numel() :].float()
    return sum(float(part.double().square().sum()) for part in norms)
