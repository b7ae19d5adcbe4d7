"""Parity: a layout and one rank train on the same data, and their results are compared.

The ranks of the layout train a few steps; rank 0 also trains the same model alone, on each whole
batch at once. After each step the loss, every gradient and the gradient norm are compared, and
after the last one every parameter. The weights that each rank would use next must equal those of
their owners bit for bit. Nothing here depends on how a layout shards: the store names the boxes
that a rank holds of a parameter.

The layout trains in fp32, where only the order of sums may differ, or in bf16 as a run does, to
show what its rounding costs. One rank is always in fp32.
"""

import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.model.init import seeded_generator
from shardwise.model.layers import DTYPES
from shardwise.model.loss import IGNORE_INDEX
from shardwise.parallel.apply import apply, check_trainable, draw_weights
from shardwise.parallel.launch import Place, device_of
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned
from shardwise.parallel.zero import BUCKET_BYTES
from shardwise.params import ParamSpec, model_specs, num_params
from shardwise.plan.ledger import training_ledgers
from shardwise.precision import Precision, accumulates_in_fp32
from shardwise.shards import Box, boxes
from shardwise.train.data.batches import Batch, MicroBatch, batch_rows, num_targets
from shardwise.train.loop import global_loss, take_step
from shardwise.train.optim import AdamW
from shardwise.train.planned_memory import gigabytes
from shardwise.train.signals import StopRequest
from shardwise.train.validate import check_joined, memory_bytes, ranks_here

Quantity = Literal["loss", "grad", "grad_norm", "param", "replica"]

TOLERANCES: dict[Precision, dict[Quantity, float]] = {
    "fp32": {"loss": 1e-5, "grad": 1e-4, "grad_norm": 1e-5, "param": 1e-4, "replica": 0.0},
    "bf16": {"loss": 5e-4, "grad": 1.5e-1, "grad_norm": 1e-2, "param": 5e-2, "replica": 0.0},
}
"""The largest relative difference that counts as equal, by the precision of the layout.
docs/parity.md derives the values."""

LR = 1e-2
MAX_NORM = 1e-2
"""Below the gradient norm of any newly initialized model, so that clipping applies in every
step."""

MICROBATCH_SEQUENCES = 2
LENGTH_TOKENS = 32
PROCESS_BYTES = 160 << 20
"""Memory of a process without any states: Python and torch."""


@dataclass(frozen=True)
class Trial:
    """A layout of a model to compare with one rank, its precision, and how its sums run."""

    config: ModelConfig
    layout: Layout
    steps: int = 3
    seed: int = 0
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    precision: Precision = "fp32"

    @property
    def tolerances(self) -> dict[Quantity, float]:
        return TOLERANCES[self.precision]

    @property
    def length_tokens(self) -> int:
        """The length of a sequence: about LENGTH_TOKENS, and a multiple of the parts that a layout
        splits a sequence into. Raises ValueError if the model's context is too short."""
        parts = self.layout.tp * (2 * self.layout.cp if self.layout.cp > 1 else 1)
        if parts > self.config.max_positions:
            raise ValueError(
                f"layout {self.layout} splits a sequence into {parts} parts, but the context of "
                f"the "
                f"model is {self.config.max_positions} tokens; a smaller tp or cp works"
            )
        return min(-(-LENGTH_TOKENS // parts), self.config.max_positions // parts) * parts

    @property
    def num_sequences(self) -> int:
        return self.layout.dp * self.layout.microbatches * MICROBATCH_SEQUENCES


# -- results


@dataclass(frozen=True)
class Difference:
    """A relative difference from one rank in a step; infinite if either value is not a number. For
    replicas, the share of ranks that differ from the owners."""

    step: int
    kind: Quantity
    parameter: str | None
    rel: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.rel <= self.tolerance


@dataclass
class Parity:
    """The result of a comparison.

    Attributes:
        tolerances: the largest difference of each kind that counts as equal
        worst: the largest difference of each kind
        first: the first difference beyond its tolerance, by step and then in the order of the model
        stopped: the number of the signal that ended it early; the other fields are then incomplete
    """

    tolerances: dict[Quantity, float]
    worst: dict[Quantity, Difference] = field(default_factory=dict)
    first: Difference | None = None
    stopped: int | None = None

    def record(self, step: int, kind: Quantity, rel: float, parameter: str | None = None) -> None:
        finite = math.inf if math.isnan(rel) else rel
        difference = Difference(step, kind, parameter, finite, self.tolerances[kind])
        if kind not in self.worst or difference.rel > self.worst[kind].rel:
            self.worst[kind] = difference
        if self.first is None and not difference.is_equal:
            self.first = difference

    @property
    def is_equal(self) -> bool:
        return self.worst.keys() == self.tolerances.keys() and all(
            worst.is_equal for worst in self.worst.values()
        )


# -- checks before the start


def check_trial(trial: Trial) -> None:
    """Raise ValueError if a trial cannot run on this machine."""
    layout = trial.layout
    if trial.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {trial.steps}")
    if trial.bucket_bytes < 1:
        raise ValueError(f"--bucket-bytes must be at least 1, not {trial.bucket_bytes}")
    check_trainable(layout, trial.config)
    check_joined(layout)
    device = device_of(0, layout.world_size)
    ranks = ranks_here(layout) if device.type == "cpu" else 1
    needed = needed_bytes(trial, ranks)
    available = memory_bytes(device)
    if needed > available:
        raise ValueError(
            f"{layout} and one more rank take about {gigabytes(needed)} in fp32, but there are "
            f"{gigabytes(available)}; use a smaller model, fewer ranks or fewer micro-batches"
        )


def needed_bytes(trial: Trial, num_ranks: int) -> int:
    """Return about how much memory `num_ranks` ranks of the layout and one rank alone need on one
    device: their states by the planner's figures, one whole parameter that is compared, the
    processes, and the activations of the rank that takes all sequences at once."""
    config = trial.config
    states = max(stage.total_bytes for stage in training_ledgers(config, trial.layout, "fp32"))
    alone = sum(stage.total_bytes for stage in training_ledgers(config, Layout(), "fp32"))
    compared = 16 * max(spec.numel for spec in model_specs(config))
    saved = 8 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 4 * config.ffn_size
    activations = 4 * saved * config.num_layers * trial.num_sequences * trial.length_tokens
    return num_ranks * (states + compared + PROCESS_BYTES) + alone + compared + activations


# -- the two sides


def draw_batch(trial: Trial, step: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets [sequences, T] of one step.

    Each row has fewer targets than the one before, so that ranks and micro-batches have unequal
    numbers. The last micro-batch of the last data rank has none, if that rank has others: an error
    in a rank that adds nothing to any sum would go unnoticed.
    """
    random = seeded_generator(trial.seed, "parity batch", step)
    rows = trial.num_sequences
    length = trial.length_tokens
    ids = torch.randint(trial.config.vocab_size, (rows, length + 1), generator=random)
    share = torch.linspace(1.0, 0.1, rows)[:, None]
    has_target = torch.rand(rows, length, generator=random) < share
    if trial.layout.microbatches > 1:
        has_target[-MICROBATCH_SEQUENCES:] = False
    return ids[:, :-1].contiguous(), torch.where(has_target, ids[:, 1:], IGNORE_INDEX)


def rank_batch(tokens: Tensor, targets: Tensor, layout: Layout, data_rank: int) -> Batch:
    """Return one data rank's part of a global batch."""
    parts = batch_rows(len(tokens), layout.microbatches, data_rank, layout.dp)
    positions = torch.arange(tokens.shape[1]).expand(len(parts[0]), -1)
    slices = [slice(rows.start, rows.stop) for rows in parts]
    microbatches = tuple(
        MicroBatch(tokens[rows], targets[rows], positions, None) for rows in slices
    )
    return Batch(microbatches, num_targets(microbatches))


@dataclass(frozen=True)
class Side:
    """One of the two programs that are compared, on this rank: that of the layout, or that of one
    rank."""

    mesh: Mesh
    program: Program

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """Take a step and return the mean loss of the global batch and the norm of the whole
        gradient, on every rank."""
        batch = rank_batch(tokens, targets, self.mesh.layout, self.mesh.coord.dp)
        rank_loss, norm = take_step(self.program, self.mesh, batch, LR, MAX_NORM)
        return global_loss(self.mesh, rank_loss), norm

    def wholes(self, kind: Owned) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yield every whole parameter, assembled from its owners, on every rank, in the order of
        the model."""
        shares: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for spec, box, view in self.program.store.owned(kind):
            shares[spec.name].append((box, view))
        for spec in self.program.specs:
            if spec.tied_to is None:
                yield spec, assemble(self.mesh, spec, shares[spec.name])


def make_side(trial: Trial, layout: Layout, place: Place, precision: Precision = "fp32") -> Side:
    """Return the program of this rank for a layout, with weights drawn from the seed, and gradients
    accumulated as training does by default.

    The eps of Adam is the size of a typical element of the clipped gradient. So the scale of the
    gradient, which Adam otherwise divides out, affects a step, and rounding of gradients that are
    zero in exact arithmetic, such as that of the bias of keys, is not amplified.
    """
    mesh = make_mesh(layout, place.rank, place.device, trial.config.num_kv_heads)
    optimizer = AdamW(eps=MAX_NORM / num_params(model_specs(trial.config)) ** 0.5)
    dtype = DTYPES[precision]
    in_fp32 = accumulates_in_fp32("auto", layout.microbatches)
    program = apply(
        trial.config,
        mesh,
        dtype,
        torch.float32 if in_fp32 else dtype,
        optimizer.update,
        bucket_bytes=trial.bucket_bytes,
        overlap=trial.overlap,
    )
    draw_weights(program, trial.seed)
    return Side(mesh, program)


def assemble(mesh: Mesh, spec: ParamSpec, shares: list[tuple[Box, Tensor]]) -> Tensor:
    """Return a whole parameter: each element is that of the first rank that owns it."""
    world = mesh.world
    precedence = mesh.world.size - mesh.world.rank
    owner = torch.zeros(spec.shape, dtype=torch.int32, device=mesh.device)
    whole = torch.zeros(spec.shape, device=mesh.device)
    for box, _ in shares:
        owner[box.slices] = precedence
    world.all_reduce(owner, "max").wait()
    assert bool((owner > 0).all()), f"no rank owns all of {spec.name}"
    for box, view in shares:
        whole[box.slices] = torch.where(owner[box.slices] == precedence, view.detach(), 0.0)
    world.all_reduce(whole).wait()
    return whole


# -- the comparison


def compare(place: Place, trial: Trial) -> Parity | None:
    """Compare a layout with one rank. Every rank of the layout calls it. Returns the result on rank
    0 and None on the others; on all ranks if a signal stopped the comparison."""
    sharded = make_side(trial, trial.layout, place, trial.precision)
    single = make_side(trial, Layout(), Place(0, 1, place.device)) if place.rank == 0 else None
    parity = Parity(trial.tolerances)
    with StopRequest(patient=place.world_size > 1) as stop:
        for step in range(1, trial.steps + 1):
            compare_step(step, draw_batch(trial, step), sharded, single, parity)
            if place.rank == 0:
                print(
                    f"shardwise: {trial.layout}: compared step {step} of {trial.steps}",
                    file=sys.stderr,
                )
            parity.stopped = int(sharded.mesh.world.max(float(stop.signal or 0))[0]) or None
            if parity.stopped:
                return parity
    compare_all(trial.steps, "param", sharded, single, lambda _, part, __: drawn_size(part), parity)
    for name, ranks in unequal_replicas(sharded).items():
        parity.record(trial.steps, "replica", ranks, name)
    return parity if single is not None else None


def compare_step(
    step: int, batch: tuple[Tensor, Tensor], sharded: Side, single: Side | None, parity: Parity
) -> None:
    """Take one step on both sides and compare the results. Gradients are recorded before norm and
    loss: they show where a difference begins."""
    loss, norm = sharded.step(*batch)
    loss1, norm1 = single.step(*batch) if single is not None else (math.nan, math.nan)
    config = sharded.program.config

    def floor(name: str, part: Tensor, parameter: Tensor) -> float:
        return size(parameter) if vanishes(config, name) else 1e-6 * norm1

    compare_all(step, "grad", sharded, single, floor, parity)
    parity.record(step, "grad_norm", ratio(abs(norm - norm1), abs(norm1)))
    parity.record(step, "loss", ratio(abs(loss - loss1), abs(loss1)))


def compare_all(
    step: int,
    kind: Literal["grad", "param"],
    sharded: Side,
    single: Side | None,
    floor: Callable[[str, Tensor, Tensor], float],
    parity: Parity,
) -> None:
    """Compare every gradient or every master weight, fused parameters part by part, in the 2-norm,
    relative to that of one rank or to floor(name, part, parameter) if that is larger."""
    owned: Owned = "gradient" if kind == "grad" else "master"
    expected = single.wholes(owned) if single is not None else None
    for spec, whole in sharded.wholes(owned):
        if expected is None:
            continue
        _, one = next(expected)
        for name, index in logical_parts(spec):
            rel = ratio(
                size(whole[index] - one[index]), max(size(one[index]), floor(name, one[index], one))
            )
            parity.record(step, kind, rel, name)


def unequal_replicas(sharded: Side) -> dict[str, float]:
    """Return, by parameter, the share of ranks whose weights in use are not bit for bit those of
    the owners. Digests are compared, since ranks gather in different orders and hold different
    parts."""
    mesh = sharded.mesh
    specs = {spec.name: spec for spec in sharded.program.specs if spec.tied_to is None}
    digests: dict[str, tuple[torch.dtype, bytes]] = {}
    for name, weight in sharded.program.store.gathered():
        for part, box in local_parts(specs[name], mesh):
            digests[part] = weight.dtype, digest(weight[box.local_slices])
    unequal = {part: 0.0 for spec in specs.values() for part, _ in logical_parts(spec)}
    for spec, master in sharded.wholes("master"):
        for part, box in local_parts(spec, mesh):
            if part in digests:
                dtype, found = digests[part]
                expected = master[box.slices].to(dtype)
                unequal[part] = float(digest(expected) != found or bool(expected.isnan().any()))
    return {
        part: ranks / mesh.world.size
        for part, ranks in zip(unequal, mesh.world.sum(*unequal.values()), strict=True)
    }


def local_parts(spec: ParamSpec, mesh: Mesh) -> Iterator[tuple[str, Box]]:
    """Yield the logical parts of a parameter with the box that this rank uses."""
    for (part, _), box in zip(
        logical_parts(spec), boxes(spec, mesh.layout, mesh.coord), strict=True
    ):
        yield part, box


def digest(x: Tensor) -> bytes:
    """Return a digest of the values of a tensor, without the sign of zeros."""
    values = (x + 0.0).contiguous().cpu().view(torch.uint8).numpy().data
    return hashlib.blake2b(values, digest_size=16).digest()


def logical_parts(spec: ParamSpec) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield what a model's author calls a parameter, with its index into the fused one: q, k and v
    apart."""
    for part, index in spec.part_slices():
        yield f"{spec.name}.{part.name}" if spec.parts else spec.name, index


def vanishes(config: ModelConfig, name: str) -> bool:
    """Return whether a gradient is zero in exact arithmetic, so that all of it is rounding, which
    differs between layouts. Without RoPE, the bias of keys adds the same to every score of a query,
    which the softmax ignores."""
    return config.positions == "learned" and name.endswith("qkv_bias.k")


def size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def drawn_size(x: Tensor) -> float:
    """Return the expected 2-norm of random weights of this shape."""
    return 0.02 * math.sqrt(x.numel())


def ratio(difference: float, expected: float) -> float:
    """Return a relative difference: infinite if a value is not a number, or if only `expected` is
    zero."""
    if expected == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    quotient = difference / expected
    return math.inf if math.isnan(quotient) else quotient
