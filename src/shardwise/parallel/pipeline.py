"""Runs a lowered table. The executor decides nothing: it looks an action up and does it.

Gradients are asked for piece by piece with `torch.autograd.grad`, no hooks. F detaches its input, makes it a leaf, runs
the piece and keeps both ends of the graph; B pulls the cotangent through it, gives the weights' gradients to the store
and hands the input's on. What happens to units of state the store does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.model.batch import MicroBatch
from shardwise.model.layers import Attend, Rotation
from shardwise.parallel.schedule import Action, Piece
from shardwise.parallel.zero import Store


@dataclass(frozen=True)
class Context:
    """What every piece of one micro-batch shares."""

    microbatch: MicroBatch
    turned: Rotation | None
    attend: Attend


Run = Callable[[Mapping[str, Tensor], Tensor | None, Context], Tensor]
"""run(weights, x, context) -> y: one piece of the model; x is None for the first, y the summed loss for the last."""


@dataclass(frozen=True)
class Stage:
    """The pieces this rank computes, what each runs and the parameters it reads, and how a micro-batch's context is
    made."""

    pieces: Mapping[str, Piece]
    runs: Mapping[str, Run]
    parameters: Mapping[str, tuple[str, ...]]
    context: Callable[[MicroBatch], Context]
    repeated: frozenset[str] = frozenset()
    """The pieces whose forward is run again in the backward, from their input (full recompute)."""


class Executor(Protocol):
    """What runs a table: ours, or that of FSDP."""

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None: ...
    def finish(self) -> float: ...
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float: ...


@dataclass(frozen=True)
class Saved:
    """Both ends of the graph of one piece, from its F to its B; of one that is run again there the input alone."""

    x: Tensor | None
    y: Tensor | None
    weights: dict[str, Tensor]


class Pipeline:
    """Owns activations and cotangents; the store owns weights and gradients; the table owns time."""

    def __init__(self, stage: Stage, store: Store) -> None:
        self.stage, self.store = stage, store
        self._loss: Tensor | None = None
        self._saved: dict[tuple[int, str], Saved] = {}
        self._activations: dict[int, Tensor] = {}
        """Per micro-batch what goes up from piece to piece."""
        self._cotangents: dict[int, Tensor] = {}
        """Per micro-batch what goes down again."""
        self._contexts: dict[int, Context] = {}

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None:
        """Do one action; `scale` is the derivative of the step's loss by the summed loss of its tokens."""
        if action.kind == "F":
            self.forward(action, microbatches[action.microbatch])
        elif action.kind == "B":
            self.backward(action, scale)
        elif action.kind == "GATHER":
            self.store.gather(action.unit)
        elif action.kind == "FREE":
            self.store.free(action.unit)
        else:
            self.store.reduce(action.unit)

    def forward(self, action: Action, microbatch: MicroBatch) -> None:
        at = action.microbatch
        x = self._activations.pop(at, None)
        if x is None:
            self._contexts[at] = self.stage.context(microbatch)
        else:
            x = x.detach().requires_grad_()
        self.store.need(self.stage.pieces[action.piece].reads("F"))
        weights = self.store.weights(self.stage.parameters[action.piece])
        repeated = action.piece in self.stage.repeated
        with torch.set_grad_enabled(not repeated):
            y = self.stage.runs[action.piece](weights, x, self._contexts[at])
        self._saved[at, action.piece] = Saved(x, None if repeated else y, weights)
        if y.dim() == 0:
            self._loss = y.detach() if self._loss is None else self._loss + y.detach()
        else:
            self._activations[at] = y

    def backward(self, action: Action, scale: float) -> None:
        at = action.microbatch
        saved = self._saved.pop((at, action.piece))
        self.store.need(self.stage.pieces[action.piece].reads("B"))
        y = saved.y
        if y is None:
            with torch.enable_grad():
                y = self.stage.runs[action.piece](saved.weights, saved.x, self._contexts[at])
        dy = self._cotangents.pop(at, None)
        if dy is None:
            dy = torch.full_like(y, scale)
        inputs = ([] if saved.x is None else [saved.x]) + list(saved.weights.values())
        grads = list(torch.autograd.grad(y, inputs, dy))
        if saved.x is None:
            del self._contexts[at]
        else:
            self._cotangents[at] = grads.pop(0)
        for name, grad in zip(saved.weights, grads, strict=True):
            self.store.add(name, grad)

    def finish(self) -> float:
        """The summed loss of this rank's tokens in this step; asserts that nothing is left half done."""
        left = (self._saved, self._activations, self._cotangents, self._contexts)
        assert not any(left), "the table left work undone"
        loss, self._loss = self._loss, None
        return 0.0 if loss is None else loss.item()

    @torch.no_grad()
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float:
        """The summed loss of one micro-batch, by a table of forwards, without gradients."""
        context, x = self.stage.context(microbatch), None
        for action in table:
            if action.kind == "F":
                self.store.need(self.stage.pieces[action.piece].reads("F"))
                x = self.stage.runs[action.piece](self.store.weights(self.stage.parameters[action.piece]), x, context)
            else:
                self.execute(action, [], 0.0)
        assert x is not None
        return x.item()
