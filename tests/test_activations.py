"""What is kept for the backward: the planner's formula against the published one, and against the
tensors that a block really saves."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memory import peak_bytes
from ranks import Ranks
from shardwise.chunks import chunks as chunks_of_loss
from shardwise.chunks import longest_chunk
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import DTYPES
from shardwise.model.loss import cross_entropy
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.parallel.apply import seams_of
from shardwise.parallel.context import make_attend
from shardwise.parallel.mesh import make_mesh
from shardwise.parallel.pipeline.executor import Pipeline
from shardwise.parallel.zero import Store
from shardwise.params import model_specs, units
from shardwise.plan.activations import (
    MicroBatchShape,
    activation_bytes,
    block_bytes,
    head_bytes,
    head_gradient_bytes,
    logits_bytes,
    saved_tensors,
    share_of,
)
from shardwise.plan.traffic import chunk_counts
from shardwise.shards import boxes
from shardwise.train.loop import take_step
from tiny_training import (
    FAMILIES,
    LLAMA,
    SEQ_LEN,
    filled_program,
    global_batch,
    part_of,
    seeded,
    tiny_weights,
)

MIB = 1 << 20
CPU = torch.device("cpu")


def gpt(heads: int, hidden: int, layers: int) -> ModelConfig:
    return ModelConfig(
        "gpt2",
        layers,
        hidden,
        4 * hidden,
        heads,
        heads,
        hidden // heads,
        51_200,
        2048,
        tied=True,
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        positions="learned",
    )


# -- what is published

# Korthikanti et al. 2022 (arXiv 2205.05198), table 2 for the models of table 3 at a sequence of
# 2048: MiB a layer of none, tensor, tensor + sequence, tensor + selective, tensor + sequence +
# selective, and full, with 8 tensor ranks
PUBLISHED = [
    (gpt(64, 6144, 48), MicroBatchShape(4, 2048), (6752, 1264, 844, 624, 204, 96)),
    (gpt(96, 12_288, 96), MicroBatchShape(1, 2048), (2736, 552, 342, 312, 102, 48)),
]


@pytest.mark.parametrize(("config", "microbatch", "mib"), PUBLISHED, ids=["22B", "175B"])
def test_the_published_table(
    config: ModelConfig, microbatch: MicroBatchShape, mib: tuple[int, ...]
) -> None:
    """Full recompute as it stands. The others less what is not here (masks of dropout, scores), and
    with what is not there: statistics of norms, and under sp the two inputs that stay gathered."""
    n = 2048 * microbatch.num_sequences
    d = config.hidden_size
    heads = config.num_heads
    scores = 5 * 2048

    def theirs(short: str, *, with_scores: bool) -> Fraction:
        layout = Layout.parse(short)
        t = layout.tp
        s = layout.tp if layout.sequence_parallel else 1
        ours = block_bytes(config, share_of(config, layout, microbatch), 2, layout.recompute)
        there = Fraction(2 * n * d, s) + (Fraction(n * heads * scores, t) if with_scores else 0)
        here = Fraction(8 * n, s) + 4 * n * d * (1 - Fraction(1, s))
        return (ours + there - here) / MIB

    none, tensor, sequence, tensor_selective, sequence_selective, full = mib
    assert theirs("dp1", with_scores=True) == none
    assert theirs("tp8", with_scores=True) == tensor
    assert theirs("tp8.sp", with_scores=True) == sequence
    assert theirs("tp8", with_scores=False) == tensor_selective
    assert theirs("tp8.sp", with_scores=False) == sequence_selective
    for short, part in (("dp1.rc-full", 1), ("tp8.rc-full", 1), ("tp8.sp.rc-full", 8)):
        layout = Layout.parse(short)
        assert (
            block_bytes(config, share_of(config, layout, microbatch), 2, "full")
            == full * MIB // part
        )


@given(st.integers(1, 8), st.booleans(), st.integers(1, 4), st.integers(1, 16), st.integers(1, 3))
def test_the_table_of_the_docstring(t: int, sp: bool, each: int, head_dim: int, parts: int) -> None:
    """Its column `here`, over n D, for a GPT of any size."""
    heads = t * each
    config = gpt(heads, heads * 2 * head_dim, 1)
    layout = Layout(tp=t, sequence_parallel=sp and t > 1)
    microbatch = MicroBatchShape(3, 5 * t * parts)
    s = t if layout.sequence_parallel else 1
    d = config.hidden_size
    n = 3 * 5 * t * parts
    small = Fraction(8, s)
    inputs = Fraction(4 + 4 * s, s) if s > 1 else 8
    expected = {
        "none": inputs + Fraction(24, t) + small / d,
        "selective": inputs - 4 + Fraction(16, t),
        "full": Fraction(2, s),
    }
    share = share_of(config, layout, microbatch)
    for recompute, wanted in expected.items():
        assert Fraction(block_bytes(config, share, 2, recompute), n * d) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_first_stage_saves_as_much_as_one_rank(p: int) -> None:
    """p micro-batches of L / p layers (section 4.2.3), with 1f1b; later stages one less each, with
    gpipe all do. Besides, what goes to other stages: up for as long, down until the end of the
    step, of all before the last peak."""
    config = gpt(96, 12_288, 96)
    microbatch = MicroBatchShape(1, 2048)
    block = block_bytes(config, share_of(config, Layout(), microbatch), 2)

    def kept(short: str, stage: int) -> int:
        return activation_bytes(config, Layout.parse(short), stage, microbatch, 2)

    head = head_bytes(config, share_of(config, Layout(), microbatch), 2)
    blocks = [96 // p] * p
    shares = f".l{'-'.join(map(str, blocks))}" if p > 1 else ""
    layout = f"pp{p}.1f1b{shares}.m64" if p > 1 else "dp1.m64"
    given = 2048 * 12_288 * 2
    if p == 1:
        assert kept(layout, 0) == 96 * block + head
        return
    assert kept(layout, 0) == 96 * block + p * given
    for stage in range(1, p):
        held = (p - stage) * (blocks[stage] * block + given) + (64 - (p - stage)) * given
        assert kept(layout, stage) == held + (head - given if stage == p - 1 else 0)
    assert kept(f"pp{p}.gpipe.m3{shares}", 0) == 3 * (blocks[0] * block + given)
    assert kept(f"pp{p}.1f1b{shares}", 0) == blocks[0] * block + given, "no more than there are"


def test_llama_by_hand() -> None:
    """Llama-3.1-8B, 8192 tokens, 8 tensor ranks with sp: 4 heads and 1 kv head of 128, 1792 of
    14336, bf16."""
    config = CATALOGUE["llama-3.1-8b"]
    layout = Layout.parse("tp8.sp")
    microbatch = MicroBatchShape(1, 8192)
    inner = 2 * 4096 + 2 * (512 + 256) + 2 * 512 + 2 * 4096 + 2 * 2 * 1792 + 2 * 1792
    outer = 2 * (2 * 4096 + 4)
    block = 8192 * inner + 1024 * outer
    head = 1024 * (2 * 4096 + 4) + 8192 * 2 * 4096
    assert activation_bytes(config, layout, 0, microbatch, 2) == 32 * block + head
    dropped = 8192 * 2 * (4096 + 4096 + 1792) + 1024 * 2 * 4
    selective = activation_bytes(config, replace(layout, recompute="selective"), 0, microbatch, 2)
    assert selective == 32 * (block - dropped) + head
    x = 1024 * 2 * 4096
    full = activation_bytes(config, replace(layout, recompute="full"), 0, microbatch, 2)
    assert full == 32 * x + block - x, "the last block, run again; the head's is gone"
    normed = saved_tensors(replace(config, qk_norm=True), share_of(config, layout, microbatch), 2)
    assert sum(normed.values()) == block + 8192 * (2 * (512 + 256) + 4 * 5)


@pytest.mark.parametrize(
    ("short", "length", "padded"),
    [
        ("dp1", 13, 13),
        ("tp2", 13, 13),
        ("tp3.sp", 13, 15),
        ("cp2", 13, 16),
        ("cp2", 16, 16),
        ("cp2.a2a", 13, 14),
        ("tp2.cp2.sp", 13, 16),
        ("tp4.cp2.sp", 13, 16),
        ("tp3.cp2.sp", 13, 24),
        ("tp3.cp2.sp.a2a", 13, 18),
    ],
)
def test_sequences_are_padded_to_equal_parts(short: str, length: int, padded: int) -> None:
    layout = Layout.parse(short)
    assert layout.padded_tokens(length) == padded
    share = share_of(
        LLAMA, replace(layout, tp=1, sequence_parallel=False), MicroBatchShape(2, length)
    )
    assert share.tokens * layout.cp == 2 * replace(
        layout, tp=1, sequence_parallel=False
    ).padded_tokens(length)


# -- what is measured


@dataclass(frozen=True)
class Case:
    layout: str
    model: str
    precision: str = "fp32"


MODELS = FAMILIES | {
    "one-kv": replace(LLAMA, num_kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True)
}
SEQUENCES = 3
TOKENS = 8


def saved_bytes(run: Callable[[], object], apart: list[Tensor]) -> int:
    """The storages that autograd keeps alive after `run`, each whole and once, apart from those of
    `apart`."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = run()
    others = {x.untyped_storage().data_ptr() for x in apart}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    del kept
    return sum(size for at, size in storages.items() if at not in others)


def block_on(rank: int, world: int, cases: list[Case]) -> list[int]:
    """What the first block of each case saves on this rank."""
    return [measured_block(case, rank) for case in cases]


def measured_block(case: Case, rank: int) -> int:
    config = MODELS[case.model]
    layout = Layout.parse(case.layout)
    dtype = DTYPES[case.precision]
    mesh = make_mesh(layout, rank, CPU, config.num_kv_heads)
    model = Transformer(config, REFERENCE, seams_of(mesh), layout.recompute == "selective")
    share = share_of(config, layout, MicroBatchShape(SEQUENCES, TOKENS))
    whole = tiny_weights(config)
    weights = {}
    for spec in units(model_specs(config))["blocks.0"]:
        held = [whole[spec.name][box.slices] for box in boxes(spec, layout, mesh.coord)]
        weights[spec.name] = torch.cat(held).to(dtype).requires_grad_()
    x = torch.randn(
        SEQUENCES, share.outer_tokens // SEQUENCES, config.hidden_size, generator=seeded(1)
    )
    x = x.to(dtype).requires_grad_()
    rope = model.rope_tables(torch.arange(share.tokens // SEQUENCES).expand(SEQUENCES, -1), dtype)
    block = BlockWeights.of(weights, 0)
    attend = make_attend(config, layout, mesh.cp, None)
    return saved_bytes(
        lambda: model.block(x, 0, block, rope, attend), [*weights.values(), *(rope or ())]
    )


def planned_block(case: Case) -> int:
    config = MODELS[case.model]
    layout = Layout.parse(case.layout)
    share = share_of(config, layout, MicroBatchShape(SEQUENCES, TOKENS))
    return block_bytes(config, share, 4 if case.precision == "fp32" else 2, layout.recompute)


def test_the_measure_counts_each_storage_once() -> None:
    """Of gelu(x w) and what it is added to: x, and the product; twice the same product is one."""
    x = torch.randn(5, 7, requires_grad=True)
    w = torch.randn(3, 7, requires_grad=True)
    assert saved_bytes(lambda: F.gelu(F.linear(x, w)) + 1, [w]) == x.nbytes + 5 * 3 * 4
    assert (
        saved_bytes(lambda: F.linear(x, w).square() + F.linear(x, w).relu(), [w, x])
        == 2 * 5 * 3 * 4
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_saves_what_is_planned(model: str, precision: str) -> None:
    for layout in ("dp1", "dp1.rc-selective"):
        case = Case(layout, model, precision)
        assert measured_block(case, 0) == planned_block(case), case


@pytest.mark.parametrize(
    "short",
    [
        *(
            "tp2",
            "tp2.sp",
            "tp2.sp.rc-selective",
            "tp4",
            "tp4.sp",
            "tp4.rc-selective",
            "cp2",
            "cp2.rc-selective",
        ),
        "tp2.cp2.sp",
    ],
)
def test_so_does_a_part_of_a_block(ranks: Ranks, short: str) -> None:
    """On every rank; of `one-kv` several hold the same kv head."""
    cases = [
        Case(short, model, precision)
        for model in ("one-kv", "gpt2", "qwen3")
        for precision in ("fp32", "bf16")
    ]
    expected = [planned_block(case) for case in cases]
    world = Layout.parse(short).world_size
    assert ranks.run(world, block_on, cases) == [expected] * world


def test_all_to_all_saves_outputs_instead_of_log_sum_exp(ranks: Ranks) -> None:
    """Those of its heads, before they are traded for those of its tokens."""
    cases = [
        Case(short, "gpt2", precision)
        for short in ("cp2", "cp2.a2a")
        for precision in ("fp32", "bf16")
    ]
    expected = [planned_block(case) for case in cases]
    assert ranks.run(2, block_on, cases) == [expected] * 2


# -- what a pipeline keeps of the micro-batches in flight
# ---------------------------------------------------


DEEP = {name: replace(FAMILIES[name], num_layers=5) for name in ("llama", "qwen3", "gpt2")}


@dataclass(frozen=True, eq=False)
class Kept:
    """A tensor that a graph has saved, for as long as the graph is there."""

    tensor: Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if x.is_floating_point()
    }


class Keeping:
    """Follows what a pipeline keeps in a step: what its graphs have saved, inputs of pieces, tapes,
    and what it has sent; apart from weights, and from angles, of which there is one for all
    blocks."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.most = Counter[str]()
        self.alive: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.genuine_run: Callable[..., Tensor] = pipeline.run
        self.genuine_execute: Callable[..., None] = pipeline.execute

    def pack(self, x: Tensor) -> Kept:
        kept = Kept(x.detach())
        self.alive.add(kept)
        return kept

    def look(self) -> None:
        pipeline = self.pipeline
        store = self.pipeline.store
        saved = pipeline._saved.values()
        inputs = [each.x for each in saved if each.x is not None]
        owed = [x for each in saved for left in each.tape for x in (left.x, left.dy)]
        heads = [unit for name, unit in store.units.items() if name in ("final", "embed")]
        shapes = {
            tuple(leaf.shape) for unit in heads for leaf in unit.leaves.values() if leaf.dim() == 2
        }
        small = [
            grad for each in saved for _, grad in each.gradients if tuple(grad.shape) in shapes
        ]
        of_head = storages(
            x
            for x in (*(kept.tensor for kept in self.alive), *small)
            if tuple(x.shape) in shapes and not x.is_sparse
        )
        weights = storages(unit.weights for unit in store.units.values())
        apart = weights | storages(
            x for context in pipeline._contexts.values() for x in context.rope or ()
        )
        sent = [*(x for x, _ in pipeline._leaving.values()), *pipeline._activations.values()]
        kept = storages([*(each.tensor for each in self.alive), *inputs, *owed, *sent])
        sizes = {
            "activations": sum(
                size for at, size in kept.items() if at not in apart and at not in of_head
            ),
            "gradient of the head": sum(size for at, size in of_head.items() if at not in apart),
        }
        self.most |= Counter(sizes)

    def run(self, *given: Any) -> Tensor:
        """A piece, whose graph is whole when it has run again in a backward."""
        y = self.genuine_run(*given)
        self.look()
        return y

    def execute(self, *given: Any) -> None:
        self.genuine_execute(*given)
        self.look()


def kept_on(
    rank: int, world: int, short: str, model: str, precision: str
) -> tuple[Counter[str], Counter[str]]:
    """What is kept at most in a step, and what is planned of it."""
    config = DEEP[model]
    layout = Layout.parse(short)
    dtype = DTYPES[precision]
    program, mesh = filled_program(config, layout, rank, dtype)
    pipeline = program.pipeline
    store = program.store
    assert isinstance(pipeline, Pipeline) and isinstance(store, Store)
    keeping = Keeping(pipeline)
    pipeline.run = keeping.run
    pipeline.execute = keeping.execute  # type: ignore[method-assign, assignment]
    batch = part_of(*global_batch(0, 2 * layout.dp * layout.microbatches), layout, mesh.dp.rank)
    with torch.autograd.graph.saved_tensors_hooks(keeping.pack, lambda kept: kept.tensor):
        take_step(program, mesh, batch, 0.0, 0.0)
    microbatch = MicroBatchShape(2, SEQ_LEN)
    stage = mesh.pp.rank
    share = share_of(config, layout, microbatch)
    planned = {
        "activations": activation_bytes(config, layout, stage, microbatch, dtype.itemsize),
        "gradient of the head": head_gradient_bytes(
            layout, stage, share.vocab * share.hidden * dtype.itemsize
        ),
    }
    return +keeping.most, +Counter(planned)


PIPELINES = [
    *("pp2.gpipe.m3", "pp3.1f1b.m4", "pp2.interleaved.v2.m4", "pp3.zb-h1.m4", "pp2.zb-h2.m4"),
    *("pp2.zb-auto@2.m4", "pp2.zb-h1.m3.rc-selective", "pp2.1f1b.m3.rc-full"),
    *(
        "pp3.zb-h1.m4.rc-full",
        "pp2.interleaved.v2.m4.rc-full",
        "tp2.pp2.zb-h1.m3.sp",
        "dp2.pp2.z3.zb-h1.m3",
    ),
    *("pp2.cp2.1f1b.m3", "pp1.m3", "pp1.m3.rc-full"),
]


@pytest.mark.parametrize("short", PIPELINES)
def test_a_pipeline_saves_what_is_planned(ranks: Ranks, short: str) -> None:
    """Of all micro-batches in flight, and of those whose weights' gradients wait for W, on every
    rank, byte for byte: with more blocks on one rank than on another, with q and k norms, and with
    layer norms in bf16."""
    cases = [("llama", "fp32"), ("qwen3", "fp32"), ("gpt2", "bf16")]
    for found in ranks.run(Layout.parse(short).world_size, each_kept_on, short, cases):
        for case, (kept, planned) in zip(cases, found, strict=True):
            assert kept == planned, case


def each_kept_on(
    rank: int, world: int, short: str, cases: list[tuple[str, str]]
) -> list[tuple[Counter[str], Counter[str]]]:
    return [kept_on(rank, world, short, *case) for case in cases]


# -- what the loss takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_saves_two_gradients(dtype: torch.dtype) -> None:
    """Of its input, which the row of activations has, and of the head's weight, in that of
    logits."""
    config = LLAMA
    microbatch = MicroBatchShape(2, 9)
    element_bytes = dtype.itemsize
    x = torch.randn(2, 9, config.hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype, requires_grad=True)
    targets = torch.randint(config.vocab_size, (2, 9))
    kept = saved_bytes(lambda: cross_entropy(x, weight, targets, cross_entropy_grad_), [x, weight])
    share = share_of(config, Layout(), microbatch)
    final_norm = share.tokens * (config.hidden_size * element_bytes + 4)
    chunk = 18 * config.vocab_size * (element_bytes + (4 if element_bytes < 4 else 0))
    logits = logits_bytes(config, Layout(), 0, microbatch, element_bytes, element_bytes)
    assert kept == head_bytes(config, share, element_bytes) - final_norm + logits - chunk


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [17, 3000])
def test_the_logits_row_is_the_peak_of_the_loss(
    dtype: torch.dtype, grad_dtype: torch.dtype, tokens: int, tmp_path: Path
) -> None:
    """Besides the gradient of its input; all of 17 rows of 32,000 logits, and one chunk of three or
    six of 3,000. Columns of one number a row, some 40 bytes together, are not counted."""
    config = replace(LLAMA, hidden_size=8, vocab_size=32_000)
    x = torch.randn(1, tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(32_000, 8, dtype=dtype, requires_grad=True)
    weight.grad_dtype = grad_dtype
    targets = torch.randint(32_000, (1, tokens))
    peak, _ = peak_bytes(
        lambda: cross_entropy(x, weight, targets, cross_entropy_grad_), tmp_path / "trace.json"
    )
    microbatch = MicroBatchShape(1, tokens)
    planned = logits_bytes(config, Layout(), 0, microbatch, dtype.itemsize, grad_dtype.itemsize)
    assert 0 <= peak - x.nbytes - planned <= 100 * tokens


@given(st.integers(0, 10_000), st.integers(0, 500))
def test_chunks_are_those_of_the_loss(num_rows: int, most: int) -> None:
    sizes = [rows.stop - rows.start for rows in chunks_of_loss(num_rows, most)]
    assert longest_chunk(num_rows, most) == max(sizes, default=0)
    found = [rows for rows, number in chunk_counts(num_rows, most) for _ in range(number) if rows]
    assert found == sizes
