"""Tiny models and data for tests of training: a few thousand parameters, sequences of 16 tokens.
And a few steps of them on one process, with what everybody trusts."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.measure.parity import logical_parts, vanishes
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import apply
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.parallel.state_store import Owned, StateStore
from shardwise.parallel.zero import Store
from shardwise.params import ParamSpec, model_specs
from shardwise.train.data.batches import Batch, MicroBatch
from shardwise.train.data.corpus_builder import build_corpus
from shardwise.train.optim import AdamW, LearningRate
from shardwise.train.settings import Settings

VOCAB = 97
SEQ_LEN = 16
SEQUENCES = 12
Case = TypeVar("Case")
Found = TypeVar("Found")

LLAMA = ModelConfig("llama", 2, 32, 40, 4, 2, 8, VOCAB, 32)
FAMILIES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "gpt2": ModelConfig(
        "gpt2", 2, 32, 64, 4, 4, 8, VOCAB, 32, tied=True, norm="layer", activation="gelu_tanh",
        gated=False,
        positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tied=True),
    "mistral": replace(
        LLAMA, family="mistral", sliding_window=5, windowed_layers=frozenset({0, 1})
    ),
}  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Every stored parameter drawn, norms and biases too, so that none can be mistaken for
    another."""
    random = seeded(5)
    return {
        spec.name: (spec.init.kind == "ones") + 0.1 * torch.randn(spec.shape, generator=random)
        for spec in model_specs(config)
        if spec.tied_to is None
    }


def global_batch(step: int, sequences: int = SEQUENCES) -> tuple[Tensor, Tensor]:
    """Tokens and targets [sequences, SEQ_LEN] of one step, row by row with ever fewer targets; the
    last three rows have none, so that some rank or micro-batch of a layout may have none at all."""
    random = seeded(100 + step)
    window = torch.randint(VOCAB, (sequences, SEQ_LEN + 1), generator=random)
    kept = (
        torch.rand(sequences, SEQ_LEN, generator=random)
        < torch.linspace(1.0, 0.1, sequences)[:, None]
    )
    kept[-3:] = False
    return window[:, :-1].contiguous(), torch.where(kept, window[:, 1:], -100)


def part_of(tokens: Tensor, targets: Tensor, layout: Layout, data_rank: int) -> Batch:
    """Return the part of a global batch that one data rank takes."""
    return share_of(in_one_piece(tokens, targets), layout, data_rank)


def in_one_piece(tokens: Tensor, targets: Tensor) -> MicroBatch:
    return MicroBatch(tokens, targets, torch.arange(tokens.shape[1]).expand(len(tokens), -1), None)


def share_of(batch: MicroBatch, layout: Layout, data_rank: int) -> Batch:
    """Return the part of all sequences that one data rank takes: ranks side by side, one micro-
    batch after another; the remainder is left out."""
    rows = len(batch.tokens) // (layout.microbatches * layout.dp)
    firsts = [(m * layout.dp + data_rank) * rows for m in range(layout.microbatches)]
    microbatches = tuple(rows_of(batch, slice(first, first + rows)) for first in firsts)
    return Batch(microbatches, sum(int((each.targets != -100).sum()) for each in microbatches))


def rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    documents = None if batch.documents is None else batch.documents[rows]
    return MicroBatch(batch.tokens[rows], batch.targets[rows], batch.positions[rows], documents)


# -- states, whatever rank owns what of them


def fill_store(store: Store, weights: Mapping[str, Tensor]) -> None:
    """Write whole weights into what this rank owns, as whoever draws or reads them does."""
    for spec, box, view in store.owned("master"):
        view.copy_(weights[spec.name][box.slices])
    store.refresh()


def filled_program(
    config: ModelConfig, layout: Layout, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[Program, Mesh]:
    """Return the program of a rank of a layout, with `tiny_weights`."""
    mesh = make_mesh(layout, rank, torch.device("cpu"), config.num_kv_heads)
    program = apply(config, mesh, dtype, dtype, OPTIMIZER.update)
    fill_store(program.store, tiny_weights(config))  # type: ignore[arg-type]
    return program, mesh


def each_case(
    cases: Sequence[Case],
    run: Callable[[Case], Found],
    spoil: Callable[[pytest.MonkeyPatch], None] | None,
) -> list[Found]:
    """Return the results of `run` for each case; a failure names its case. With `spoil`, something
    is broken in all."""
    reports = []
    for case in cases:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if spoil is not None:
                    spoil(patch)
                reports.append(run(case))
        except Exception as error:
            raise AssertionError(f"{case}") from error
    return reports


def whole(store: Store, mesh: Mesh, specs: Iterable[ParamSpec], kind: Owned) -> dict[str, Tensor]:
    """Whole tensors in fp32, put together on every rank from what each owns; every element must be
    owned once."""
    held = [spec for spec in specs if spec.tied_to is None]
    values, owners = torch.zeros(2, sum(spec.numel for spec in held))

    def named(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([spec.numel for spec in held])
        return {spec.name: part.view(spec.shape) for spec, part in zip(held, parts, strict=True)}

    found = named(values)
    counted = named(owners)
    for spec, box, view in store.owned(kind) if mesh.replicate.rank == 0 else ():
        found[spec.name][box.slices] += view.detach()
        counted[spec.name][box.slices] += 1
    for flat in (values, owners):
        mesh.world.all_reduce(flat).wait()
    assert bool((owners == 1).all()), "every element of every parameter is owned once"
    return found


def agreed(
    store: StateStore, mesh: Mesh, specs: Iterable[ParamSpec], kind: Owned
) -> dict[str, Tensor]:
    """The same where several ranks own an element, as those of a tensor axis do: they must hold the
    same bits."""
    held = [spec for spec in specs if spec.tied_to is None]
    both = torch.full((2, sum(spec.numel for spec in held)), -math.inf)

    def named(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([spec.numel for spec in held])
        return {spec.name: part.view(spec.shape) for spec, part in zip(held, parts, strict=True)}

    for sign, found in zip((1, -1), map(named, both), strict=True):
        for spec, box, view in store.owned(kind):
            found[spec.name][box.slices] = sign * view.detach().float()
    mesh.world.all_reduce(both, "max").wait()
    assert bool(both.isfinite().all()), f"every element of every {kind} is owned"
    assert torch.equal(both[0], -both[1]), f"replicas of {kind} differ"
    return named(both[0])


def digest(store: Store) -> str:
    """Return a digest of all the states and gradients that this rank owns: replicas must agree bit
    for bit."""
    kinds: tuple[Owned, ...] = ("master", "exp_avg", "exp_avg_sq", "gradient")
    parts = [view.detach().float().flatten() for kind in kinds for _, _, view in store.owned(kind)]
    return hashlib.sha256(torch.cat([torch.empty(0), *parts]).numpy().tobytes()).hexdigest()


# -- a few steps on one process

OPTIMIZER = AdamW(eps=1e-6)
RATE = LearningRate(1e-2, 4, 2, "cosine")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Expected:
    """Losses and norms of every step; gradients of the last, as they were before clipping; states
    at the end."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


def plain_steps(
    config: ModelConfig,
    num_steps: int,
    max_norm: float = math.inf,
    sequences: int = SEQUENCES,
    batches: Sequence[MicroBatch] | None = None,
) -> Expected:
    """Plain autograd of the summed loss over the count of targets, torch's own AdamW and torch's
    own clipping; on `global_batch` of `sequences`, or on the `batches` of the steps."""
    weights = {name: weight.requires_grad_() for name, weight in tiny_weights(config).items()}
    groups = [
        {
            "params": [w for w in weights.values() if w.dim() > 1],
            "weight_decay": OPTIMIZER.weight_decay,
        },
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    losses = []
    norms = []
    grads = {}
    for step in range(num_steps):
        batch = batches[step] if batches else in_one_piece(*global_batch(step, sequences))
        loss = plain_loss(config, weights, batch)
        theirs.zero_grad()
        loss.backward()
        grads = {
            name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None
        }
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        for group in theirs.param_groups:
            group["lr"] = RATE.at(step)
        theirs.step()
        losses.append(loss.item())
    moments = [
        {name: theirs.state[weight][kind] for name, weight in weights.items()} for kind in MOMENTS
    ]
    return Expected(
        losses, norms, grads, {name: weight.detach() for name, weight in weights.items()}, *moments
    )


def plain_loss(config: ModelConfig, weights: Mapping[str, Tensor], batch: MicroBatch) -> Tensor:
    """The mean over all tokens that have a target."""
    attend = Causal(config, causal_attention, batch.documents)
    logits = Transformer(config, REFERENCE).forward(weights, batch.tokens, batch.positions, attend)
    summed = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return summed / int((batch.targets != -100).sum())


def relative(local: Tensor, other: Tensor) -> float:
    return float((local.double() - other.double()).norm() / other.double().norm())


def worst(local: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest relative difference of any parameter."""
    assert local.keys() == other.keys()
    return max(relative(value, other[name]) for name, value in local.items())


def worst_part(
    config: ModelConfig, local: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> float:
    """The same, parts of fused parameters apart, and without gradients that vanish, which are no
    size to compare with."""
    assert local.keys() == other.keys()
    return max(
        relative(local[spec.name][rows], other[spec.name][rows])
        for spec in model_specs(config)
        if spec.tied_to is None
        for name, rows in logical_parts(spec)
        if not vanishes(config, name)
    )


# -- text and settings for a run

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 3


def write_source(folder: Path) -> Path:
    """Thirty short documents."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(30):
        (source / f"{number:02d}.txt").write_text(f"{number} {TEXT[number:][: 120 + number]}")
    return source


def build_data(folder: Path) -> Path:
    """The documents as bytes, a tenth of them held out."""
    build_corpus(write_source(folder), folder / "data", byte_tokenizer(), held_out=0.1)
    return folder / "data"


def tiny_settings(data: Path, run: Path, **changes: Any) -> Settings:
    """A model of 2 blocks and 9,000 weights in fp32; `changes` are those of any section, by key."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "name": "1M",
            "num_layers": 2,
            "hidden_size": 16,
            "ffn_size": 24,
            "num_heads": 2,
            "num_kv_heads": 1,
            "max_positions": 64,
        },
        "data": {"folder": str(data), "seq_len": 16, "global_batch": 4},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "run": {
            "folder": str(run),
            "steps": 6,
            "precision": "fp32",
            "eval_every": 3,
            "eval_sequences": 6,
            "save_every": 3,
            "keep_checkpoints": 0,
        },
    }
    sections = {}
    for section, given in values.items():
        default = getattr(Settings(), section)
        sections[section] = replace(
            default, **given | {k: v for k, v in changes.items() if hasattr(default, k)}
        )
    assert not changes.keys() - {key for section in sections.values() for key in vars(section)}
    return Settings(**sections)
