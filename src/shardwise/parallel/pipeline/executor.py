"""Executes a lowered table. The executor decides nothing: it looks an action up and runs it.

Gradients are computed piece by piece with `torch.autograd.grad`, without hooks. F detaches its
input, makes it a leaf, runs the piece and saves both ends of the graph. B takes the gradient of the
output through it, adds the gradients of the weights to the store and passes on that of the input.
Where a table splits B, I computes the gradient of the input alone, and W what is left: products
that the weights put on a tape (`deferred.py`), and gradients of small weights, which came with I.

Between stages, SEND and RECV move activations up and their gradients down while the rank computes.
The store handles actions on units of state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.kernels.interface import RopeTables
from shardwise.model.batch import MicroBatch
from shardwise.model.layers import Attend
from shardwise.parallel.mesh import Mesh, Pending
from shardwise.parallel.pipeline.actions import Action, Piece
from shardwise.parallel.pipeline.deferred import Deferred, DeferredGradient
from shardwise.parallel.zero import Store


@dataclass(frozen=True)
class Context:
    """Inputs that all pieces of one micro-batch share."""

    microbatch: MicroBatch
    rope: RopeTables | None
    attend: Attend
    dtype: torch.dtype


Run = Callable[[Mapping[str, Tensor], Tensor | None, Context], Tensor]
"""run(weights, x, context) -> y: one piece of the model. x is None for the first piece; y is the
summed loss for the last."""


@dataclass(frozen=True)
class Work:
    """The compute of a rank.

    Attributes:
        pieces: the pieces of this rank, by name
        runs: the function of each piece
        parameters: names of the parameters that each piece reads
        context: creates the context of a micro-batch
        stage_buffer: allocates an input or output of a stage for a micro-batch
        first_piece: the piece whose backward is the last of a micro-batch on this rank
        recomputed: pieces that save only their input and repeat their forward in the backward
        deferred: names of the weights whose gradient is computed in W
    """

    pieces: Mapping[str, Piece]
    runs: Mapping[str, Run]
    parameters: Mapping[str, tuple[str, ...]]
    context: Callable[[MicroBatch], Context]
    stage_buffer: Callable[[Context], Tensor]
    first_piece: str
    recomputed: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()


@dataclass
class Saved:
    """Tensors that a piece saves from its F to its W.

    Attributes:
        x, y: both ends of the graph, from F to B or I; only x if the piece is recomputed
        weights: the weights that the piece reads
        tape: factors of deferred gradients, from I to W
        gradients: gradients that are not deferred, by name, from I to W
    """

    x: Tensor | None
    y: Tensor | None
    weights: dict[str, Tensor]
    tape: list[DeferredGradient] = field(default_factory=list)
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)


Key = tuple[int, int]
"""(virtual stage, micro-batch)."""
Transfer = tuple[str, int, int]
"""(F or B, virtual stage, micro-batch)."""


class Pipeline:
    """The executor of a pipeline rank. It owns activations and their gradients; the store owns
    weights and the gradients of weights; the table decides when each lives."""

    def __init__(self, work: Work, store: Store, mesh: Mesh) -> None:
        self.work = work
        self.store = store
        self.mesh = mesh
        self._loss: Tensor | None = None
        self._saved: dict[tuple[str, int], Saved] = {}  # by piece and micro-batch
        self._activations: dict[Key, Tensor] = {}  # input of the next piece
        self._cotangents: dict[Key, Tensor] = {}  # gradient of the output of the next piece down
        self._arriving: dict[Transfer, tuple[Tensor, Pending]] = {}
        self._leaving: dict[Transfer, tuple[Tensor, Pending]] = {}
        self._contexts: dict[int, Context] = {}  # by micro-batch

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None:
        """Run one action. `scale` is the derivative of the loss of the step by the summed loss of
        its tokens."""
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
        """Run the forward of a piece: save both ends of its graph, or its input alone if it is
        recomputed, and pass its output on."""
        key = action.stage, action.microbatch
        self.wait_arrival("F", key, self._activations)
        x = self._activations.pop(key, None)
        if x is not None:
            x = x.detach().requires_grad_()
        self.store.need(self.work.pieces[action.piece].reads("F"))
        saved = Saved(x, None, self.store.weights(self.work.parameters[action.piece]))
        recomputed = action.piece in self.work.recomputed
        with torch.set_grad_enabled(not recomputed):
            y = self.run(action.piece, saved, self.context(action.microbatch, microbatch))
        self._saved[action.piece, action.microbatch] = saved
        saved.y = None if recomputed else y
        if y.dim() == 0:
            self._loss = y.detach() if self._loss is None else self._loss + y.detach()
        else:
            self._activations[key] = y

    def run(self, piece: str, saved: Saved, context: Context) -> Tensor:
        """Return the output of a piece for the saved input and weights."""
        weights: dict[str, Tensor] = {
            name: Deferred(name, weight, saved.tape) if name in self.work.deferred else weight  # type: ignore[misc]
            for name, weight in saved.weights.items()
        }
        return self.work.runs[piece](weights, saved.x, context)

    def context(self, index: int, microbatch: MicroBatch) -> Context:
        if index not in self._contexts:
            self._contexts[index] = self.work.context(microbatch)
        return self._contexts[index]

    def backward(self, action: Action, microbatch: MicroBatch, scale: float) -> None:
        """Run B of a piece, or I, its first half: the gradient of its input, and those of weights
        that are not deferred."""
        key = action.stage, action.microbatch
        self.ensure_forward(action, microbatch)
        saved = self._saved[action.piece, action.microbatch]
        self.store.need(self.work.pieces[action.piece].reads(action.kind))
        self.recompute(action, saved)
        self.wait_arrival("B", key, self._cotangents)
        dx = self.differentiate(saved, self._cotangents.pop(key, None), scale)
        if dx is not None:
            self._cotangents[key] = dx
        if action.piece == self.work.first_piece:
            del self._contexts[action.microbatch]
        if action.kind == "B":
            self.weights_backward(action)

    def ensure_forward(self, action: Action, microbatch: MicroBatch) -> None:
        """Run the forward of a piece whose backward is fused with it, if the table has no F for
        it."""
        if (action.piece, action.microbatch) not in self._saved:
            assert self.work.pieces[action.piece].fused_backward, f"{action} has no forward"
            self.forward(action, microbatch)

    def recompute(self, action: Action, saved: Saved) -> None:
        """Repeat the forward of a piece from its saved input, if its output was not saved."""
        if saved.y is None:
            with torch.enable_grad():
                saved.y = self.run(action.piece, saved, self._contexts[action.microbatch])

    def differentiate(self, saved: Saved, dy: Tensor | None, scale: float) -> Tensor | None:
        """Return the gradient of the input, None for the first piece of the model. Saves the
        gradients of weights that are not deferred, and releases the graph. Without `dy` the output
        is the summed loss, whose gradient is `scale`."""
        assert saved.y is not None
        if dy is None:
            dy = torch.full_like(saved.y, scale)
        weights = {
            name: weight for name, weight in saved.weights.items() if name not in self.work.deferred
        }
        inputs = ([] if saved.x is None else [saved.x]) + list(weights.values())
        grads = list(torch.autograd.grad(saved.y, inputs, dy))
        dx = None if saved.x is None else grads.pop(0)
        saved.x = saved.y = None
        saved.gradients = list(zip(weights, grads, strict=True))
        return dx

    def weights_backward(self, action: Action) -> None:
        """Run W of a piece, or the second half of B: add the gradients of its weights to the
        store."""
        saved = self._saved.pop((action.piece, action.microbatch))
        for deferred in saved.tape:
            self.store.add(deferred.name, deferred.gradient())
        for name, grad in saved.gradients:
            self.store.add(name, grad)

    # -- transfers between stages
    # -----------------------------------------------------------------------------

    def receive(self, action: Action, microbatch: MicroBatch) -> None:
        buffer = self.work.stage_buffer(self.context(action.microbatch, microbatch))
        axis, step = (self.mesh.pp, -1) if action.piece == "F" else (self.mesh.pp_down, 1)
        pending = axis.receive(buffer, axis.rank + step)
        self._arriving[action.piece, action.stage, action.microbatch] = buffer, pending

    def wait_arrival(self, what: str, key: Key, into: dict[Key, Tensor]) -> None:
        """Wait for a transfer from a neighbouring stage, if one is arriving, and store it in
        `into`. A gradient that comes back implies that the activations have left."""
        arriving = self._arriving.pop((what, *key), None)
        if arriving is not None:
            into[key], pending = arriving
            pending.wait()
            if what == "B":
                self.wait_sent(("F", *key))

    def send(self, action: Action) -> None:
        key = action.stage, action.microbatch
        forward = action.piece == "F"
        axis, step = (self.mesh.pp, 1) if forward else (self.mesh.pp_down, -1)
        outputs = self._activations if forward else self._cotangents
        x = outputs.pop(key).detach().contiguous()
        self._leaving[action.piece, *key] = x, axis.send(x, axis.rank + step)

    def wait_sent(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            _, pending = self._leaving.pop(transfer)
            pending.wait()

    # -- a step
    # ----------------------------------------------------------------------------------------------

    def finish(self) -> float:
        """End a step and return the summed loss of this rank's tokens. Asserts that no action is
        left half done."""
        self.wait_sent(*self._leaving)
        unfinished = self._saved, self._activations, self._cotangents, self._arriving
        assert not any(unfinished) and not self._contexts, "the table left work undone"
        loss = self._loss
        self._loss = None
        return 0.0 if loss is None else loss.item()

    @torch.no_grad()
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float:
        """Return the summed loss of one micro-batch, without gradients; 0 where the head is on
        another rank. `table` is the lowered table of one forward."""
        loss = 0.0
        for action in table:
            if action.kind != "F":
                self.execute(action, [microbatch], 0.0)
                continue
            key = action.stage, action.microbatch
            self.wait_arrival("F", key, self._activations)
            self.store.need(self.work.pieces[action.piece].reads("F"))
            weights = self.store.weights(self.work.parameters[action.piece])
            x = self._activations.pop(key, None)
            y = self.work.runs[action.piece](weights, x, self.context(key[1], microbatch))
            del x  # free it before the next piece runs
            if y.dim() == 0:
                loss = y.item()
            else:
                self._activations[key] = y
        self.wait_sent(*self._leaving)
        self._contexts.clear()
        return loss
