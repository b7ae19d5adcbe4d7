"""A store of training states: weights, gradients and optimizer states of one rank.

There are two: `zero.Store`, which shards flat buffers, and `fsdp.FsdpStore`, which shards each
parameter. Clipping is the same for both and is defined here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from shardwise.formats.run_checkpoint import State
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.params import ParamSpec
from shardwise.shards import Box, is_first_holder

Owned = State | Literal["gradient"]
Update = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool], None]
"""update(master, grad, exp_avg, exp_avg_sq, step, lr, decayed): one optimizer step, in place, on
fp32 slices."""

STEP_ELEMENTS = 1 << 21
"""The optimizer updates a shard in slices of this many elements: casts of them stay in the
cache."""


class StateStore(ABC):
    """Training states of one rank, as the training loop and checkpoints use them.

    Attributes:
        mesh: the axes over which states are sharded and summed.
        update: the optimizer.
        num_steps: optimizer steps taken so far.
    """

    def __init__(self, mesh: Mesh, update: Update) -> None:
        self.mesh = mesh
        self.update = update
        self.num_steps = 0
        self._grad_scale = 1.0

    @abstractmethod
    def finish(self) -> None:
        """Wait until the gradients of a step are complete sums."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Take one optimizer step on this rank's shards; gradients stay as they are."""

    @abstractmethod
    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """Yield this rank's shard of every parameter, box by box, as views that can be read and
        written. The `replicate` ranks of a unit own the same boxes."""

    @abstractmethod
    def refresh(self) -> None:
        """Update the weights from master weights that were written from outside."""

    @abstractmethod
    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every local parameter in full, as the model computes with it, by name. It is valid
        until the next is yielded."""

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of the buffers that this rank holds now, by the planner's rows."""

    def clip(self, max_norm: float) -> float:
        """Return the 2-norm of the whole gradient, each logical element counted once, summed in
        fp32 and fp64. The next step scales gradients so that it is at most `max_norm` (0: no
        clipping)."""
        local = sum(sum_of_squares(grad) for grad in self._counted())
        norm = self.mesh.world.sum(local)[0] ** 0.5
        self._grad_scale = min(1.0, max_norm / norm) if max_norm and norm else 1.0
        return norm

    def _counted(self) -> Iterator[Tensor]:
        """Yield the gradients that the norm counts on this rank, flat: of replicas the first."""
        for spec, box, view in self.owned("gradient"):
            if is_first_holder(spec, spec.part(box.part), self.mesh.layout, self.mesh.coord):
                yield view.flatten()


def sum_partial(grads: list[Tensor], axis: Axis) -> None:
    """Sum gradients of which each rank of an axis has a partial sum, in place and in fp32."""
    total = torch.cat([grad.flatten().float() for grad in grads])
    axis.all_reduce(total).wait()
    for grad, summed in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def sum_of_squares(flat: Tensor) -> float:
    """Return the sum of squares of a flat tensor: rows of fp32 sums, which are added in fp64, since
    long fp32 sums lose digits."""
    rows = flat[: flat.numel() // 4096 * 4096].view(-1, 4096)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32), flat[rows.numel() :].float()
    return sum(float(part.double().square().sum()) for part in norms)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`; a shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
