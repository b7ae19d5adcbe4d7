"""Products of int8 weights with activations quantized row by row, against sums of Python's integers and bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.quant import format
from shardwise.quant.dynamic import dynamic_matmul, integer_product, quantize_rows
from shardwise.quant.format import codes_of, dequantize, quantize
from shardwise.quant.scheme import Scheme

INT8 = Scheme.parse("int8")


def drawn(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 10**6), rows=st.integers(0, 5), columns=st.integers(1, 40), scale=st.floats(-6, 6))
def test_rows_are_off_by_half_a_step(seed: int, rows: int, columns: int, scale: float) -> None:
    x = drawn(rows, columns, seed) * 10**scale
    codes, scales = quantize_rows(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (rows, 1)
    assert (codes >= -127).all()
    assert ((codes.float() * scales - x).abs() <= scales * 0.5001).all()
    if rows:
        assert (codes.abs().amax(1) == 127).all()


def test_rows_of_nothing() -> None:
    codes, scales = quantize_rows(torch.zeros(2, 8))
    assert codes.eq(0).all() and scales.eq(1).all()


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), columns=st.integers(1, 50))
def test_the_product_is_that_of_integers(seed: int, rows: int, columns: int) -> None:
    random = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-128, 128, (n, columns), dtype=torch.int8, generator=random) for n in (rows, 3))
    wanted = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in right.tolist()] for x in left.tolist()]
    assert integer_product(left, right).tolist() == wanted


def test_the_largest_sums_are_exact() -> None:
    """As of torch's own product of int8, at the width of the largest models' MLP."""
    extreme = torch.full((32, 53248), -128, dtype=torch.int8)
    extreme[1] = 127
    found = integer_product(extreme, extreme)
    assert torch.equal(found, torch._int_mm(extreme, extreme.t().contiguous()))
    assert int(found[0, 0]) == 128 * 128 * 53248 and int(found[0, 1]) == -128 * 127 * 53248


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_is_near_that_of_plain_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each activation is off by half a step at most: |error| <= sx / 2 sum |w|, and rounding. In several strips."""
    monkeypatch.setattr(format, "STRIP_ELEMENTS", 1 << 12)
    x, quantized = drawn(6, 256, 1).to(dtype).view(2, 3, 256), quantize(drawn(100, 256, 2), INT8)
    found = dynamic_matmul(x, quantized)
    assert found.dtype == dtype and found.shape == (2, 3, 100)
    plain = dequantize(quantized, torch.float64)
    wanted = x.double() @ plain.t()
    bound = quantize_rows(x)[1].double() / 2 * plain.abs().sum(1)
    assert ((found - wanted).abs() <= bound * 1.001 + wanted.abs() * torch.finfo(dtype).eps).all()


def test_it_is_its_formula() -> None:
    x, quantized = drawn(4, 64, 1), quantize(drawn(5, 64, 2), INT8)
    codes, scales = quantize_rows(x)
    sums = (codes[:, None].long() * codes_of(quantized)[None].long()).sum(-1)
    wanted = sums.double() * scales.double() * quantized.scales.double()[:, 0]
    torch.testing.assert_close(dynamic_matmul(x, quantized).double(), wanted, rtol=3e-7, atol=0)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), data=st.data())
def test_a_row_does_not_depend_on_its_company(seed: int, rows: int, data: st.DataObject) -> None:
    x, quantized = drawn(rows, 64, seed), quantize(drawn(7, 64, seed + 1), INT8)
    row = data.draw(st.integers(0, rows - 1))
    assert torch.equal(dynamic_matmul(x, quantized)[row], dynamic_matmul(x[row], quantized))
