"""The chunked cross entropy against its definition: value, gradients and memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from examples import examples
from memory import peak_bytes
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.model import loss
from shardwise.model.loss import IGNORE_INDEX, cross_entropy_naive

# Tolerances against the definition in fp64, relative to the largest element, or to 1: for FP32
# where products of that size cancel, for BF16 since logits, gradients and sums of chunks round to 8
# bits.
FP32 = 1e-6
BF16 = 1e-2
BF16_VALUE = 1e-4  # of the loss against the definition in bf16, whose logits are rounded alike


Function = Callable[[Tensor, Tensor, Tensor], Tensor]
cross_entropy = partial(loss.cross_entropy, cross_entropy_grad=cross_entropy_grad_)


def drawn(rows: int, width: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of about 1, so that their own rounding stays below the tolerance."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random)
    weight = torch.randn(vocab, width, generator=random) / width**0.5
    return x, weight, torch.randint(vocab, (rows,), generator=random)


def with_gradients(
    function: Function, x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0
) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    total = function(x, weight, targets)
    return (total.detach(), *torch.autograd.grad(total, (x, weight), torch.full_like(total, scale)))


def definition(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy_naive` without its rounding of the logits to fp32."""
    log_p = (x @ weight.T).log_softmax(-1)
    has_target = targets != IGNORE_INDEX
    aimed = log_p.gather(-1, targets.where(has_target, 0)[..., None])[..., 0]
    return -aimed.where(has_target, 0).sum()


def assert_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        if theirs.numel():
            assert (
                ours.double() - theirs.double()
            ).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


def assert_is_definition(x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> None:
    wanted = with_gradients(definition, x.double(), weight.double(), targets, scale)
    got = with_gradients(cross_entropy, x, weight, targets, scale)
    assert all(each.dtype == torch.float32 for each in got)
    assert_close(got, wanted, FP32)


@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 20),
    vocab=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    softmax_bytes=st.integers(0, 4000),
    product_bytes=st.integers(0, 8000),
    scale=st.sampled_from([1.0, 0.125, -3.0]),
)
@settings(max_examples=examples(150))
def test_any_size_and_chunking_is_the_definition(
    rows: int,
    width: int,
    vocab: int,
    seed: int,
    ignored: float,
    softmax_bytes: int,
    product_bytes: int,
    scale: float,
) -> None:
    x, weight, targets = drawn(rows, width, vocab, seed)
    targets[torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < ignored] = (
        IGNORE_INDEX
    )
    with patch.multiple(loss, SOFTMAX_BYTES=softmax_bytes, PRODUCT_BYTES=product_bytes):
        assert_is_definition(x, weight, targets, scale)


def test_naive_is_the_definition() -> None:
    x, weight, targets = drawn(50, 16, 101)
    targets[::7] = IGNORE_INDEX
    wanted = with_gradients(definition, x.double(), weight.double(), targets)
    assert_close(with_gradients(cross_entropy_naive, x, weight, targets), wanted, FP32)


def test_published_value_of_equal_logits() -> None:
    """With equal logits the loss of every token is log V."""
    total = cross_entropy(torch.zeros(7, 3), torch.randn(100, 3), torch.arange(7))
    assert total.item() == pytest.approx(7 * 4.605170185988092, rel=1e-6)


def test_chunks_change_only_rounding() -> None:
    x, weight, targets = drawn(129, 24, 211)
    whole = with_gradients(cross_entropy, x, weight, targets)
    for rows in (1, 2, 3, 43, 64, 128):
        with patch.multiple(loss, PRODUCT_BYTES=rows * 211 * 4, SOFTMAX_BYTES=rows // 2 * 211 * 4):
            assert_close(with_gradients(cross_entropy, x, weight, targets), whole, FP32)


@given(rows=st.integers(0, 1000), most=st.integers(-1, 300))
def test_chunks_cover_the_rows_once_and_evenly(rows: int, most: int) -> None:
    slices = list(loss.chunks(rows, most))
    assert [row for each in slices for row in range(each.start, each.stop)] == list(range(rows))
    sizes = [each.stop - each.start for each in slices]
    assert all(0 < size <= max(1, most) for size in sizes)


def test_leading_dims_are_free() -> None:
    x, weight, targets = drawn(24, 8, 33)
    flat = with_gradients(cross_entropy, x, weight, targets)
    batch = with_gradients(cross_entropy, x.view(2, 3, 4, 8), weight, targets.view(2, 3, 4))
    assert torch.equal(batch[0], flat[0]) and torch.equal(batch[1], flat[1].view(2, 3, 4, 8))
    assert torch.equal(batch[2], flat[2])


def test_strides_do_not_matter() -> None:
    x, weight, targets = drawn(24, 8, 33)
    plain = with_gradients(cross_entropy, x, weight, targets)
    x_turned = x.t().contiguous().t()
    weight_turned = weight.t().contiguous().t()
    strided = torch.stack((targets, targets), 1)[:, 0]
    assert_close(with_gradients(cross_entropy, x_turned, weight_turned, strided), plain, FP32)


@pytest.mark.parametrize("rows", [1, 100])
def test_bf16_is_the_definition_to_its_own_rounding(rows: int) -> None:
    x, weight, targets = drawn(rows, 64, 999)
    targets[3:20:5] = IGNORE_INDEX
    x = x.bfloat16()
    weight = weight.bfloat16()
    wanted = with_gradients(definition, x.double(), weight.double(), targets)
    with patch.multiple(loss, PRODUCT_BYTES=2 * 999 * 17, SOFTMAX_BYTES=4 * 999 * 5):
        total, dx, dw = with_gradients(cross_entropy, x, weight, targets)
    assert (total.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_close((total,), (cross_entropy_naive(x, weight, targets),), BF16_VALUE)
    assert_close((dx, dw), wanted[1:], BF16)


def test_fp32_gradients_of_bf16_weights_are_summed_in_fp32() -> None:
    """Over 50 chunks: the gradient of the weight against the same factors in fp64, to what rounding
    the factors to 8 bits costs; a sum in bf16 is several times further away."""
    x, weight, targets = (each.to(torch.bfloat16) for each in drawn(1500, 24, 90))
    targets = targets.long().clamp(0, 89)
    (exact,) = torch.autograd.grad(
        definition(x.double(), wide := weight.double().requires_grad_(), targets), wide
    )
    errors = {}
    for grad_dtype in (torch.bfloat16, torch.float32):
        leaf = weight.clone().requires_grad_()
        leaf.grad_dtype = grad_dtype
        with patch.multiple(loss, PRODUCT_BYTES=30 * 90 * 2, SOFTMAX_BYTES=4000):
            (found,) = torch.autograd.grad(cross_entropy(x, leaf, targets), leaf)
        assert found.dtype == grad_dtype
        errors[grad_dtype] = float((found.double() - exact).norm() / exact.norm())
    assert errors[torch.float32] < 2e-3
    assert errors[torch.float32] < errors[torch.bfloat16] / 3, errors


def test_bf16_keeps_the_gradient_of_an_almost_certain_token() -> None:
    """1 - p is about 1e-4, which a subtraction from 1 in bf16 loses; the gradient is within 1 % of
    fp64."""
    x = torch.eye(2).bfloat16()
    weight = torch.tensor([[9.25, 0], [0, 9.25]]).bfloat16()
    targets = torch.tensor([0, 1])
    wanted = with_gradients(definition, x.double(), weight.double(), targets)
    got = with_gradients(cross_entropy, x, weight, targets)
    torch.testing.assert_close(got[2].double(), wanted[2], rtol=0.01, atol=0)


@pytest.mark.parametrize("scale", [2.0, 2.0**10, 2.0**100])
def test_large_logits_do_not_overflow(scale: float) -> None:
    """Inputs are small integers times a power of two, so that products are exact."""
    x, weight, targets = drawn(30, 16, 101)
    assert_is_definition((2 * x).round(), (8 * weight).round() * scale, targets)


def test_the_loss_of_an_improbable_target_is_its_distance() -> None:
    x = torch.ones(1, 1)
    weight = torch.tensor([[500.0], [-500.0]])
    total, dx, dw = with_gradients(cross_entropy, x, weight, torch.tensor([1]))
    assert total.item() == 1000.0 and dx.item() == 1000.0 and dw.flatten().tolist() == [1.0, -1.0]


def test_all_ignored_is_zero_with_zero_gradients() -> None:
    x, weight, _ = drawn(10, 4, 7)
    total, dx, dw = with_gradients(cross_entropy, x, weight, torch.full((10,), IGNORE_INDEX))
    assert total == 0 and not dx.any() and not dw.any()


@pytest.mark.parametrize("target", [7, -1, -101])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    x, weight, targets = drawn(10, 4, 7)
    targets[3] = target
    for function in (cross_entropy, cross_entropy_naive):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            function(x, weight, targets)


@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(of_x: bool, of_weight: bool) -> None:
    x, weight, targets = drawn(10, 4, 7)
    wanted = with_gradients(cross_entropy, x, weight, targets)
    x.requires_grad_(of_x)
    weight.requires_grad_(of_weight)
    assert products(lambda: cross_entropy(x, weight, targets)) == 1 + of_x + of_weight
    cross_entropy(x, weight, targets).backward()
    grads = [
        wanted_grad for wanted_grad, on in zip(wanted[1:], (of_x, of_weight), strict=True) if on
    ]
    assert torch.equal(x.grad if of_x else weight.grad, grads[0])
    assert (weight.grad if of_x else x.grad) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_no_gradients(mode) -> None:
    x, weight, targets = drawn(10, 4, 7)
    wanted = cross_entropy(x, weight, targets)
    x.requires_grad_()
    weight.requires_grad_()
    with mode():
        assert products(lambda: cross_entropy(x, weight, targets)) == 1
        assert torch.equal(cross_entropy(x, weight, targets), wanted)


def products(run: Callable[[], object]) -> int:
    """How many matrix products `run` asks for."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return sum(
        event.name in ("aten::mm", "aten::addmm", "aten::addmm_") for event in recorded.events()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_gradients_do_not_depend_on_uninitialized_memory(
    rows: int, dtype: torch.dtype, monkeypatch
) -> None:
    x, weight, targets = (
        each.to(dtype) if each.is_floating_point() else each for each in drawn(rows, 8, 65)
    )
    wanted = with_gradients(cross_entropy, x, weight, targets)
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *given, **named: empty_like(*given, **named).fill_(torch.nan)
    )
    got = with_gradients(cross_entropy, x, weight, targets)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_logits_never_exist_at_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """1000 rows of 8000 logits take 32 MB in fp32; 1 MB in fp32, 2 MB of logits, and the gradients
    are allowed."""
    x, weight, targets = drawn(1000, 32, 8000)
    x = x.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    whole = 1000 * 8000 * 4
    gradients = (x.numel() + weight.numel()) * x.element_size()
    naive, _ = peak_bytes(
        lambda: cross_entropy_naive(x, weight, targets).backward(), tmp_path / "naive.json"
    )
    assert naive > whole  # so the measure sees what it is meant to see
    with patch.multiple(loss, SOFTMAX_BYTES=1 << 20, PRODUCT_BYTES=2 << 20):
        peak, largest = peak_bytes(
            lambda: cross_entropy(x, weight, targets), tmp_path / "ours.json"
        )
    small = 200_000  # columns of one number a row
    assert largest <= max(2 << 20, weight.numel() * x.element_size())
    assert peak <= gradients + (3 << 20) + small
