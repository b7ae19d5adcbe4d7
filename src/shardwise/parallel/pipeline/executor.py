"""Runs a lowered table. The executor decides nothing: it looks an action up and does it.

Gradients are asked for piece by piece with `torch.autograd.grad`, no hooks. F detaches its input,
makes it a leaf, runs the piece and keeps both ends of the graph; B pulls the cotangent through it,
gives the weights' gradients to the store and hands the input's on. Where a table splits B, I does
so for the input alone and W has what is left: products that the weights put on a tape
(`deferred.py`), and the gradients of small weights, which came with I.

Between stages SEND and RECV move activations up and cotangents down, beside the work. What happens
to units of state the store does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwise.kernels.interface import RopeTables
from shardwise.model.batch import MicroBatch
from shardwise.model.layers import Attend
from shardwise.parallel.mesh import Mesh, Pending
from shardwise.parallel.pipeline.actions import Action, Piece
from shardwise.parallel.pipeline.deferred import Deferred, Owed
from shardwise.parallel.zero import Store


@dataclass(frozen=True)
class Context:
    """What every piece of one micro-batch shares."""

    microbatch: MicroBatch
    rope: RopeTables | None
    attend: Attend
    dtype: torch.dtype


Run = Callable[[Mapping[str, Tensor], Tensor | None, Context], Tensor]
"""run(weights, x, context) -> y: one piece of the model; x is None for the first, y the summed loss
for the last."""


@dataclass(frozen=True)
class Work:
    """The pieces this rank computes, what each runs and the parameters it reads, and how a
    micro-batch's context is made."""

    pieces: Mapping[str, Piece]
    runs: Mapping[str, Run]
    parameters: Mapping[str, tuple[str, ...]]
    context: Callable[[MicroBatch], Context]
    between: Callable[[Context], Tensor]
    """Room for what one stage gives another of a micro-batch."""
    first: str
    """The piece whose backward is the last of a micro-batch on this rank."""
    repeated: frozenset[str] = frozenset()
    """The pieces whose forward is run again in the backward, from their input (full recompute)."""
    deferred: frozenset[str] = frozenset()
    """The weights whose gradient waits for W, by name."""


class Executor(Protocol):
    """What runs a table: ours, or that of FSDP."""

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None: ...
    def finish(self) -> float: ...
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float: ...


@dataclass
class Saved:
    """Both ends of the graph of one piece, from its F to its B; of one that is run again there the
    input alone. From I to W, what the weights' gradients are made of, or already are."""

    x: Tensor | None
    y: Tensor | None
    weights: dict[str, Tensor]
    tape: list[Owed] = field(default_factory=list)
    small: list[tuple[str, Tensor]] = field(default_factory=list)


Key = tuple[int, int]
"""(virtual stage, micro-batch)."""


class Pipeline:
    """Owns activations and cotangents; the store owns weights and gradients; the table owns
    time."""

    def __init__(self, work: Work, store: Store, mesh: Mesh) -> None:
        self.work = work
        self.store = store
        self.mesh = mesh
        self._loss: Tensor | None = None
        self._saved: dict[tuple[str, int], Saved] = {}
        """By piece and micro-batch."""
        self._activations: dict[Key, Tensor] = {}
        """What goes up from piece to piece."""
        self._cotangents: dict[Key, Tensor] = {}
        """What goes down again."""
        self._arriving: dict[tuple[str, int, int], tuple[Tensor, Pending]] = {}
        """By what it is (F or B), virtual stage and micro-batch; so is what is on its way from
        here."""
        self._leaving: dict[tuple[str, int, int], tuple[Tensor, Pending]] = {}
        self._contexts: dict[int, Context] = {}

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None:
        """Do one action; `scale` is the derivative of the step's loss by the summed loss of its
        tokens."""
        if action.kind == "F":
            self.forward(action, microbatches[action.microbatch])
        elif action.kind in "BI":
            self.backward(action, microbatches[action.microbatch], scale)
        elif action.kind == "W":
            self.weights_backward(action)
        elif action.kind == "RECV":
            self.receive(action, microbatches[action.microbatch])
        elif action.kind == "SEND":
            self.send(action)
        elif action.kind == "GATHER":
            self.store.gather(action.unit)
        elif action.kind == "FREE":
            self.store.free(action.unit)
        else:
            self.store.reduce(action.unit)

    # -- compute
    # ----------------------------------------------------------------------------------------------

    def forward(self, action: Action, microbatch: MicroBatch) -> None:
        key = action.stage, action.microbatch
        self.arrive("F", key, self._activations)
        x = self._activations.pop(key, None)
        if x is not None:
            x = x.detach().requires_grad_()
        self.store.need(self.work.pieces[action.piece].reads("F"))
        saved = Saved(x, None, self.store.weights(self.work.parameters[action.piece]))
        repeated = action.piece in self.work.repeated
        with torch.set_grad_enabled(not repeated):
            y = self.run(action.piece, saved, self.context(action.microbatch, microbatch))
        self._saved[action.piece, action.microbatch] = saved
        saved.y = None if repeated else y
        if y.dim() == 0:
            self._loss = y.detach() if self._loss is None else self._loss + y.detach()
        else:
            self._activations[key] = y

    def run(self, piece: str, saved: Saved, context: Context) -> Tensor:
        weights: dict[str, Tensor] = {
            name: Deferred(name, weight, saved.tape) if name in self.work.deferred else weight  # type: ignore[misc]
            for name, weight in saved.weights.items()
        }
        return self.work.runs[piece](weights, saved.x, context)

    def context(self, at: int, microbatch: MicroBatch) -> Context:
        if at not in self._contexts:
            self._contexts[at] = self.work.context(microbatch)
        return self._contexts[at]

    def backward(self, action: Action, microbatch: MicroBatch, scale: float) -> None:
        """B, or the first half of it; of a piece that has no F, that as well."""
        key = (action.stage, action.microbatch)
        piece = self.work.pieces[action.piece]
        if (action.piece, action.microbatch) not in self._saved:
            assert piece.at_once, f"{action} comes without a forward"
            self.forward(action, microbatch)
        saved = self._saved[action.piece, action.microbatch]
        self.store.need(piece.reads(action.kind))
        if saved.y is None:
            with torch.enable_grad():
                saved.y = self.run(action.piece, saved, self._contexts[action.microbatch])
        self.arrive("B", key, self._cotangents)
        dy = self._cotangents.pop(key, None)
        if dy is None:
            dy = torch.full_like(saved.y, scale)
        asked = {
            name: weight for name, weight in saved.weights.items() if name not in self.work.deferred
        }
        inputs = ([] if saved.x is None else [saved.x]) + list(asked.values())
        grads = list(torch.autograd.grad(saved.y, inputs, dy))
        if saved.x is not None:
            self._cotangents[key] = grads.pop(0)
        saved.x = saved.y = None
        saved.small = list(zip(asked, grads, strict=True))
        if action.piece == self.work.first:
            del self._contexts[action.microbatch]
        if action.kind == "B":
            self.weights_backward(action)

    def weights_backward(self, action: Action) -> None:
        saved = self._saved.pop((action.piece, action.microbatch))
        for owed in saved.tape:
            self.store.add(owed.name, owed.gradient())
        for name, grad in saved.small:
            self.store.add(name, grad)

    # -- between stages
    # ---------------------------------------------------------------------------------------

    def receive(self, action: Action, microbatch: MicroBatch) -> None:
        room = self.work.between(self.context(action.microbatch, microbatch))
        axis, step = (self.mesh.pp, -1) if action.piece == "F" else (self.mesh.pp_down, 1)
        pending = axis.receive(room, axis.rank + step)
        self._arriving[action.piece, action.stage, action.microbatch] = room, pending

    def arrive(self, what: str, key: Key, into: dict[Key, Tensor]) -> None:
        """Wait for what the stage beside this one has sent, if it is still on its way. A gradient
        that comes back says that the activations have arrived."""
        arriving = self._arriving.pop((what, *key), None)
        if arriving is not None:
            into[key], pending = arriving
            pending.wait()
            if what == "B":
                self.leave(("F", *key))

    def send(self, action: Action) -> None:
        key = action.stage, action.microbatch
        axis, step = (self.mesh.pp, 1) if action.piece == "F" else (self.mesh.pp_down, -1)
        x = (
            (self._activations if action.piece == "F" else self._cotangents)
            .pop(key)
            .detach()
            .contiguous()
        )
        self._leaving[action.piece, *key] = x, axis.send(x, axis.rank + step)

    # -- a step
    # -----------------------------------------------------------------------------------------------

    def finish(self) -> float:
        """The summed loss of this rank's tokens in this step; asserts that nothing is left half
        done."""
        self.leave(*self._leaving)
        left = (self._saved, self._activations, self._cotangents, self._arriving, self._contexts)
        assert not any(left), "the table left work undone"
        loss = self._loss
        self._loss = None
        return 0.0 if loss is None else loss.item()

    def leave(self, *sent: tuple[str, int, int]) -> None:
        """Wait until these have left."""
        for each in sent:
            _, pending = self._leaving.pop(each)
            pending.wait()

    @torch.no_grad()
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float:
        """The summed loss of one micro-batch, by a table of forwards, without gradients; 0 where
        the head is on another rank."""
        loss = 0.0
        for action in table:
            if action.kind != "F":
                self.execute(action, [microbatch], 0.0)
                continue
            key = (action.stage, action.microbatch)
            piece = action.piece
            self.arrive("F", key, self._activations)
            self.store.need(self.work.pieces[piece].reads("F"))
            weights = self.store.weights(self.work.parameters[piece])
            y = self.work.runs[piece](
                weights, self._activations.pop(key, None), self.context(key[1], microbatch)
            )
            if y.dim() == 0:
                loss = y.item()
            else:
                self._activations[key] = y
        self.leave(*self._leaving)
        self._contexts.clear()
        return loss
