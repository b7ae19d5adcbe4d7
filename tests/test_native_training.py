"""The native training kernels, forward and backward, against fp64, on every instruction set of this
processor."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from memory import peak_bytes
from shardwise.chunks import PRODUCT_BYTES
from shardwise.kernels.interface import CrossEntropyGrad
from shardwise.kernels.native.library import instruction_sets
from shardwise.kernels.native.training import NativeTraining
from shardwise.kernels.reference.attention import attention_naive
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.kernels.reference.training import REFERENCE_TRAINING
from shardwise.kernels.training_registry import native_training_kernels
from shardwise.layout import Layout
from shardwise.model import loss
from shardwise.model.loss import IGNORE_INDEX, VocabShard, cross_entropy, local_targets
from shardwise.model.seams import UNSHARDED, Seams
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.parallel.context import make_attend
from shardwise.parallel.mesh import make_mesh
from shardwise.plan.activations import MicroBatchShape, block_bytes, share_of
from test_activations import saved_bytes
from test_attention import drawn, error, with_gradients
from test_kernels import EPS, KERNELS, MEMORY, Case, inputs_of, relative, results, wide
from tiny_training import FAMILIES, seeded, tiny_weights

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="the native kernels are not built: no compiler"
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
NAMES = st.sampled_from(instruction_sets() or ("none",))
HALF_STEP = 2.0**-8
"""Rounding to bf16 moves a number by at most this, relatively."""


@pytest.fixture(params=instruction_sets())
def native(request: pytest.FixtureRequest) -> NativeTraining:
    return NativeTraining.of(request.param)


# -- attention


def assert_attends(
    native: NativeTraining, inputs: list[Tensor], dy: Tensor, *options: object
) -> None:
    """Results of order one are within 8e-3 of fp64 in the 2-norm: two or three roundings to
    bf16."""
    exact = with_gradients(
        attention_naive, [x.detach().double().requires_grad_() for x in inputs], dy, *options
    )
    found = with_gradients(native.attention, inputs, dy, *options)
    for mine, truth in zip(found, exact, strict=True):
        assert mine.shape == truth.shape and mine.dtype == BF16
        assert (mine - truth).norm() <= 8e-3 * max(truth.norm(), truth.numel() ** 0.5)


@settings(max_examples=examples(40), deadline=None)
@given(
    name=NAMES,
    batch=st.integers(1, 2),
    tokens=st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 100, 150]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5, 100]),
    dim=st.sampled_from([16, 48, 64, 128]),
    window=st.sampled_from([None, 1, 7, 40, 1000]),
    documents=st.none() | st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_attention_matches_definition_for_any_shape_window_and_documents(
    name: str,
    batch: int,
    tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    window: int | None,
    documents: int | None,
    seed: int,
) -> None:
    if group == 100:
        tokens = min(tokens, 33)
    inputs = drawn(batch, tokens, kv_heads * group, kv_heads, dim, BF16, seed=seed)
    dy = torch.randn(inputs[0].shape, generator=seeded(seed)).to(BF16)
    numbers = None
    if documents:
        numbers = torch.randint(documents, (batch, tokens), generator=seeded(seed))
        if seed % 2:  # one after the other, as they are packed
            numbers = numbers.sort(-1).values
    assert_attends(NativeTraining.of(name), inputs, dy, window, numbers)


@pytest.mark.parametrize(("scale", "bound"), [(1.0, 4e-3), (4.0, 1e-2)])
def test_attention_scores_are_not_rounded(
    native: NativeTraining, scale: float, bound: float
) -> None:
    """The same test as in test_attention, with half of its bounds."""
    inputs = drawn(2, 200, 6, 2, 64, BF16, scale)
    dy = torch.randn(2, 200, 6, 64, generator=seeded(1)).to(BF16)
    exact = with_gradients(
        attention_naive, [x.detach().double().requires_grad_() for x in inputs], dy.double()
    )
    found = with_gradients(native.attention, inputs, dy)
    assert max(error(x, truth) for x, truth in zip(found, exact, strict=True)) < bound


def test_attention_of_views_of_one_tensor(native: NativeTraining) -> None:
    qkv = torch.randn(2, 19, 7, 32, generator=seeded(2)).to(BF16)
    parts = [x.requires_grad_() for x in qkv.split((3, 1, 3), 2)]
    q = parts[0]
    k = parts[1]
    v = parts[2][:, :, :1]
    whole = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    dy = torch.randn(2, 3, 19, 32, generator=seeded(3)).to(BF16).transpose(1, 2)
    for mine, other in zip(
        with_gradients(native.attention, [q, k, v], dy),
        with_gradients(native.attention, whole, dy),
        strict=True,
    ):
        assert torch.equal(mine, other)


def test_unsupported_head_dims_use_torch_attention(native: NativeTraining) -> None:
    inputs = drawn(1, 9, 2, 2, 24, BF16)
    dy = torch.randn(1, 9, 2, 24, generator=seeded(1)).to(BF16)
    for mine, other in zip(
        with_gradients(native.attention, inputs, dy),
        with_gradients(REFERENCE_TRAINING.attention, inputs, dy),
        strict=True,
    ):
        assert torch.equal(mine, other)


def test_attention_propagates_nan(native: NativeTraining) -> None:
    """NaN in a query affects its own row; in a key, all rows that attend to it; the same in
    gradients."""
    q, k, v = (x.detach() for x in drawn(1, 50, 2, 2, 32, BF16))
    spoilt = q.clone()
    spoilt[0, 20, 1, 3] = torch.nan
    y = native.attention(spoilt, k, v)
    assert y[0, 20, 1].isnan().all() and y.isnan().sum() == 32
    spoilt = k.clone()
    spoilt[0, 40, 0, 0] = torch.nan
    y = native.attention(q, spoilt, v)
    assert (
        y[0, 40:, 0].isnan().all() and not y[0, :40].isnan().any() and not y[0, :, 1].isnan().any()
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dy = torch.ones_like(q)
    dy[0, 30, 0, 0] = torch.nan
    dq, dk, dv = torch.autograd.grad(native.attention(*leaves), leaves, dy)
    assert dq[0, 30, 0].isnan().all() and not dq[0, :, 1].isnan().any()
    assert (
        dk[0, :31, 0].isnan().all()
        and dv[0, :31, 0, 0].isnan().all()
        and not dv[0, 48:].isnan().any()
    )


def test_attention_memory_is_linear_in_sequence_length(tmp_path: Path) -> None:
    """torch's peak memory is that of the results. The kernel's own rows of scores cover one block
    of tokens."""
    inputs = drawn(1, 2048, 4, 2, 16, BF16)
    native = NativeTraining.of(instruction_sets()[0])
    peak, _ = peak_bytes(
        lambda: torch.autograd.grad(native.attention(*inputs).sum(), inputs), tmp_path / "trace"
    )
    assert peak < 6 * inputs[0].nbytes


# -- rows


def versions(native: NativeTraining, kernel: str) -> Callable[..., Tensor]:
    if kernel == "norm":
        return lambda x, weight: native.rms_norm(x, weight, EPS)
    return native.apply_rope if kernel == "rotary" else lambda inner: native.gated(inner, kernel)


@settings(max_examples=examples(60), deadline=None)
@given(
    name=NAMES,
    kernel=st.sampled_from(["norm", "rotary", "silu"]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
    leading=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    width=st.sampled_from([1, 31, 32, 64, 100, 96, 576]),
    heads=st.integers(1, 4),
    x_memory=st.sampled_from(sorted(MEMORY)),
    dy_memory=st.sampled_from(sorted(MEMORY)),
)
def test_row_kernels_match_definition_for_any_shape_and_memory_layout(
    name: str,
    kernel: str,
    shared: bool,
    seed: int,
    leading: list[int],
    width: int,
    heads: int,
    x_memory: str,
    dy_memory: str,
) -> None:
    """Results of order one are within 8e-3 of the definition in fp64, in the 2-norm: one or two
    roundings."""
    width += width % 2 if kernel != "norm" else 0
    case = Case(kernel, tuple(leading), width, heads, shared, x_memory, dy_memory, seed)
    inputs, dy = inputs_of(case, BF16)
    of = KERNELS[kernel]
    before = [x.clone() for x in (*inputs, dy)]
    found = results(versions(NativeTraining.of(name), kernel), of.num_leaves, inputs, dy)
    exact = results(of.naive, of.num_leaves, wide(inputs), dy.double())
    for mine, truth in zip(found, exact, strict=True):
        assert mine.shape == truth.shape and mine.dtype == BF16
        assert (mine - truth).norm() <= 8e-3 * max(truth.norm(), truth.numel() ** 0.5)
    assert all(torch.equal(x, old) for x, old in zip((*inputs, dy), before, strict=True)), (
        "inputs stay as they are"
    )


@pytest.mark.parametrize("kernel", ["norm", "rotary", "silu"])
def test_row_kernel_errors_are_no_larger_than_the_definitions(
    native: NativeTraining, kernel: str
) -> None:
    """The error against fp64, of the result and of every gradient, is at most 1.1 times that of the
    definition."""
    inputs, dy = inputs_of(Case(kernel, (7, 33), 96), BF16)
    of = KERNELS[kernel]
    exact = results(of.naive, of.num_leaves, wide(inputs), dy.double())
    fast = versions(native, kernel)
    mine, naive = (results(run, of.num_leaves, inputs, dy) for run in (fast, of.naive))
    for found, slow, truth in zip(mine, naive, exact, strict=True):
        assert relative(found, truth) <= 1.1 * relative(slow, truth) < 1e-2


def test_gates_far_from_zero_and_non_finite(native: NativeTraining) -> None:
    """Where exp(-gate) overflows or underflows, silu is 0 or the gate, and its slope 0 or 1, to a
    rounding."""
    gate = torch.tensor(
        [-3e38, -1000, -100, -89, -88, 88, 100, 1000, 3e38, -math.inf, math.inf, math.nan]
    ).repeat(8)
    inner = torch.cat((gate, torch.ones_like(gate))).to(BF16).requires_grad_()
    y = native.gated(inner, "silu")
    (d_inner,) = torch.autograd.grad(y, inner, torch.ones_like(y))
    d_gate, d_up = d_inner.chunk(2)
    assert (
        y[:5].abs().max() < 1e-35
        and torch.equal(d_up[:9], y[:9])
        and d_gate[:5].abs().max() < 1e-35
    )
    assert torch.equal(y[5:9], inner[5:9]) and (d_gate[5:9] == 1).all()
    assert y[10] == math.inf and y[11].isnan() and d_gate[11].isnan()


def test_norm_propagates_nan(native: NativeTraining) -> None:
    inputs, dy = inputs_of(Case("norm", (200,), 40), BF16)
    inputs[0][150, 3] = torch.nan
    y, dx, d_weight = results(versions(native, "norm"), 2, inputs, dy)
    assert y[150].isnan().all() and dx[150].isnan().all() and d_weight.isnan().all()
    assert not y[:150].isnan().any() and not dx[151:].isnan().any()


# -- loss


def logits_of(num_rows: int, num_columns: int, seed: int) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(num_rows, num_columns, generator=seeded(seed))
    targets = torch.randint(num_columns, (num_rows,), generator=seeded(seed + 1))
    targets[torch.rand(num_rows, generator=seeded(seed)) < 0.3] = IGNORE_INDEX
    return logits.to(BF16), targets


@settings(max_examples=examples(40), deadline=None)
@given(
    name=NAMES,
    num_rows=st.integers(0, 9),
    num_columns=st.sampled_from([1, 5, 16, 100, 1024, 3000]),
    padding=st.sampled_from([0, 1, 17]),
    gaps=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradient_of_logits_match_fp64(
    name: str, num_rows: int, num_columns: int, padding: int, gaps: bool, seed: int
) -> None:
    """The loss is within 1e-5 of fp64, the gradient within one rounding."""
    logits, targets = logits_of(num_rows, num_columns, seed)
    exact = logits.double()
    log_p = exact.log_softmax(-1)
    has_target = (targets != IGNORE_INDEX)[:, None]
    at = targets[:, None].where(has_target, 0)
    one = torch.zeros_like(exact).scatter_(1, at, 1.0)
    padded = torch.cat((logits, torch.full((num_rows, padding), torch.nan, dtype=BF16)), 1)
    if gaps:
        padded = torch.cat((padded, torch.zeros_like(padded)), 1)[:, : num_columns + padding]
    local = local_targets(targets, VocabShard(UNSHARDED, num_columns + padding, num_columns))
    total = NativeTraining.of(name).cross_entropy_grad_(padded, local, True)
    wanted = -(log_p.gather(1, at) * has_target).sum()
    assert (total - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)
    torch.testing.assert_close(
        padded[:, :num_columns].double(),
        (log_p.exp() - one) * has_target,
        rtol=1.01 * HALF_STEP,
        atol=1e-6,
    )
    assert not padded[:, num_columns:].any()


def test_loss_of_a_vocabulary_shard(native: NativeTraining) -> None:
    """One rank of two: the values that the other rank would reduce are computed in fp64."""
    logits, targets = logits_of(11, 90, 4)
    exact = logits.double()
    aimed = targets[:, None].clamp(min=0)
    top = exact.amax(-1, keepdim=True)
    for rank, mine in enumerate(logits.split(45, 1)):
        theirs = exact.split(45, 1)[1 - rank]
        is_there = (aimed // 45 == 1 - rank) & (targets != IGNORE_INDEX)[:, None]
        their_sums = (theirs - top).exp().sum(-1, keepdim=True)
        told = torch.cat((their_sums, (exact.gather(1, aimed) - top).where(is_there, 0)), 1).float()
        peaks = theirs.amax(-1, keepdim=True).float()
        seams = Seams()
        seams.vocab_rank = rank
        seams.max = lambda x, peaks=peaks: torch.maximum(x, peaks, out=x)  # type: ignore[method-assign]
        seams.sum = lambda x, told=told: x.add_(told)  # type: ignore[method-assign]
        local = local_targets(targets, VocabShard(seams, 45, 90))
        found = mine.clone()
        other = mine.clone()
        total = native.cross_entropy_grad_(found, local, True)
        torch.testing.assert_close(
            total, cross_entropy_grad_(other, local, True), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(found.float(), other.float(), rtol=2 * HALF_STEP, atol=1e-6)


def test_loss_without_gradient_leaves_logits_unchanged(native: NativeTraining) -> None:
    logits, targets = logits_of(5, 70, 1)
    local = local_targets(targets, VocabShard(UNSHARDED, 70, 70))
    before = logits.clone()
    total = native.cross_entropy_grad_(logits, local, False)
    assert torch.equal(logits, before) and torch.equal(
        total, native.cross_entropy_grad_(logits, local, True)
    )


def test_loss_propagates_nan(native: NativeTraining) -> None:
    logits, targets = logits_of(6, 70, 1)
    targets[:] = 3
    logits[1, 60] = torch.nan
    logits[2, 5] = torch.inf
    logits[4] = -math.inf
    logits[4, 3] = 9
    total = native.cross_entropy_grad_(
        logits, local_targets(targets, VocabShard(UNSHARDED, 70, 70)), True
    )
    assert total.isnan() and logits[1].isnan().all() and logits[2].isnan().any()
    assert not logits[[0, 3, 5]].isnan().any() and not logits[4].any(), (
        "a row that is certain has no gradient"
    )


@pytest.mark.parametrize("target", [70, -1])
def test_target_outside_the_vocabulary_is_an_error(native: NativeTraining, target: int) -> None:
    logits, targets = logits_of(5, 70, 1)
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        native.cross_entropy_grad_(
            logits, local_targets(targets, VocabShard(UNSHARDED, 70, 70)), True
        )


def test_chunked_loss_matches_fp64(native: NativeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of its gradients against fp64 is at most 1.1 times that of torch operations."""
    monkeypatch.setattr(loss, "PRODUCT_BYTES", 2 * 999 * 17)
    monkeypatch.setattr(loss, "SOFTMAX_BYTES", 4 * 999 * 5)
    x = torch.randn(60, 64, generator=seeded(1))
    weight = torch.randn(999, 64, generator=seeded(2)) / 8
    _, targets = logits_of(60, 999, 3)

    def run(dtype: torch.dtype, cross_entropy_grad: CrossEntropyGrad) -> list[Tensor]:
        leaves = [each.to(BF16).to(dtype).requires_grad_() for each in (x, weight)]
        total = cross_entropy(*leaves, targets, cross_entropy_grad=cross_entropy_grad)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    exact = run(torch.float64, cross_entropy_grad_)
    found = run(BF16, native.cross_entropy_grad_)
    other = run(BF16, cross_entropy_grad_)
    for mine, torchs, truth in zip(found, other, exact, strict=True):
        assert relative(mine, truth) <= 1.1 * relative(torchs, truth) + 1e-6


def test_logits_are_not_copied_to_fp32(native: NativeTraining, tmp_path: Path) -> None:
    """1000 rows of 32,000 logits take 64 MB in bf16; torch operations hold another 24 MB in
    fp32."""
    x = torch.randn(1000, 8).to(BF16).requires_grad_()
    weight = torch.randn(32_000, 8).to(BF16).requires_grad_()
    targets = torch.randint(32_000, (1000,))
    cross_entropy_grad = native.cross_entropy_grad_
    peak, _ = peak_bytes(
        lambda: cross_entropy(x, weight, targets, cross_entropy_grad=cross_entropy_grad),
        tmp_path / "trace",
    )
    assert peak <= PRODUCT_BYTES + x.nbytes + weight.nbytes + 100 * 1000


# -- together


def test_threads_do_not_change_results(native: NativeTraining) -> None:
    inputs = drawn(2, 70, 4, 2, 32, BF16)
    normed, dy = inputs_of(Case("norm", (700,), 96), BF16)
    of = native.cross_entropy_grad_
    before = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            logits, targets = logits_of(30, 500, 1)
            total = of(logits, local_targets(targets, VocabShard(UNSHARDED, 500, 500)), True)
            attended = with_gradients(native.attention, inputs, torch.ones_like(inputs[0]))
            found.append(
                [*attended, *results(versions(native, "norm"), 2, normed, dy), total, logits]
            )
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(x, first) for each in found for x, first in zip(each, found[0], strict=True)
    )


@pytest.mark.parametrize("short", ["dp1", "dp1.rc-selective"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt2"])
def test_saved_activations_match_the_plan(native: NativeTraining, model: str, short: str) -> None:
    """The measurement of test_activations, with heads and an activation that the native kernels
    support."""
    config = replace(FAMILIES[model], hidden_size=64, ffn_size=96, head_dim=32)
    layout = Layout.parse(short)
    kernels = native_training_kernels(native.name)
    whole = tiny_weights(config)
    weights = {
        name: each.to(BF16).requires_grad_()
        for name, each in whole.items()
        if name.startswith("blocks.0")
    }
    decoder = Transformer(config, kernels, UNSHARDED, layout.recompute == "selective")
    x = torch.randn(3, 8, 64, generator=seeded(1)).to(BF16).requires_grad_()
    rope = decoder.rope_tables(torch.arange(8).expand(3, -1), BF16)
    attend = make_attend(config, layout, make_mesh(layout, 0, CPU, 2).cp, None, kernels.attention)
    block = BlockWeights.of(weights, 0)
    kept = saved_bytes(
        lambda: decoder.block(x, 0, block, rope, attend), [*weights.values(), *(rope or ())]
    )
    assert kept == block_bytes(
        config, share_of(config, layout, MicroBatchShape(3, 8)), 2, layout.recompute
    )
