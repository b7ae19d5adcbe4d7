"""Whether a layout computes what one rank computes: both are run side by side, on the same data,
and compared.

The ranks of the layout train a few steps; rank 0 beside them trains the same model alone, on the
whole of every batch at once. After each step the loss, every gradient and the gradient's norm are
compared, after the last one every parameter; and the weights that each rank would compute with next
must be, bit for bit, the values of their owners. Nothing here knows how a layout cuts: what a rank
holds of a parameter are the boxes that its store names.
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
from shardwise.model.loss import IGNORE_INDEX
from shardwise.parallel.apply import Program, apply, check_trainable, draw_weights
from shardwise.parallel.launch import Place, device_of
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.unit import Owned
from shardwise.parallel.zero import BUCKET_BYTES
from shardwise.params import Box, ParamSpec, boxes, model_specs, num_params
from shardwise.plan.ledger import training_ledgers
from shardwise.train.data import Batch, MicroBatch, batch_rows, num_targets
from shardwise.train.loop import global_loss, take_step
from shardwise.train.optim import AdamW
from shardwise.train.signals import StopRequest
from shardwise.train.validate import check_joined, memory_bytes, ranks_here

Kind = Literal["loss", "grad", "grad_norm", "param", "replica"]

TOLERANCES: dict[Kind, float] = {
    "loss": 1e-5,
    "grad": 1e-4,
    "grad_norm": 1e-5,
    "param": 1e-4,
    "replica": 0.0,
}
"""The largest relative difference that counts as equal, in fp32, where only the order of sums may
differ. `docs/parity` tells where they come from."""

LR = 1e-2
MAX_NORM = 1e-2
"""Below the gradient's norm of any model that was just drawn, so that clipping scales every
step."""

MICROBATCH_SEQUENCES = 2
LENGTH_TOKENS = 32
PROCESS_BYTES = 160 << 20
"""What a rank's process takes before it holds any state: Python and torch."""


@dataclass(frozen=True)
class Trial:
    """What is compared with one rank: a layout of a model, and how its sums run."""

    config: ModelConfig
    layout: Layout
    steps: int = 3
    seed: int = 0
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES

    @property
    def length_tokens(self) -> int:
        """Of a sequence: about LENGTH_TOKENS, such that every rank can take an equal part.
        ValueError if none does."""
        parts = self.layout.tp * (2 * self.layout.cp if self.layout.cp > 1 else 1)
        if parts > self.config.max_positions:
            raise ValueError(
                f"layout {self.layout} cuts a sequence into {parts} parts, but the model has only "
                f"{self.config.max_positions} positions; a smaller tp or cp works"
            )
        return min(-(-LENGTH_TOKENS // parts), self.config.max_positions // parts) * parts

    @property
    def num_sequences(self) -> int:
        return self.layout.dp * self.layout.microbatches * MICROBATCH_SEQUENCES


# -- what is found
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How far something was from one rank's in a step; `rel` is infinite where either was not a
    number. Of replicas it is the share of ranks that differ from the owners."""

    step: int
    kind: Kind
    parameter: str | None
    rel: float

    @property
    def is_equal(self) -> bool:
        return self.rel <= TOLERANCES[self.kind]


@dataclass
class Parity:
    """What the comparison found: the worst of each kind, and the first that is too far, by step and
    then in the order of the model. `stopped` is the number of the signal that ended it early, and
    then nothing else counts."""

    worst: dict[Kind, Difference] = field(default_factory=dict)
    first: Difference | None = None
    stopped: int | None = None

    def note(self, step: int, kind: Kind, rel: float, parameter: str | None = None) -> None:
        found = Difference(step, kind, parameter, math.inf if math.isnan(rel) else rel)
        if kind not in self.worst or found.rel > self.worst[kind].rel:
            self.worst[kind] = found
        if self.first is None and not found.is_equal:
            self.first = found

    @property
    def is_equal(self) -> bool:
        return self.worst.keys() == TOLERANCES.keys() and all(
            worst.is_equal for worst in self.worst.values()
        )


# -- before anything starts
# ---------------------------------------------------------------------------------


def check_trial(trial: Trial) -> None:
    """Raise ValueError for what cannot be compared on this machine."""
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
    held = memory_bytes(device)
    if needed > held:
        raise ValueError(
            f"{layout} and one rank beside it take about {needed / 1e9:,.3g} GB in fp32, more than the "
            f"{held / 1e9:,.3g} GB there are; a smaller model, fewer ranks or fewer micro-batches work"
        )


def needed_bytes(trial: Trial, num_ranks: int) -> int:
    """What `num_ranks` ranks of the layout and one rank alone take on one device: their states by
    the planner's figures, one whole parameter being compared, the process, and the activations of
    the rank that takes every sequence at once, about."""
    config = trial.config
    states = max(stage.total_bytes for stage in training_ledgers(config, trial.layout, "fp32"))
    alone = sum(stage.total_bytes for stage in training_ledgers(config, Layout(), "fp32"))
    compared = 16 * max(spec.numel for spec in model_specs(config))
    kept = 8 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 4 * config.ffn_size
    activations = 4 * kept * config.num_layers * trial.num_sequences * trial.length_tokens
    return num_ranks * (states + compared + PROCESS_BYTES) + alone + compared + activations


# -- the two sides
# ------------------------------------------------------------------------------------------


def draw_batch(trial: Trial, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [sequences, T] of one step: random ones, row by row with ever fewer
    targets, so that ranks and micro-batches have unequal numbers of them. The last micro-batch of
    the last data rank has none if that rank has others: a rank that gave nothing to any sum would
    not be missed."""
    random = seeded_generator(trial.seed, "parity batch", step)
    rows = trial.num_sequences
    length = trial.length_tokens
    ids = torch.randint(trial.config.vocab_size, (rows, length + 1), generator=random)
    kept = torch.rand(rows, length, generator=random) < torch.linspace(1.0, 0.1, rows)[:, None]
    if trial.layout.microbatches > 1:
        kept[-MICROBATCH_SEQUENCES:] = False
    return ids[:, :-1].contiguous(), torch.where(kept, ids[:, 1:], IGNORE_INDEX)


def part_of(tokens: Tensor, targets: Tensor, layout: Layout, data_rank: int) -> Batch:
    """What one data rank takes of a global batch: ranks side by side, one micro-batch after
    another."""
    parts = batch_rows(len(tokens), layout.microbatches, data_rank, layout.dp)
    positions = torch.arange(tokens.shape[1]).expand(len(parts[0]), -1)
    slices = [slice(rows.start, rows.stop) for rows in parts]
    microbatches = tuple(
        MicroBatch(tokens[rows], targets[rows], positions, None) for rows in slices
    )
    return Batch(microbatches, num_targets(microbatches))


@dataclass(frozen=True)
class Side:
    """One of the two that are compared, as this rank sees it: the ranks of the layout, or the one
    rank alone."""

    mesh: Mesh
    program: Program

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """The mean loss of the whole batch and the norm of the whole gradient, on every rank."""
        batch = part_of(tokens, targets, self.mesh.layout, self.mesh.coord.dp)
        mine, norm = take_step(self.program, self.mesh, batch, LR, MAX_NORM)
        return global_loss(self.mesh, mine), norm

    def wholes(self, kind: Owned) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Every parameter put together from its owners, on every rank, one at a time, in the order
        of the model."""
        shares: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for spec, box, view in self.program.store.owned(kind):
            shares[spec.name].append((box, view))
        for spec in self.program.specs:
            if spec.tied_to is None:
                yield spec, put_together(self.mesh, spec, shares[spec.name])


def make_side(trial: Trial, layout: Layout, place: Place) -> Side:
    """Adam's eps is the size of a typical element of the clipped gradient. So a step feels the
    scale of the gradient, which Adam else divides out, and does not blow up the rounding of what is
    zero in exact arithmetic, as the gradient of the bias of keys is."""
    mesh = make_mesh(layout, place.rank, place.device, trial.config.num_kv_heads)
    optimizer = AdamW(eps=MAX_NORM / num_params(model_specs(trial.config)) ** 0.5)
    program = apply(
        trial.config,
        mesh,
        torch.float32,
        torch.float32,
        optimizer.update,
        bucket_bytes=trial.bucket_bytes,
        overlap=trial.overlap,
    )
    draw_weights(program, trial.seed)
    return Side(mesh, program)


def put_together(mesh: Mesh, spec: ParamSpec, shares: list[tuple[Box, Tensor]]) -> Tensor:
    """A whole parameter, of every element the value of the first rank that owns it."""
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
# -----------------------------------------------------------------------------------------


def compare(place: Place, trial: Trial) -> Parity | None:
    """Run the layout and, on rank 0, one rank alone; every rank of the layout calls it. What was
    found is known to rank 0, the others return None; all return it when a signal stopped them."""
    cut = make_side(trial, trial.layout, place)
    alone = make_side(trial, Layout(), Place(0, 1, place.device)) if place.rank == 0 else None
    found = Parity()
    with StopRequest(patient=place.world_size > 1) as stop:
        for step in range(1, trial.steps + 1):
            compare_step(step, draw_batch(trial, step), cut, alone, found)
            if place.rank == 0:
                print(
                    f"shardwise: {trial.layout}: compared step {step} of {trial.steps}",
                    file=sys.stderr,
                )
            found.stopped = int(cut.mesh.world.max(float(stop.signal or 0))[0]) or None
            if found.stopped:
                return found
    compare_all(trial.steps, "param", cut, alone, lambda _, part, __: drawn_size(part), found)
    for name, ranks in unequal_replicas(cut).items():
        found.note(trial.steps, "replica", ranks, name)
    return found if alone is not None else None


def compare_step(
    step: int, batch: tuple[Tensor, Tensor], cut: Side, alone: Side | None, found: Parity
) -> None:
    """Take one step on both sides. Gradients are noted before norm and loss: they tell where a
    difference begins."""
    loss, norm = cut.step(*batch)
    loss1, norm1 = alone.step(*batch) if alone is not None else (math.nan, math.nan)
    config = cut.program.config

    def floor(name: str, part: Tensor, parameter: Tensor) -> float:
        return size(parameter) if vanishes(config, name) else 1e-6 * norm1

    compare_all(step, "grad", cut, alone, floor, found)
    found.note(step, "grad_norm", ratio(abs(norm - norm1), abs(norm1)))
    found.note(step, "loss", ratio(abs(loss - loss1), abs(loss1)))


def compare_all(
    step: int,
    kind: Literal["grad", "param"],
    cut: Side,
    alone: Side | None,
    floor: Callable[[str, Tensor, Tensor], float],
    found: Parity,
) -> None:
    """Compare every gradient or every master weight, parts of fused ones apart, in the 2-norm and
    relative to that of one rank's, or to floor(name, part, parameter) if that is more."""
    owned: Owned = "gradient" if kind == "grad" else "master"
    expected = alone.wholes(owned) if alone is not None else None
    for spec, whole in cut.wholes(owned):
        if expected is None:
            continue
        _, one = next(expected)
        for name, rows in logical_parts(spec):
            rel = ratio(
                size(whole[rows] - one[rows]), max(size(one[rows]), floor(name, one[rows], one))
            )
            found.note(step, kind, rel, name)


def unequal_replicas(cut: Side) -> dict[str, float]:
    """By parameter, the share of ranks whose weights, as they would compute with them, are not bit
    for bit what the owners hold. Digests are compared, since ranks gather in an order of their own
    and what they hold apart."""
    mesh = cut.mesh
    specs = {spec.name: spec for spec in cut.program.specs if spec.tied_to is None}
    held: dict[str, tuple[torch.dtype, bytes]] = {}
    for name, weight in cut.program.store.gathered():
        for part, box in local_parts(specs[name], mesh):
            held[part] = weight.dtype, digest(weight[box.local_slices])
    unequal = {part: 0.0 for spec in specs.values() for part, _ in logical_parts(spec)}
    for spec, master in cut.wholes("master"):
        for part, box in local_parts(spec, mesh):
            if part in held:
                dtype, found = held[part]
                expected = master[box.slices].to(dtype)
                unequal[part] = float(digest(expected) != found or bool(expected.isnan().any()))
    return {
        part: ranks / mesh.world.size
        for part, ranks in zip(unequal, mesh.world.sum(*unequal.values()), strict=True)
    }


def local_parts(spec: ParamSpec, mesh: Mesh) -> Iterator[tuple[str, Box]]:
    """The logical parts of a parameter with the box that this rank computes with."""
    for (part, _), box in zip(
        logical_parts(spec), boxes(spec, mesh.layout, mesh.coord), strict=True
    ):
        yield part, box


def digest(x: Tensor) -> bytes:
    """Of the values of a tensor; zero has no sign."""
    values = (x + 0.0).contiguous().cpu().view(torch.uint8).numpy().data
    return hashlib.blake2b(values, digest_size=16).digest()


def logical_parts(spec: ParamSpec) -> Iterator[tuple[str, slice]]:
    """What a model's author calls a parameter: q, k and v of a fused one apart, each by its
    rows."""
    row = 0
    for part in spec.rows:
        yield f"{spec.name}.{part.name}" if spec.parts else spec.name, slice(row, row + part.size)
        row += part.size


def vanishes(config: ModelConfig, name: str) -> bool:
    """Whether a gradient is zero in exact arithmetic, so that all of it is rounding, in any layout
    another: the bias of keys that no position turns adds the same to every score of a query, which
    the softmax does not see."""
    return config.positions == "learned" and name.endswith("qkv_bias.k")


def size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def drawn_size(x: Tensor) -> float:
    """The norm that weights of this shape are drawn with."""
    return 0.02 * math.sqrt(x.numel())


def ratio(difference: float, expected: float) -> float:
    """Infinite where something is not a number, or where nothing was expected and something
    came."""
    if expected == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    quotient = difference / expected
    return math.inf if math.isnan(quotient) else quotient
