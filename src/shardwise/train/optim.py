"""The optimizer and its learning rate."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Schedule = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on fp32 tensors, in place. Weight decay applies to
    parameters that are `decayed`."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def update(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: int,
        lr: float,
        decayed: bool,
    ) -> None:
        """Take step `step`, counting from 1, with the fused kernel of torch."""
        steps_before = torch.tensor(float(step - 1), device=master.device)
        adamw(
            [master.detach()],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [steps_before],
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=self.weight_decay if decayed else 0.0,
            eps=self.eps,
            maximize=False,
        )


def adamw_naive(
    optimizer: AdamW,
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    decayed: bool,
) -> None:
    """Take the same step as `AdamW.update` in plain operations: the definition that it is tested
    against."""
    if decayed:
        weight.mul_(1 - lr * optimizer.weight_decay)
    m.mul_(optimizer.beta1).add_(grad, alpha=1 - optimizer.beta1)
    v.mul_(optimizer.beta2).addcmul_(grad, grad, value=1 - optimizer.beta2)
    m_hat = m / (1 - optimizer.beta1**step)
    v_hat = v / (1 - optimizer.beta2**step)
    weight.sub_(lr * m_hat / (v_hat.sqrt() + optimizer.eps))


@dataclass(frozen=True)
class LearningRate:
    """Learning rate as a pure function of the step.

    All schedules warm up linearly over `warmup_steps`. Then `cosine` decays to `final` x `peak` at
    `steps`; `wsd` (warm-up, stable, decay) stays at the peak and decays linearly over the last
    `decay_steps`; `constant` stays at the peak.
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final: float = 0.1
    decay_steps: int = 0

    def at(self, step: int) -> float:
        """Return the learning rate of `step`, counting from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * (self.final + (1 - self.final) * self.remaining(step))

    def remaining(self, step: int) -> float:
        """Return the share of the decay that is still to come: 1 before it begins, 0 at its end."""
        if self.schedule == "cosine":
            done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            return (1 + math.cos(math.pi * min(1.0, done))) / 2
        if self.schedule == "wsd" and self.decay_steps:
            return min(1.0, max(0.0, (self.steps - step) / self.decay_steps))
        return 1.0
