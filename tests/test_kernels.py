"""Norm, RoPE and gated activation match their definitions in any shape and memory layout, and save
for the backward only what they document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from examples import examples
from shardwise.kernels.activation_functions import ACTIVATIONS
from shardwise.kernels.reference.gated import gated, gated_naive
from shardwise.kernels.reference.norm import rms_norm, rms_norm_naive
from shardwise.kernels.reference.rope import apply_rope, apply_rope_naive
from tiny_training import relative, seeded

EPS = 1e-5
TOLERANCE = 1e-6
"""In fp32, in the 2-norm, of what is of order one."""


@dataclass(frozen=True)
class Kernel:
    """An operation and its definition. Both take `num_leaves` tensors with gradients, and then the
    other arguments."""

    fast: Callable[..., Tensor]
    naive: Callable[..., Tensor]
    num_leaves: int = 1


KERNELS = {
    "norm": Kernel(lambda x, w: rms_norm(x, w, EPS), lambda x, w: rms_norm_naive(x, w, EPS), 2),
    "rotary": Kernel(apply_rope, apply_rope_naive),
    "silu": Kernel(lambda inner: gated(inner, "silu"), lambda inner: gated_naive(inner, "silu")),
    "gelu": Kernel(lambda inner: gated(inner, "gelu"), lambda inner: gated_naive(inner, "gelu")),
    "gelu_tanh": Kernel(
        lambda inner: gated(inner, "gelu_tanh"), lambda inner: gated_naive(inner, "gelu_tanh")
    ),
}
assert {*ACTIVATIONS} < {*KERNELS}


@dataclass(frozen=True)
class Case:
    """Inputs of a kernel: x [*leading, width], for RoPE [*leading, heads, width], and the memory
    layouts of x and of the gradient of the result."""

    kernel: str
    leading: tuple[int, ...]
    width: int
    num_heads: int = 3
    shared_positions: bool = False
    x_memory: str = "plain"
    dy_memory: str = "plain"
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases of any shape, also without rows. A rank may have no part of an MLP, but always has
    something to norm."""
    kernel = draw(st.sampled_from(sorted(KERNELS)))
    leading = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    width = (
        draw(st.integers(1, 40))
        if kernel == "norm"
        else 2 * draw(st.integers(int(kernel == "rotary"), 20))
    )
    return Case(
        kernel,
        tuple(leading),
        width,
        draw(st.integers(1, 4)),
        draw(st.booleans()),
        draw(st.sampled_from(sorted(MEMORY))),
        draw(st.sampled_from(sorted(MEMORY))),
        draw(st.integers(0, 99)),
    )


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def repeated(x: Tensor) -> Tensor:
    """The first row, expanded over all rows."""
    return x[:1].expand_as(x)


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "gaps": with_gaps,
    "turned over": transposed,
    "repeated": repeated,
}


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Arguments and the gradient of the result, all of order one, so that errors are relative to
    one: no row is so small that its norm amplifies it."""
    random = seeded(case.seed)
    heads = (case.num_heads,) if case.kernel == "rotary" else ()
    x = torch.randn(*case.leading, *heads, case.width, generator=random)
    x = MEMORY[case.x_memory]((x + x.sign() / 2).to(dtype))
    half = case.width // 2
    out_width = case.width if case.kernel in ("norm", "rotary") else half
    dy = MEMORY[case.dy_memory](
        torch.randn(*case.leading, *heads, out_width, generator=random).to(dtype)
    )
    if case.kernel == "norm":
        return [x, (1 + 0.3 * torch.randn(case.width, generator=random)).to(dtype)], dy
    if case.kernel == "rotary":
        tokens = case.leading[-1:] if case.shared_positions else case.leading
        angles = 100 * torch.rand(*tokens, 1, half, generator=random)
        return [x, angles.cos().to(dtype), angles.sin().to(dtype)], dy
    return [x], dy


def results(
    run: Callable[..., Tensor], num_leaves: int, inputs: list[Tensor], dy: Tensor
) -> list[Tensor]:
    """The result and the gradient of every leaf."""
    leaves = [x.detach().requires_grad_() for x in inputs[:num_leaves]]
    y = run(*leaves, *inputs[num_leaves:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


@settings(max_examples=examples(200))
@given(case=cases())
def test_matches_definition_for_any_shape_and_memory_layout(case: Case) -> None:
    """The error in fp32 is within 1e-6 of the definition in fp64."""
    kernel = KERNELS[case.kernel]
    inputs, dy = inputs_of(case)
    before = [x.clone() for x in (*inputs, dy)]
    found = results(kernel.fast, kernel.num_leaves, inputs, dy)
    exact = results(kernel.naive, kernel.num_leaves, wide(inputs), dy.double())
    for mine, other in zip(found, exact, strict=True):
        assert mine.shape == other.shape and mine.dtype == torch.float32
        assert (mine - other).norm() <= TOLERANCE * max(other.norm(), other.numel() ** 0.5)
    assert all(torch.equal(x, old) for x, old in zip((*inputs, dy), before, strict=True)), (
        "inputs stay as they are"
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_error_is_no_larger_than_the_definitions(kernel: str, seed: int) -> None:
    """The error against fp64, of the result and of every gradient, is at most 1.1 times that of the
    definition in bf16, which is a rounding or two (2^-9 each)."""
    case = Case(kernel, (7, 33), 96, seed=seed)
    inputs, dy = inputs_of(case, torch.bfloat16)
    of = KERNELS[kernel]
    exact = results(of.naive, of.num_leaves, wide(inputs), dy.double())
    mine, naive = (results(run, of.num_leaves, inputs, dy) for run in (of.fast, of.naive))
    for fast, slow, truth in zip(mine, naive, exact, strict=True):
        assert fast.dtype == torch.bfloat16
        assert relative(fast, truth) <= 1.1 * relative(slow, truth) < 1e-2


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_match_finite_differences(kernel: str, memory: str) -> None:
    inputs, _ = inputs_of(Case(kernel, (2, 3), 6, num_heads=2, x_memory=memory), torch.float64)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[: KERNELS[kernel].num_leaves]]
    rest = inputs[len(leaves) :]
    assert torch.autograd.gradcheck(
        lambda *x: KERNELS[kernel].fast(MEMORY[memory](x[0]), *x[1:], *rest), leaves
    )


# -- what is kept for the backward


def kept_by(run: Callable[..., Tensor], *inputs: Any) -> list[Tensor]:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        run(*inputs)
    return kept


def is_view(x: Tensor, of: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_saves_its_input_and_one_number_per_row(dtype: torch.dtype) -> None:
    (x, weight), _ = inputs_of(Case("norm", (4, 9), 10), dtype)
    x.requires_grad_()
    first, second, scale = kept_by(rms_norm, x, weight, EPS)
    assert is_view(first, x) and is_view(second, weight)
    assert scale.dtype == torch.float32 and scale.shape == (4, 9, 1) and not is_view(scale, x)
    assert sum(each.numel() for each in kept_by(rms_norm_naive, x, weight, EPS)) >= 2 * x.numel(), (
        "autograd keeps more"
    )


def test_rope_saves_nothing_of_its_input() -> None:
    (x, cos, sin), _ = inputs_of(Case("rotary", (2, 9), 8))
    first, second = kept_by(apply_rope, x.requires_grad_(), cos, sin)
    assert is_view(first, cos) and is_view(second, sin)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation_saves_only_its_input(activation: str) -> None:
    (inner,), _ = inputs_of(Case(activation, (4, 9), 10))
    (kept,) = kept_by(gated, inner.requires_grad_(), activation)
    assert is_view(kept, inner) and kept.shape == inner.shape
    others = [each for each in kept_by(gated_naive, inner, activation) if not is_view(each, inner)]
    assert others, "autograd keeps the activation besides"


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_saved_without_gradients(kernel: str) -> None:
    inputs, _ = inputs_of(Case(kernel, (4, 9), 10))
    leaves = [x.requires_grad_() for x in inputs[: KERNELS[kernel].num_leaves]]
    with torch.no_grad():
        assert not kept_by(KERNELS[kernel].fast, *leaves, *inputs[len(leaves) :])


# -- norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm_matches_torch_and_transformers(scale: float, eps: float) -> None:
    """Result and gradients within 1e-6, where eps counts and where it does not."""
    (x, weight), dy = inputs_of(Case("norm", (5, 7), 33))
    x = scale * x
    theirs = LlamaRMSNorm(33, eps)
    found = results(lambda x, w: rms_norm(x, w, eps), 2, [x, weight], dy)
    torchs = results(lambda x, w: F.rms_norm(x, (33,), w, eps), 2, [x, weight], dy)
    llamas = results(
        lambda x, w: torch.func.functional_call(theirs, {"weight": w}, x), 2, [x, weight], dy
    )
    for others in (torchs, llamas):
        for mine, other in zip(found, others, strict=True):
            assert relative(mine, other) < TOLERANCE


def test_norm_rounds_before_the_weight() -> None:
    """As in transformers, the normed row is rounded to bf16 and then multiplied, in bf16. All but
    one in a thousand elements are bit-identical; where the norm differs in its last bit, it may
    round the other way."""
    (x, weight), _ = inputs_of(Case("norm", (40,), 96), torch.bfloat16)
    expected = torch.func.functional_call(LlamaRMSNorm(96, EPS), {"weight": weight}, x)
    assert (rms_norm(x, weight, EPS) != expected).float().mean() < 1e-3


# -- rotation


def test_rope_matches_transformers() -> None:
    """Results agree within 1e-6. In transformers heads come before tokens, and cosines and sines
    are repeated for both halves."""
    (q, cos, sin), _ = inputs_of(Case("rotary", (2, 9), 8, num_heads=4))
    k = q.flip(1)
    twice = [each.squeeze(-2).repeat(1, 1, 2) for each in (cos, sin)]
    theirs = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *twice)
    for x, other in zip((q, k), theirs, strict=True):
        assert relative(apply_rope(x, cos, sin), other.transpose(1, 2)) < TOLERANCE


@settings(max_examples=examples(30))
@given(case=cases().filter(lambda case: case.kernel == "rotary"))
def test_rope_keeps_lengths_and_its_gradient_is_the_inverse(case: Case) -> None:
    """RoPE keeps lengths, to 1e-6, and its gradient is the inverse rotation, to 1e-5. The memory of
    the result has heads before tokens."""
    (x, cos, sin), _ = inputs_of(case)
    leaf = x.detach().requires_grad_()
    y = apply_rope(leaf, cos, sin)
    (back,) = torch.autograd.grad(y, leaf, y.detach())
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=TOLERANCE, atol=TOLERANCE)
    assert y.transpose(-3, -2).is_contiguous() and y.shape == x.shape


def test_scores_depend_only_on_distance() -> None:
    """q at i + n and k at i have the same score for all i, to 1e-5, for angles of up to 40."""
    (x, *_), _ = inputs_of(Case("rotary", (1,), 8, num_heads=1))
    q = x.expand(40, 1, 8)
    k = x.flip(-1).expand(40, 1, 8)
    angles = torch.arange(40.0)[:, None, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    q, k = (apply_rope(each, angles.cos(), angles.sin())[:, 0] for each in (q, k))
    scores = q @ k.T
    for distance in (0, 1, 17):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    assert scores.diagonal(0)[0] != scores.diagonal(-1)[0]
