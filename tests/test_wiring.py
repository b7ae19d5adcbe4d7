"""Every training setting reaches what it is for: runs in this process against values worked out
without the trainer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.cli import main
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.run_checkpoint import checkpoint_path, list_checkpoints
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.loss import cross_entropy_naive
from shardwise.model.transformer import Transformer
from shardwise.parallel.mesh import Mesh, make_mesh
from shardwise.parallel.program import Program
from shardwise.params import flops_per_token
from shardwise.train import metrics
from shardwise.train.data.batches import Batches, MicroBatch, TokenFile
from shardwise.train.data.corpus_builder import build_corpus
from shardwise.train.loop import evaluate, take_step
from shardwise.train.optim import LearningRate
from shardwise.train.rank import make_batches, make_program
from shardwise.train.settings import OptimizerSettings, Settings, to_toml
from shardwise.train.validate import validated_run
from tiny_training import LLAMA, fill_store, seeded, tiny_settings, write_source

PEAK_FLOPS = 1e9
LOSS = 2e-6  # relative, in fp32
UNUSUAL = OptimizerSettings(
    lr=0.02,
    warmup_steps=2,
    beta1=0.6,
    beta2=0.7,
    eps=1e-2,
    weight_decay=2.0,
    max_norm=0.3,
    schedule="constant",
)


@pytest.fixture(autouse=True)
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "peak_flops", lambda device, dtype: PEAK_FLOPS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the documents held out, so that evaluation meets the ends of some."""
    folder = tmp_path_factory.mktemp("data")
    build_corpus(write_source(folder), folder / "data", byte_tokenizer(), held_out=0.5)
    return folder / "data"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """Train with changed settings; return the run's folder and its output."""

    def train(**changes: Any) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path / f"run{len(list(tmp_path.glob('*.toml')))}"
        path = tmp_path / f"{folder.name}.toml"
        path.write_text(to_toml(tiny_settings(data, folder, **changes)))
        assert main(["train", str(path)]) == 0
        return folder, [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]

    return train


def state_at(folder: Path, step: int, kind: str) -> dict[str, Tensor]:
    """One kind of state (master, exp_avg, exp_avg_sq) of a run on one rank, its parts put together
    again."""
    parts: dict[str, list[Tensor]] = {}
    index = json.loads((checkpoint_path(folder, step) / "index.json").read_text())
    tensors = load_file(checkpoint_path(folder, step) / "rank-00000.safetensors")
    for entry in index["entries"]:
        if entry["state"] == kind:
            parts.setdefault(entry["name"], []).append(tensors[entry["key"]])
    return {name: torch.cat(found) for name, found in parts.items()}


def norm_of(state: dict[str, Tensor]) -> float:
    return float(torch.cat([part.double().flatten() for part in state.values()]).norm())


def held_out_of(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "loss" in row]


def program_of(settings: Settings) -> tuple[Program, Mesh]:
    """The program before its first step."""
    mesh = make_mesh(Layout.parse(settings.run.layout), 0, torch.device("cpu"))
    return make_program(validated_run(settings), mesh, 0), mesh


def weights_of(program: Program) -> dict[str, Tensor]:
    names = tuple(spec.name for spec in program.specs if spec.tied_to is None)
    return {name: weight.detach().clone() for name, weight in program.store.weights(names).items()}


def loss_of(config: ModelConfig, weights: dict[str, Tensor], batch: MicroBatch) -> Tensor:
    """The mean loss over the targets, through plain calls of the model."""
    model = Transformer(config, REFERENCE)
    hidden = model.hidden(
        weights, batch.tokens, batch.positions, Causal(config, causal_attention, batch.documents)
    )
    return (
        cross_entropy_naive(hidden, weights[model.head_name], batch.targets)
        / (batch.targets != -100).sum()
    )


# -- optimizer


def two_steps(settings: Settings, optimizer: OptimizerSettings) -> dict[str, Tensor]:
    """The weights after two steps of torch's AdamW and torch's clipping, on gradients from plain
    autograd."""
    program, mesh = program_of(settings)
    weights = {name: torch.nn.Parameter(weight) for name, weight in weights_of(program).items()}
    matrices, vectors = (
        [w for w in weights.values() if (w.dim() > 1) is wanted] for wanted in (True, False)
    )
    theirs = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )
    for step, lr in enumerate((optimizer.lr / 2, optimizer.lr)):
        theirs.zero_grad()
        (microbatch,) = make_batches(settings, mesh).batch(step).microbatches
        loss_of(program.config, dict(weights), microbatch).backward()
        if optimizer.max_norm:
            torch.nn.utils.clip_grad_norm_(weights.values(), optimizer.max_norm)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
    return {name: weight.detach() for name, weight in weights.items()}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_two_steps_with_unusual_values_are_those_of_torch(
    data: Path, run: Callable[..., Any]
) -> None:
    """Within 1e-5 (steps are about 1e-2), and any one value back at its default would be further
    off than 1e-4."""
    changes: dict[str, Any] = vars(UNUSUAL) | {"steps": 2, "eval_every": 0}
    folder, _ = run(**changes)
    ours = state_at(folder, 2, "master")
    settings = tiny_settings(data, folder, **changes)
    assert furthest(ours, two_steps(settings, UNUSUAL)) < 1e-5
    for key in ("beta1", "beta2", "eps", "weight_decay", "max_norm"):
        other = replace(UNUSUAL, **{key: getattr(OptimizerSettings(), key)})
        assert furthest(ours, two_steps(settings, other)) > 1e-4, key


def test_the_gradient_is_clipped_to_the_norm_that_was_set(run: Callable[..., Any]) -> None:
    """After one step the first moment is (1 - beta1) x the clipped gradient."""
    for max_norm in (0.0, 0.01, 1e3):
        folder, rows = run(steps=1, eval_every=0, beta1=0.5, max_norm=max_norm)
        norm = rows[0]["grad_norm"]
        assert 0.01 < norm < 1e3
        clipped = min(norm, max_norm) if max_norm else norm
        assert norm_of(state_at(folder, 1, "exp_avg")) == pytest.approx(0.5 * clipped, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        (
            {"schedule": "wsd", "warmup_steps": 1, "decay_steps": 2, "final_lr": 0.5},
            [1, 1, 1, 1, 1, 0.75],
        ),
        (
            {"schedule": "wsd", "warmup_steps": 0, "decay_steps": 4, "final_lr": 0.2},
            [1, 1, 1, 0.8, 0.6, 0.4],
        ),
        ({"schedule": "cosine", "warmup_steps": 2, "final_lr": 0.3}, [0.5, 1, 1, None, 0.65, None]),
    ],
)
def test_the_rate_follows_its_settings(
    changes: dict[str, Any], by_hand: list[float | None], run: Callable[..., Any]
) -> None:
    """Shares of the peak; None where the cosine has no round value."""
    _, rows = run(lr=0.004, eval_every=0, **changes)
    reports = [row["lr"] for row in rows]
    asked = LearningRate(
        0.004,
        6,
        changes["warmup_steps"],
        changes["schedule"],
        changes.get("final_lr", 0.1),
        changes.get("decay_steps", 0),
    )
    assert reports == [asked.at(step) for step in range(6)]
    assert [None if share is None else pytest.approx(0.004 * share) for share in by_hand] == [
        None if share is None else rate for share, rate in zip(by_hand, reports, strict=True)
    ]


# -- precision


@pytest.mark.parametrize(
    ("precision", "gradients", "weight_dtype", "grad_dtype"),
    [
        ("bf16", "same", torch.bfloat16, torch.bfloat16),
        ("bf16", "fp32", torch.bfloat16, torch.float32),
        ("fp32", "same", torch.float32, torch.float32),
    ],
)
def test_the_store_has_the_precision_of_the_settings(
    data: Path,
    tmp_path: Path,
    precision: str,
    gradients: str,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    program, _ = program_of(tiny_settings(data, tmp_path, precision=precision, gradients=gradients))
    units = program.store.units.values()
    assert {unit.weights.dtype for unit in units} == {weight_dtype}
    assert {unit.grads.dtype for unit in units} == {grad_dtype}
    assert {unit.master.dtype for unit in units} == {torch.float32}


def test_fp32_gradients_of_bf16_weights_keep_what_bf16_would_round(
    data: Path, tmp_path: Path
) -> None:
    """Four micro-batches: the sum of four bf16 gradients is often no bf16 number; kept in bf16 it
    is rounded."""
    grads = {}
    for gradients in ("same", "fp32"):
        settings = tiny_settings(data, tmp_path, layout="m4", precision="bf16", gradients=gradients)
        program, mesh = program_of(settings)
        take_step(program, mesh, make_batches(settings, mesh).batch(0), 0.0, 0.0)
        grads[gradients] = torch.cat([unit.grads.float() for unit in program.store.units.values()])
    rounded = grads["fp32"].bfloat16().float()
    assert (grads["fp32"] != rounded).float().mean() > 0.3
    assert torch.equal(grads["same"], grads["same"].bfloat16().float())
    torch.testing.assert_close(
        grads["same"], grads["fp32"], rtol=0.05, atol=0.02 * float(grads["fp32"].abs().max())
    )


@pytest.mark.parametrize("layout", ["dp1", "dp1.z3"])
def test_the_heads_gradient_reaches_the_fp32_sum_unrounded(
    data: Path, tmp_path: Path, layout: str
) -> None:
    """One micro-batch, so what is no bf16 number was summed in fp32 by the loss itself."""
    settings = tiny_settings(data, tmp_path, layout=layout, precision="bf16", gradients="fp32")
    program, mesh = program_of(settings)
    take_step(program, mesh, make_batches(settings, mesh).batch(0), 0.0, 0.0)
    rounded = {
        spec.name: bool(torch.equal(grad, grad.bfloat16().float()))
        for spec, _, grad in program.store.owned("gradient")
    }
    name = "embed" if program.config.tied else "head"
    assert [each for each, is_rounded in rounded.items() if not is_rounded] == [name]


# -- data and evaluation


def held_out_loss(
    settings: Settings, program: Program, num_sequences: int, separate: bool
) -> float:
    """Build batches by hand from the token file: windows in order, documents separated by where
    they start."""
    split = TokenFile(Path(settings.data.folder), "held_out")
    length = settings.data.seq_len
    documents = (
        np.searchsorted(np.asarray(split.starts), np.arange(split.num_tokens), side="right") - 1
    )
    tokens = torch.from_numpy(np.asarray(split.tokens).astype(np.int64))
    number = torch.from_numpy(documents)
    cut = [slice(first * length, first * length + length) for first in range(num_sequences)]
    inputs, inside = (
        torch.stack([source[window] for window in cut]) for source in (tokens, number)
    )
    targets, after = (
        torch.stack([source[1:][window] for window in cut]) for source in (tokens, number)
    )
    assert (inside[:, 0] != inside[:, -1]).any(), "some window must hold two documents"
    positions = torch.arange(length).expand(num_sequences, -1)
    if separate:
        targets = torch.where(inside == after, targets, -100)
    batch = MicroBatch(
        inputs, targets, positions, inside if separate else None
    )  # rotations are relative
    return float(loss_of(program.config, weights_of(program), batch))


@pytest.mark.parametrize("num_sequences", [12, 20])
def test_evaluation_keeps_documents_apart_as_it_is_told(
    num_sequences: int, data: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    """A run starts with the weights of its seed; larger ones, on which attention weighs more, agree
    as well."""
    losses = []
    for separate in (False, True):
        changes = {"separate_documents": separate, "eval_sequences": num_sequences}
        _, rows = run(steps=1, **changes)
        settings = tiny_settings(data, tmp_path, **changes)
        program, mesh = program_of(settings)
        by_hand = held_out_loss(settings, program, num_sequences, separate)
        assert held_out_of(rows)[0] == pytest.approx(by_hand, rel=LOSS)
        random = seeded(3)
        drawn = {
            name: torch.randn(w.shape, generator=random) for name, w in weights_of(program).items()
        }
        fill_store(program.store, drawn)
        losses.append(evaluate(settings, program, mesh))
        by_hand = held_out_loss(settings, program, num_sequences, separate)
        assert losses[-1] == pytest.approx(by_hand, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


def test_training_keeps_documents_apart_as_it_is_told(
    data: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    """The loss of the first step, whose batch holds ends of documents."""
    reports = {}
    for separate in (False, True):
        _, rows = run(steps=1, eval_every=0, global_batch=12, separate_documents=separate)
        reports[separate] = rows[0]["loss"]
        program, _ = program_of(tiny_settings(data, tmp_path))
        (microbatch,) = Batches(TokenFile(data), 16, 12, 1, 0, 1, 0, separate).batch(0).microbatches
        by_hand = float(loss_of(program.config, weights_of(program), microbatch))
        assert reports[separate] == pytest.approx(by_hand, rel=LOSS)
    assert abs(reports[False] - reports[True]) > 10 * LOSS * reports[False]


@pytest.mark.parametrize(
    ("steps", "eval_every", "evaluated"),
    [(5, 3, [0, 3, 5]), (4, 2, [0, 2, 4]), (3, 10, [0, 3]), (3, 0, [])],
)
def test_it_evaluates_before_between_and_after(
    steps: int, eval_every: int, evaluated: list[int], run: Callable[..., Any]
) -> None:
    _, rows = run(steps=steps, eval_every=eval_every)
    assert [row["step"] for row in rows if "held_out_loss" in row] == evaluated


def test_the_seed_draws_weights_and_order(
    data: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    drawn = []
    for seed in (0, 0, 1):
        settings = tiny_settings(data, tmp_path, seed=seed)
        program, mesh = program_of(settings)
        drawn.append(
            (weights_of(program), make_batches(settings, mesh).batch(0).microbatches[0].tokens)
        )
    (weights, tokens), (again, tokens_again), (others, tokens_others) = drawn
    assert furthest(weights, again) == 0 and torch.equal(tokens, tokens_again)
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]) == (weight.dim() == 1), (
            f"{name}: matrices are drawn, norms are ones"
        )
    assert not torch.equal(tokens, tokens_others)
    losses = [[row["loss"] for row in steps_of(run(steps=2, seed=seed)[1])] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] and losses[0] != losses[2]


# -- checkpoints


@pytest.mark.parametrize(
    ("save_every", "keep", "left"),
    [
        (2, 0, [2, 4, 6, 7]),
        (2, 3, [4, 6, 7]),
        (2, 1, [7]),
        (3, 0, [3, 6, 7]),
        (0, 0, [7]),
        (0, 2, [7]),
    ],
)
def test_checkpoints_are_saved_and_kept_as_told(
    save_every: int, keep: int, left: list[int], run: Callable[..., Any]
) -> None:
    folder, _ = run(steps=7, eval_every=0, save_every=save_every, keep_checkpoints=keep)
    saved = [path.name for path in list_checkpoints(folder / "checkpoints")]
    assert saved == [f"step-{step:08d}" for step in left]


# -- operations

WINDOWED = replace(LLAMA, sliding_window=4, windowed_layers=frozenset({1}))
BLOCK = (
    32 * (32 + 2 * 16) + 32 * 32 + 2 * 40 * 32 + 32 * 40 + 2 * 32
)  # qkv, out, gate and up, down, two norms
WIDER = (
    32 * (64 + 2 * 32) + 32 * 64 + 2 * 40 * 32 + 32 * 40 + 2 * 32
)  # heads of 16: q is wider than the residual
HEAD = 32 + 97 * 32  # the last norm and one matrix of the vocabulary


@pytest.mark.parametrize(
    ("config", "seq_len", "flops"),
    [
        (LLAMA, 16, 6 * (2 * BLOCK + HEAD) + 6 * 2 * 32 * 16),
        (LLAMA, 0, 6 * (2 * BLOCK + HEAD)),
        (replace(LLAMA, tied=True), 16, 6 * (2 * BLOCK + HEAD) + 6 * 2 * 32 * 16),
        (replace(LLAMA, head_dim=16), 32, 6 * (2 * WIDER + HEAD) + 6 * 2 * 64 * 32),
        (CATALOGUE["gpt2"], 1024, 6 * (124_439_808 - 1024 * 768) + 6 * 12 * 768 * 1024),
        (WINDOWED, 16, 6 * (2 * BLOCK + HEAD) + 12 * 32 * 8 + 6 * 32 * 7),
    ],
    ids=[
        "untied",
        "without attention",
        "tied",
        "wide heads",
        "gpt2",
        "a window of 4 in one of two layers",
    ],
)
def test_operations_of_a_token_by_hand(config: ModelConfig, seq_len: int, flops: int) -> None:
    """Attention takes 12 per element of a query and token that it sees: 8 of 16 on average, and 3.5
    of a window of 4."""
    assert flops_per_token(config, seq_len) == flops


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "wsd needs optimizer.decay_steps of at least 1"),
        ({"warmup_steps": 3, "decay_steps": 4}, "are 7 steps together, more than run.steps, 6"),
    ],
)
def test_a_schedule_that_cannot_decay_is_refused(
    data: Path, tmp_path: Path, changes: dict[str, int], says: str
) -> None:
    """The rate would stay at its peak, or jump."""
    settings = tiny_settings(data, tmp_path, steps=6, schedule="wsd", **changes)
    with pytest.raises(ValueError, match=says):
        validated_run(settings)


def test_mfu_is_the_share_of_the_peak(data: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    _, rows = run(steps=2, eval_every=0)
    config = validated_run(tiny_settings(data, tmp_path)).config
    for row in rows:
        used = row["tokens_per_s"] * flops_per_token(config, 16)
        assert row["mfu"] * PEAK_FLOPS == pytest.approx(used, rel=1e-9)
