"""PyTorch's own ZeRO-3, `fully_shard` (FSDP2), behind the interfaces of store and pipeline.

FSDP works in hooks of Modules: before a module's forward and backward it gathers the module's
weights, afterwards it frees them, and after the backward it reduce-scatters their gradients. So the
model is wrapped in Modules here, one per block and one for the rest; each is a unit of
communication.

Every parameter is sharded on its own, by rows, as `torch.chunk` splits: all ranks but the last hold
ceil(rows / ranks) rows, and communication is padded to that. FSDP holds weights and gradients; the
optimizer states, of the same rows, are held here. With tensor parallel, FSDP shards the local part
of a parameter over the ranks that have the same part.

FSDP runs inside each shard group. Once per step `finish` adds the sums outside of it: over the
groups of hybrid sharding, and of partial gradients over tensor ranks.
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
from shardwise.parallel.state_store import (
    STEP_ELEMENTS,
    Owned,
    StateStore,
    Update,
    storage_bytes,
    sum_partial,
)
from shardwise.params import ParamSpec, block_unit, unit_axes, units
from shardwise.shards import Box, boxes, boxes_within, flat_strides, local_shape, partial_axes

PIECE = "model"
"""The name of the only piece, the whole model: FSDP itself decides when to gather, free and
reduce."""


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
    """Return what this rank runs: its store, its executor, and the tables of one step and of one
    evaluation. The weights are undefined until `owned("master")` has been written.

    The model computes in `dtype`. FSDP returns gradients in the dtype of the sharded parameter. So
    with `dtype` bf16 and `grad_dtype` fp32 it shards the fp32 master weights and casts them as it
    gathers; there is no bf16 shard: 16 bytes per element, where the stages of ZeRO hold 18.
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

    `forward` takes what to run as a function, since FSDP would take a dataclass among the arguments
    apart and rebuild it.
    """

    def __init__(self, specs: Sequence[ParamSpec], mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.shard_axis = mesh.axes[unit_axes(specs).shard]
        self.recomputes = mesh.layout.recompute == "full"
        for spec in specs:
            self.register_parameter(spec.short_name, unallocated(spec, mesh, dtype))

    def forward(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        weights = BlockWeights(**own_parameters(self))
        if not self.recomputes:
            return run(x, w=weights)
        # inside the module, so that FSDP has gathered the weights when the backward recomputes it
        y: Tensor = checkpoint(run, x, w=weights, use_reentrant=False, preserve_rng_state=False)
        return y


class FsdpModel(nn.Module):
    """The model of one tensor rank, its parameters named as their specs. Called with the context of
    a micro-batch, it returns the summed loss.

    A tied head reads the embedding, so both belong to this module, whose weights stay gathered from
    the forward to the end of the backward.
    """

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
            FsdpBlock(by_unit.pop(block_unit(layer)), mesh, dtype) for layer in layers
        )
        others = [spec for rest in by_unit.values() for spec in rest]
        self.shard_axis = mesh.axes[unit_axes(others).shard]
        for spec in others:
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
    """Shard every parameter, then allocate this rank's rows: no rank ever holds the whole model.

    FSDP by default averages gradients, within the collective, which gloo cannot: so the divisor is
    set to one, and the collective to a sum. Gradients are sent in their own dtype and summed in
    `reduce_dtype`.

    Weights start as zeros: the padding of a vocabulary, which is multiplied by zero, is never
    written.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_dtype, cast_forward_inputs=False
    )
    meshes: dict[str, DeviceMesh] = {}
    for module in (*model.blocks, model):
        axis = cast(FsdpBlock | FsdpModel, module).shard_axis
        assert axis.group is not None
        if axis.name not in meshes:
            meshes[axis.name] = DeviceMesh.from_group(axis.group, mesh.device.type)
        fully_shard(
            module,
            mesh=meshes[axis.name],
            mp_policy=policy,
            reshard_after_forward=module is not model and not mesh.layout.keep,
        )
    for module in fsdp_modules(model):
        axis = cast(FsdpBlock | FsdpModel, module).shard_axis
        module.set_custom_all_gather(AllGather(axis))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(ReduceScatter(axis, reduce_dtype))  # type: ignore[arg-type]
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
    """A replacement of FSDP's own collective that goes through an axis. FSDP passes arguments by
    name and orders streams around the call, so the call waits only for its own stream."""

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
    """Return the rows [start, stop) of dim 0 that `rank` holds: equal chunks, rounded up; the last
    may be short or empty."""
    each = -(-num_rows // num_ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def capacity_elements(spec: ParamSpec, layout: Layout) -> int:
    """Return the elements that a sum over groups allocates for a parameter: as many as the fullest
    rank owns. So what tensor ranks share lies at the same place on all, and is summed in the same
    order."""
    rows, *columns = local_shape(spec, layout, layout.coord(0))
    return -(-rows // layout.size(spec.state_axes.shard)) * math.prod(columns)


def local_of(x: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter or gradient, as a view."""
    with torch.no_grad():
        return cast(DTensor, x).to_local()


@dataclass(frozen=True)
class ParameterShard:
    """The rows of the local tensor of one parameter that this rank owns, from `first_row` on, with
    their optimizer states. `own_master` is None if the parameter is in fp32 and so its own
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
        assert self.parameter.grad is not None, f"no gradient was computed for {self.spec.name}"
        return local_of(self.parameter.grad)

    def refresh(self) -> None:
        if self.own_master is not None:
            self.local.copy_(self.own_master)

    def partial_gradients(self, mesh: Mesh) -> Iterator[tuple[AxisName, Tensor]]:
        """Yield (axis, rows) for the rows of the gradient that are partial sums over an axis, part
        by part, as views. They are the same rows on all ranks of the axis, whose local tensors have
        the same shape."""
        for part, box in zip(
            self.spec.all_parts, boxes(self.spec, mesh.layout, mesh.coord), strict=True
        ):
            first = max(box.local[0] - self.first_row, 0)
            last = max(box.local[0] + box.shape[0] - self.first_row, 0)
            rows = self.gradient[(slice(first, last), *box.local_slices[1:])]
            for axis in partial_axes(self.spec, part, mesh.layout) if rows.numel() else ():
                if mesh.axes[axis].size > 1:
                    yield axis, rows


def make_shard(spec: ParamSpec, parameter: nn.Parameter, mesh: Mesh) -> ParameterShard:
    rows, *columns = local_shape(spec, mesh.layout, mesh.coord)
    axis = mesh.axes[spec.state_axes.shard]
    start, stop = chunk_rows(rows, axis.rank, axis.size)
    local = local_of(parameter)
    assert local.shape == (stop - start, *columns), spec.name

    def state() -> Tensor:
        return torch.zeros_like(local, dtype=torch.float32)

    return ParameterShard(
        spec, parameter, start, None if local.dtype == torch.float32 else state(), state(), state()
    )


class FsdpStore(StateStore):
    """Weights, gradients and optimizer states of one rank. FSDP holds weights and gradients, this
    store the optimizer states.

    A step updates the fp32 master weights of the owned rows and writes them back. Gradients are
    sums over micro-batches and ranks; they stay until the next step begins.
    """

    def __init__(
        self,
        model: FsdpModel,
        specs: tuple[ParamSpec, ...],
        mesh: Mesh,
        update: Update,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__(mesh, update)
        self.model = model
        self.reduce_dtype = reduce_dtype
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {spec.name for spec in specs}
        self.shards = [make_shard(spec, parameters[spec.name], mesh) for spec in specs]

    def drop_gradients(self) -> None:
        """Begin a step: FSDP accumulates into fresh gradients."""
        for shard in self.shards:
            shard.parameter.grad = None

    def finish(self) -> None:
        """Complete the gradients, one unit of state at a time: sum them over the groups of hybrid
        sharding, and partial sums over other axes."""
        for unit in units(tuple(shard.spec for shard in self.shards)):
            shards = [shard for shard in self.shards if shard.spec.unit == unit]
            replicas = self.mesh.axes[unit_axes(shard.spec for shard in shards).replicate]
            if replicas.size > 1:
                self._sum_over_groups(shards, replicas)
            by_axis: dict[AxisName, list[Tensor]] = {}
            for shard in shards:
                for axis, rows in shard.partial_gradients(self.mesh):
                    by_axis.setdefault(axis, []).append(rows)
            for axis, grads in by_axis.items():
                sum_partial(grads, self.mesh.axes[axis])

    def _sum_over_groups(self, shards: list[ParameterShard], axis: Axis) -> None:
        layout = self.mesh.layout
        grads = [shard.gradient for shard in shards]
        capacities = [capacity_elements(shard.spec, layout) for shard in shards]
        padding = -sum(capacities) % axis.size
        flat = grads[0].new_zeros(sum(capacities) + padding)
        places = [
            place[: grad.numel()]
            for place, grad in zip(flat.split([*capacities, padding]), grads, strict=False)
        ]
        for place, grad in zip(places, grads, strict=True):
            place.copy_(grad.flatten())
        axis.all_reduce(flat, dtype=self.reduce_dtype).wait()
        for place, grad in zip(places, grads, strict=True):
            grad.copy_(place.view_as(grad))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take one optimizer step on the owned rows, in slices whose casts stay in the cache."""
        self.num_steps += 1
        for shard in self.shards:
            states = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
            slices = zip(*(state.flatten().split(STEP_ELEMENTS) for state in states), strict=True)
            for master, grad, exp_avg, exp_avg_sq in slices:
                scaled = grad.float() * self._grad_scale
                self.update(
                    master, scaled, exp_avg, exp_avg_sq, self.num_steps, lr, shard.spec.decayed
                )
            shard.refresh()

    def owned(self, kind: Owned) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
        for shard in self.shards:
            flat: Tensor = getattr(shard, kind).flatten()
            start = shard.first_row * math.prod(shard.local.shape[1:])
            within = boxes_within(
                shard.spec, self.mesh.layout, self.mesh.coord, start, start + flat.numel()
            )
            for box, first in within:
                strides = flat_strides((0, *shard.local.shape[1:]))
                offset = flat.storage_offset() + first - start
                yield shard.spec, box, flat.as_strided(box.shape, strides, offset)

    @torch.no_grad()
    def refresh(self) -> None:
        for shard in self.shards:
            shard.refresh()

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for module in fsdp_modules(self.model)[
            ::-1
        ]:  # blocks before the root, which holds the rest
            module.unshard()
            prefix = next(name for name, each in self.model.named_modules() if each is module)
            for name, weight in own_parameters(cast(nn.Module, module)).items():
                yield f"{prefix}.{name}".lstrip("."), weight.detach()
            module.reshard()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of the buffers that this rank holds now, by the planner's rows; padding
        and currently gathered weights included."""
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
    """Executor of a model in one piece: F calls it and keeps the graph, B runs its backward."""

    def __init__(
        self, model: FsdpModel, store: FsdpStore, context: Callable[[MicroBatch], Context]
    ) -> None:
        self.model = model
        self.store = store
        self.context = context
        self._loss: Tensor | None = None
        self._graphs: dict[int, Tensor] = {}

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None:
        """Execute one action. `scale` is the derivative of the step's loss with respect to the
        summed loss of its tokens."""
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
        """Return the summed loss of this rank's tokens in this step. Asserts that no micro-batch
        lacks its backward."""
        assert not self._graphs, "the table left a micro-batch without its backward"
        loss = self._loss
        self._loss = None
        return 0.0 if loss is None else loss.item()

    @torch.no_grad()
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float:
        """Return the summed loss of one micro-batch, without gradients. `table` is one forward.
        Gathered weights are freed."""
        assert [action.piece for action in table] == [PIECE]
        loss: Tensor = self.model(self.context(microbatch))
        for module in fsdp_modules(self.model):
            module.reshard()
        return loss.item()
