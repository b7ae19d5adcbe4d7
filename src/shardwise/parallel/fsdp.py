"""PyTorch's own ZeRO-3, `fully_shard` (FSDP2), behind the interface of our store and pipeline.

FSDP lives in hooks of Modules that are called: before a module's forward and backward it gathers
the module's weights, after them it frees them, and after the backward it sums their gradients into
the shard. So the model's one definition is wrapped in Modules here, one for each block and one for
the rest, and each is a unit of communication.

Every parameter is cut on its own, by rows, as `torch.chunk` cuts: all ranks but the last hold
ceil(rows / ranks) rows, and what travels is padded to that. FSDP knows weights and gradients; the
optimizer's state is ours, on the same rows. Under tensor parallel what it cuts is the part that
this tensor rank has of a parameter, over those that have the same.

FSDP runs inside each group of data ranks. Once a step `finish` adds the sums that it does not know
of: over the groups of hybrid sharding, and over tensor ranks of what each of them has one term of.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise.kernels.interface import TrainingKernels
from shardwise.layout import AxisName, Layout
from shardwise.model.batch import MicroBatch
from shardwise.model.loss import cross_entropy
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.pipeline.actions import Action, accumulate
from shardwise.parallel.pipeline.executor import Context
from shardwise.parallel.unit import SLICE_ELEMENTS, Owned
from shardwise.parallel.zero import Update, add_terms, storage_bytes, sum_of_squares
from shardwise.params import (
    Box,
    ParamSpec,
    boxes,
    boxes_within,
    is_first_holder,
    local_shape,
    partial_axes,
    units,
)

PIECE = "model"
"""All of the model is one piece: FSDP decides itself when to gather, free and reduce."""


def make_fsdp(
    model: Transformer,
    kernels: TrainingKernels,
    specs: tuple[ParamSpec, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    update: Update,
    context: Callable[[MicroBatch], Context],
    reduce_dtype: torch.dtype = torch.float32,
) -> tuple["FsdpStore", "FsdpPipeline", list[Action], list[Action]]:
    """What this rank runs: its shards, the executor, and the tables of one step and of one
    evaluation. The weights mean nothing until `owned("master")` has been written to.

    The model computes in `dtype`. FSDP gives a gradient in the dtype of the parameter that it cuts;
    so where `dtype` is bf16 and `grad_dtype` fp32, what it cuts are the fp32 masters, which it
    casts as it gathers, and no shard in bf16 is held: 16 bytes an element where the stages of ZeRO
    hold 18.
    """
    assert grad_dtype in (dtype, torch.float32)
    stored = tuple(spec for spec in specs if spec.tied_to is None)
    module = FsdpModel(model, kernels, stored, mesh, grad_dtype)
    shard_model(module, mesh, dtype, grad_dtype, reduce_dtype)
    store = FsdpStore(module, stored, mesh, update, reduce_dtype)
    table = [replace(action, piece=PIECE) for action in accumulate(mesh.layout.microbatches)]
    return store, FsdpPipeline(module, store, context), table, [Action("F", 0, piece=PIECE)]


# -- the model as modules
# -----------------------------------------------------------------------------------


class FsdpBlock(nn.Module):
    """One block: its parameters, by the fields of `BlockWeights`.

    What to run comes as a function, since FSDP takes dataclasses among a module's arguments apart
    and builds them anew.
    """

    def __init__(self, specs: Sequence[ParamSpec], mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.repeated = mesh.layout.recompute == "full"
        for spec in specs:
            self.register_parameter(spec.name.split(".")[-1], unallocated(spec, mesh, dtype))

    def forward(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        weights = BlockWeights(**own_parameters(self))
        if not self.repeated:
            return run(x, w=weights)
        # inside the module, so that FSDP has gathered the weights when the backward runs it again
        y: Tensor = checkpoint(run, x, w=weights, use_reentrant=False, preserve_rng_state=False)
        return y


class FsdpModel(nn.Module):
    """All of the model that a tensor rank has, its parameters named as their specs. Called with the
    context of a micro-batch it returns the summed loss. A tied head reads the embedding, so both
    are in this module, and its weights stay gathered from the forward to the end of the
    backward."""

    def __init__(
        self,
        model: Transformer,
        kernels: TrainingKernels,
        specs: tuple[ParamSpec, ...],
        mesh: Mesh,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.kernels = kernels
        by_unit = units(specs)
        layers = range(model.config.num_layers)
        self.blocks = nn.ModuleList(
            FsdpBlock(by_unit.pop(f"blocks.{layer}"), mesh, dtype) for layer in layers
        )
        for spec in (spec for rest in by_unit.values() for spec in rest):
            self.register_parameter(spec.name, unallocated(spec, mesh, dtype))

    def forward(self, context: Context) -> Tensor:
        weights = own_parameters(self)
        batch = context.microbatch
        x = self.model.embed(weights, batch.tokens, batch.positions)
        for layer, block in enumerate(self.blocks):
            x = block(
                x, partial(self.model.block, layer=layer, rope=context.rope, attend=context.attend)
            )
        return cross_entropy(
            self.model.final(weights, x),
            weights[self.model.head_name],
            batch.targets,
            self.kernels.cross_entropy_grad,
            self.model.seams,
            self.model.config.vocab_size,
        )


def unallocated(spec: ParamSpec, mesh: Mesh, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(local_shape(spec, mesh.layout, mesh.coord), dtype=dtype, device="meta")
    )


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False))


def shard_model(
    model: FsdpModel,
    mesh: Mesh,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """Cut every parameter, then allocate what this rank holds of it: no rank ever holds the whole
    model.

    FSDP averages gradients unless told to divide them by one, and divides while it sums, which gloo
    cannot, unless told to sum only. They travel in their own dtype, and the axis sums them in
    `reduce_dtype`.

    Weights begin as zeros: nobody writes the padding of a vocabulary, which is multiplied by zero.
    """
    assert mesh.shard.group is not None
    ranks = DeviceMesh.from_group(mesh.shard.group, mesh.device.type)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_dtype, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=ranks, mp_policy=policy, reshard_after_forward=not mesh.layout.keep)
    fully_shard(model, mesh=ranks, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        module.set_custom_all_gather(AllGather(mesh.shard))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(ReduceScatter(mesh.shard, reduce_dtype))  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=mesh.device)
    for parameter in model.parameters():
        local_of(parameter).zero_()


def fsdp_modules(model: FsdpModel) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# -- its collectives
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Communication:
    """What FSDP calls in place of its own collective, so that it goes through the axis. FSDP passes
    its arguments by name, and orders streams around the call, so it waits for nothing but the
    stream it is called on."""

    axis: Axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Communication):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        self.axis.all_gather(input_tensor, output_tensor).wait()


@dataclass(frozen=True)
class ReduceScatter(Communication):
    reduce_dtype: torch.dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op and op == dist.ReduceOp.SUM
        self.axis.reduce_scatter(
            input_tensor.view(self.axis.size, -1), output_tensor, self.reduce_dtype
        ).wait()


# -- what a rank owns
# ---------------------------------------------------------------------------------------


def chunk_rows(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The rows [start, stop) of dim 0 that `rank` holds: equal chunks, rounded up; the last may be
    short or empty."""
    each = -(-num_rows // num_ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def room(spec: ParamSpec, layout: Layout) -> int:
    """Elements that a sum over groups sets aside for the rows of one rank: as many as the fullest
    has. So what tensor ranks share lies at the same place on all of them, and is added up in one
    order."""
    rows, *columns = local_shape(spec, layout, layout.coord(0))
    return -(-rows // layout.shard_size) * math.prod(columns)


def local_of(x: Tensor) -> Tensor:
    """This rank's rows of a cut parameter or gradient, as a view."""
    with torch.no_grad():
        return cast(DTensor, x).to_local()


@dataclass(frozen=True)
class ParameterShard:
    """The rows that this rank owns, from `first_row` on, of its tensor rank's part of one
    parameter, with their state. `own_master` is None where the parameter is in fp32, and so its own
    master."""

    spec: ParamSpec
    parameter: nn.Parameter
    first_row: int
    own_master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def local(self) -> Tensor:
        return local_of(self.parameter)

    @property
    def master(self) -> Tensor:
        return self.local if self.own_master is None else self.own_master

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None, f"no gradient came for {self.spec.name}"
        return local_of(self.parameter.grad)

    def refresh(self) -> None:
        if self.own_master is not None:
            self.local.copy_(self.own_master)

    def terms(self, mesh: Mesh) -> Iterator[tuple[AxisName, Tensor]]:
        """The rows of the gradient of which this rank has one term of a sum over an axis, part by
        part, as views. They are the same rows on all ranks of the axis, whose local tensors have
        one shape."""
        for part, box in zip(
            self.spec.rows, boxes(self.spec, mesh.layout, mesh.coord), strict=True
        ):
            first = max(box.local[0] - self.first_row, 0)
            rows = self.gradient[first : max(box.local[0] + box.shape[0] - self.first_row, 0)]
            for axis in partial_axes(self.spec, part, mesh.layout) if rows.numel() else ():
                if mesh.axes[axis].size > 1:
                    yield axis, rows


def make_shard(spec: ParamSpec, parameter: nn.Parameter, mesh: Mesh) -> ParameterShard:
    rows, *columns = local_shape(spec, mesh.layout, mesh.coord)
    start, stop = chunk_rows(rows, mesh.shard.rank, mesh.shard.size)
    local = local_of(parameter)
    assert local.shape == (stop - start, *columns), spec.name

    def state() -> Tensor:
        return torch.zeros_like(local, dtype=torch.float32)

    return ParameterShard(
        spec, parameter, start, None if local.dtype == torch.float32 else state(), state(), state()
    )


class FsdpStore:
    """Weights, gradients and optimizer state of one rank; weights and gradients are FSDP's, the
    state ours.

    A step updates the fp32 masters of the owned rows and writes them back. Gradients are sums over
    micro-batches and ranks, and stay as they are until the next step begins.
    """

    def __init__(
        self,
        model: FsdpModel,
        specs: tuple[ParamSpec, ...],
        mesh: Mesh,
        update: Update,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.update = update
        self.reduce_dtype = reduce_dtype
        self.num_steps = 0
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {spec.name for spec in specs}
        self.shards = [make_shard(spec, parameters[spec.name], mesh) for spec in specs]
        self._grad_scale = 1.0

    def drop_gradients(self) -> None:
        """Begin a step: what FSDP sums from now on starts from nothing."""
        for shard in self.shards:
            shard.parameter.grad = None

    def finish(self) -> None:
        """Complete the gradients, a unit of state at a time: sum them over the groups of hybrid
        sharding, and over other axes what each rank has one term of."""
        for unit in units(tuple(shard.spec for shard in self.shards)):
            shards = [shard for shard in self.shards if shard.spec.unit == unit]
            if self.mesh.replicate.size > 1:
                self._sum_over_groups(shards)
            by_axis: dict[AxisName, list[Tensor]] = {}
            for axis, rows in (term for shard in shards for term in shard.terms(self.mesh)):
                by_axis.setdefault(axis, []).append(rows)
            for axis, terms in by_axis.items():
                add_terms(terms, self.mesh.axes[axis])

    def _sum_over_groups(self, shards: list[ParameterShard]) -> None:
        axis = self.mesh.replicate
        layout = self.mesh.layout
        grads = [shard.gradient for shard in shards]
        rooms = [room(shard.spec, layout) for shard in shards]
        padding = -sum(rooms) % axis.size
        flat = grads[0].new_zeros(sum(rooms) + padding)
        places = [
            place[: grad.numel()]
            for place, grad in zip(flat.split([*rooms, padding]), grads, strict=False)
        ]
        for place, grad in zip(places, grads, strict=True):
            place.copy_(grad.flatten())
        axis.all_reduce(flat, dtype=self.reduce_dtype).wait()
        for place, grad in zip(places, grads, strict=True):
            grad.copy_(place.view_as(grad))

    def clip(self, max_norm: float) -> float:
        """The 2-norm of the whole gradient, each logical element counted once. The next step scales
        gradients so that it is at most `max_norm` (0: as they are)."""
        mine = sum(map(sum_of_squares, self._counted())) if self.mesh.replicate.rank == 0 else 0.0
        norm = self.mesh.world.sum(mine)[0] ** 0.5
        self._grad_scale = min(1.0, max_norm / norm) if max_norm and norm else 1.0
        return norm

    def _counted(self) -> Iterator[Tensor]:
        """What the norm counts of this rank's gradients, flat: what several tensor ranks hold, on
        the first."""
        for spec, box, view in self.owned("gradient"):
            if is_first_holder(spec, spec.part(box.part), self.mesh.layout, self.mesh.coord):
                yield view.flatten()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One optimizer step on the owned rows, in slices: what it casts stays in the cache."""
        self.num_steps += 1
        for shard in self.shards:
            states = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
            slices = zip(*(state.flatten().split(SLICE_ELEMENTS) for state in states), strict=True)
            for master, grad, exp_avg, exp_avg_sq in slices:
                scaled = grad.float() * self._grad_scale
                self.update(
                    master, scaled, exp_avg, exp_avg_sq, self.num_steps, lr, shard.spec.decayed
                )
            shard.refresh()

    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        """Every rectangle of every parameter that this rank owns, with its place in the whole and a
        view of it: reading and writing both work."""
        for shard in self.shards:
            flat: Tensor = getattr(shard, kind).flatten()
            start = shard.first_row * math.prod(shard.local.shape[1:])
            within = boxes_within(
                shard.spec, self.mesh.layout, self.mesh.coord, start, start + flat.numel()
            )
            for box, first in within:
                at = first - start
                yield shard.spec, box, flat[at : at + math.prod(box.shape)].view(box.shape)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the weights in line with masters that were written from outside."""
        for shard in self.shards:
            shard.refresh()

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, as computing sees it, by name; it is there until the next is asked
        for."""
        for module in fsdp_modules(self.model)[
            ::-1
        ]:  # blocks before the root, which holds the rest
            module.unshard()
            prefix = next(name for name, each in self.model.named_modules() if each is module)
            for name, weight in own_parameters(cast(nn.Module, module)).items():
                yield f"{prefix}.{name}".lstrip("."), weight.detach()
            module.reshard()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that this rank holds now, by the planner's rows; padding is in them,
        and so are weights that are gathered just now."""
        gathered = [
            weight.detach() for weight in self.model.parameters() if not isinstance(weight, DTensor)
        ]
        grads = [shard.gradient for shard in self.shards if shard.parameter.grad is not None]
        masters = [shard.own_master for shard in self.shards if shard.own_master is not None]
        moments = [moment for shard in self.shards for moment in (shard.exp_avg, shard.exp_avg_sq)]
        return {
            "parameters": storage_bytes([shard.local for shard in self.shards] + gathered),
            "gradients": storage_bytes(grads),
            "optimizer": storage_bytes(masters + moments),
        }


# -- running it
# ---------------------------------------------------------------------------------------------


class FsdpPipeline:
    """Runs the table of a model in one piece: F calls it and keeps the graph, B pulls the loss's
    derivative through."""

    def __init__(
        self, model: FsdpModel, store: FsdpStore, context: Callable[[MicroBatch], Context]
    ) -> None:
        self.model = model
        self.store = store
        self.context = context
        self._loss: Tensor | None = None
        self._graphs: dict[int, Tensor] = {}

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None:
        """Do one action; `scale` is the derivative of the step's loss by the summed loss of its
        tokens."""
        assert action.piece == PIECE
        at = action.microbatch
        if action.kind == "F":
            self.forward(at, microbatches[at])
        else:
            loss = self._graphs.pop(at)
            loss.backward(torch.full_like(loss, scale))

    def forward(self, at: int, microbatch: MicroBatch) -> None:
        if at == 0:
            self.store.drop_gradients()
        with torch.enable_grad():
            loss = self.model(self.context(microbatch))
        self._graphs[at] = loss
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def finish(self) -> float:
        """The summed loss of this rank's tokens in this step; asserts that nothing is left half
        done."""
        assert not self._graphs, "the table left work undone"
        loss = self._loss
        self._loss = None
        return 0.0 if loss is None else loss.item()

    @torch.no_grad()
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float:
        """The summed loss of one micro-batch, without gradients; `table` is one forward, and
        nothing gathered stays."""
        assert [action.piece for action in table] == [PIECE]
        loss: Tensor = self.model(self.context(microbatch))
        for module in fsdp_modules(self.model):
            module.reshard()
        return loss.item()
