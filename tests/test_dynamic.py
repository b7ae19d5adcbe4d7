"""Matmuls with dynamically quantized activations against the formula in Python integers, and
bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.quant import format
from shardwise.quant.dynamic import ACTIVATION_GROUP, dynamic_matmul, quantize_activations
from shardwise.quant.format import codes_of, dequantize, quantize
from shardwise.quant.scheme import Scheme

INT8 = Scheme.parse("int8")
SCHEMES = [Scheme.parse(name) for name in ("int8", "int8-g32", "int4-g64", "int4z-g32", "int4z")]


def drawn(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    columns=st.integers(1, 100),
    scale=st.floats(-6, 6),
)
def test_activations_are_off_by_half_a_step(
    seed: int, rows: int, columns: int, scale: float
) -> None:
    x = drawn(rows, columns, seed) * 10**scale
    codes, scales = quantize_activations(x)
    num_stretches = -(-columns // ACTIVATION_GROUP)
    assert codes.dtype == torch.int8 and codes.shape == (rows, num_stretches, ACTIVATION_GROUP)
    assert scales.dtype == torch.float32 and scales.shape == (rows, num_stretches, 1)
    back = (codes.float() * scales).flatten(1)
    assert (
        (back[:, :columns] - x).abs()
        <= scales.repeat_interleave(ACTIVATION_GROUP, 1)[:, :columns, 0] * 0.5001
    ).all()
    assert back[:, columns:].eq(0).all() and codes.abs().amax(-1).eq(127).all()


def test_zeros_and_values_that_are_not_finite() -> None:
    x = torch.zeros(1, 4 * ACTIVATION_GROUP)
    x[0, ACTIVATION_GROUP] = 1e-38
    x[0, 2 * ACTIVATION_GROUP] = torch.nan
    x[0, 3 * ACTIVATION_GROUP] = torch.inf
    codes, scales = quantize_activations(x)
    assert codes[0, :2].eq(0).all() and scales[0, :2].eq(0).all()
    assert not (codes.float() * scales)[0, 2:].isfinite().any()


def test_matmul_equals_its_formula() -> None:
    x = drawn(4, 64, 1)
    quantized = quantize(drawn(5, 64, 2), Scheme.parse("int4z-g32"))
    codes, scales = quantize_activations(x)
    zeros = quantized.zeros
    assert zeros is not None
    wanted = torch.zeros(4, 5, dtype=torch.float64)
    for row in range(4):
        for out in range(5):
            for stretch in range(2):
                q = codes_of(quantized)[out, stretch * 32 : stretch * 32 + 32].tolist()
                mine = codes[row, stretch].tolist()
                dot = sum(a * b for a, b in zip(q, mine, strict=True))
                step = float(quantized.scales[out, stretch])
                offset = -step * int(zeros[out, stretch])
                wanted[row, out] += float(scales[row, stretch]) * (step * dot + offset * sum(mine))
    torch.testing.assert_close(
        dynamic_matmul(x.double(), quantized), wanted, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matmul_is_near_the_float_one(
    dtype: torch.dtype, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each activation is off by at most half a step: |error| <= sum of sx / 2 |w|, plus rounding.
    Weights are in several strips."""
    monkeypatch.setattr(format, "STRIP_ELEMENTS", 1 << 12)
    x = drawn(6, 256, 1).to(dtype).view(2, 3, 256)
    quantized = quantize(drawn(100, 256, 2), scheme)
    found = dynamic_matmul(x, quantized)
    assert found.dtype == dtype and found.shape == (2, 3, 100)
    plain = dequantize(quantized, torch.float64)
    wanted = x.double() @ plain.t()
    steps = quantize_activations(x)[1].double().repeat_interleave(ACTIVATION_GROUP, -1).flatten(-2)
    bound = steps / 2 @ plain.abs().t()
    assert ((found - wanted).abs() <= bound * 1.001 + wanted.abs() * torch.finfo(dtype).eps).all()


def test_a_large_activation_affects_only_its_group() -> None:
    x = drawn(1, 256, 1)
    quantized = quantize(drawn(50, 256, 2), INT8)
    x[0, 3] = 1000
    plain = dequantize(quantized, torch.float64)
    off = (dynamic_matmul(x.double(), quantized) - x.double() @ plain.t()).abs().max()
    per_row = x.abs().max() / 127
    whole = ((x / per_row).round() * per_row).double() @ plain.t()
    assert off < (whole - x.double() @ plain.t()).abs().max() / 2


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), data=st.data())
def test_rows_are_batch_invariant(seed: int, rows: int, data: st.DataObject) -> None:
    x = drawn(rows, 64, seed)
    quantized = quantize(drawn(7, 64, seed + 1), INT8)
    row = data.draw(st.integers(0, rows - 1))
    torch.testing.assert_close(
        dynamic_matmul(x, quantized)[row], dynamic_matmul(x[row], quantized), rtol=1e-6, atol=1e-6
    )
