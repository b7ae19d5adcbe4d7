"""Data parallel in its simplest form: every rank has the whole model and its own sequences, and
after the backward each gradient is summed over ranks.

Read this first. The store in `zero.py` computes the same, and tests compare the two.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.state_store import Update


class DataParallel:
    """Weights, gradients and optimizer states of one rank, in fp32, in dictionaries by parameter
    name."""

    def __init__(self, mesh: Mesh, weights: Mapping[str, Tensor], update: Update) -> None:
        self.mesh = mesh
        self.update = update
        self.num_steps = 0
        self.master = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self.grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.exp_avg = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.exp_avg_sq = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.master[name] for name in names}

    def need(self, units: Iterable[str]) -> None:
        """Do nothing: weights are never sharded."""

    def add(self, name: str, grad: Tensor) -> None:
        self.grads[name] += grad

    def reduce(self, unit: str) -> None:
        """Do nothing: `finish` sums all gradients after the backward."""

    def finish(self) -> None:
        for grad in self.grads.values():
            self.mesh.data.all_reduce(grad).wait()

    def clip(self, max_norm: float) -> float:
        norm = torch.stack([grad.norm() for grad in self.grads.values()]).norm().item()
        if max_norm and norm > max_norm:
            for grad in self.grads.values():
                grad.mul_(max_norm / norm)
        return norm

    def step(self, lr: float) -> None:
        self.num_steps += 1
        for name, weight in self.master.items():
            decayed = weight.dim() > 1
            states = self.exp_avg[name], self.exp_avg_sq[name]
            self.update(weight.data, self.grads[name], *states, self.num_steps, lr, decayed)
            self.grads[name].zero_()
