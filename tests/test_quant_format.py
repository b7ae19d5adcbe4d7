"""Quantized matrices against their definition, weight by weight; their bytes and slices; errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.params import model_specs
from shardwise.quant.format import (
    FP8,
    QuantizedMatrix,
    choose_scales,
    codes_of,
    dequantize,
    encode,
    from_codes,
    matmul,
    quantize,
    stack_rows,
)
from shardwise.quant.scheme import Scheme, check_groups, quantizable
from shardwise.shards import boxes, local_shape

NAMES = (
    "int8",
    "int8z",
    "int8-g32",
    "int8z-g16",
    "int4",
    "int4z",
    "int4-g8",
    "int4-g32",
    "int4z-g64",
    "int3",
    "int3z",
    "int3-g8",
    "int3-g32",
    "int3z-g40",
    "fp8",
    "fp8-g32",
)
CONFIG = ModelConfig("llama", 2, 576, 1536, 9, 3, 64, 1000, 128, tied=True)


def drawn(num_rows: int, num_columns: int, seed: int = 0, scale: float = 0.05) -> Tensor:
    weight = (
        torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * scale
    )
    weight[0, : num_columns // 2] = 0  # groups of nothing but zeros
    return weight


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, Scheme]:
    scheme = Scheme.parse(draw(st.sampled_from(NAMES)))
    columns = draw(st.integers(1, 5)) * scheme.group if scheme.group else draw(st.integers(1, 70))
    weight = drawn(
        draw(st.integers(1, 6)), columns, draw(st.integers(0, 1000)), 10 ** draw(st.floats(-4, 3))
    )
    return weight + draw(st.sampled_from((0.0, 0.1))), scheme


def code_at(quantized: QuantizedMatrix, row: int, column: int) -> float:
    """A code by the definition: bits b i to b i + b - 1 of the row's bytes, lowest first."""
    if quantized.codes.dtype != torch.uint8 or quantized.scheme.bits == 8:
        return float(quantized.codes[row, column])
    word = int.from_bytes(bytes(quantized.codes[row].tolist()), "little")
    bits = quantized.scheme.bits
    code = (word >> bits * column) % 2**bits
    return code if quantized.scheme.zero else code - 2 ** (bits - 1)


def weight_at(quantized: QuantizedMatrix, row: int, column: int) -> float:
    """A weight by the definition, in Python floats."""
    group = column // quantized.scheme.group if quantized.scheme.group else 0
    code = code_at(quantized, row, column)
    scale = float(quantized.scales[row, group])
    if quantized.zeros is None:
        return scale * code
    offset = float(quantized.zeros[row, group])
    return (
        scale * (code - offset) if quantized.zeros.dtype == torch.uint8 else scale * code + offset
    )


@given(matrices())
@settings(deadline=None)
def test_quantized_weights_equal_their_definition(drawn: tuple[Tensor, Scheme]) -> None:
    weight, scheme = drawn
    quantized = quantize(weight, scheme)
    plain = dequantize(quantized, torch.float32)
    for row in range(len(weight)):
        for column in range(weight.shape[1]):
            assert code_at(quantized, row, column) == float(codes_of(quantized)[row, column])
            wanted = weight_at(quantized, row, column)
            assert (
                float(plain[row, column]) == wanted
            )  # exact: a code has 8 bits at most, a scale 8
    assert torch.equal(dequantize(quantized, torch.bfloat16), plain.bfloat16())
    assert quantized.num_bytes == scheme.num_bytes(tuple(weight.shape))


@given(matrices())
@settings(deadline=None)
def test_no_weight_is_off_by_more_than_half_a_step(drawn: tuple[Tensor, Scheme]) -> None:
    weight, scheme = drawn
    quantized = quantize(weight, scheme)
    error = (dequantize(quantized, torch.float32) - weight).abs()
    steps = quantized.scales.float().repeat_interleave(
        weight.shape[1] // quantized.scales.shape[1], 1
    )
    if (
        scheme.kind == "fp8"
    ):  # 3 bits behind the point; below 2^-6 steps of 2^-9; the scale may be half of 2^-7 short
        bound = torch.maximum(weight.abs() * 2**-4, steps * 2**-10) + 448 * steps * 2**-8
    else:
        bound = steps * (0.5 + scheme.levels * 2**-8)
    assert (error <= bound * 1.0001).all()


@given(matrices())
@settings(deadline=None)
def test_each_row_is_quantized_separately(drawn: tuple[Tensor, Scheme]) -> None:
    """Rows can thus be quantized a few at a time, or by the ranks that hold them."""
    weight, scheme = drawn
    whole = quantize(weight, scheme)
    stacked = stack_rows([quantize(row[None], scheme) for row in weight])
    for mine, theirs in (
        (whole.codes, stacked.codes),
        (whole.scales, stacked.scales),
        (whole.zeros, stacked.zeros),
    ):
        assert mine is theirs is None or (
            mine is not None and theirs is not None and same(mine, theirs)
        )


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@given(matrices(), st.data())
@settings(deadline=None)
def test_slices_are_exact(drawn: tuple[Tensor, Scheme], data: st.DataObject) -> None:
    weight, scheme = drawn
    quantized = quantize(weight, scheme)
    unit = scheme.group or 8
    places = st.integers(0, weight.shape[1] // unit).map(lambda n: n * unit) | st.just(
        weight.shape[1]
    )
    first, last = sorted((data.draw(places), data.draw(places)))
    top, bottom = sorted(
        (data.draw(st.integers(0, len(weight))), data.draw(st.integers(0, len(weight))))
    )
    piece = (
        quantized.columns(first, last).rows(top, bottom)
        if first < last
        else quantized.rows(top, bottom)
    )
    columns = slice(first, last) if first < last else slice(None)
    assert torch.equal(
        dequantize(piece, torch.float32), dequantize(quantized, torch.float32)[top:bottom, columns]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [1, 3])
def test_shards_are_slices_of_one_matrix(name: str, tp: int) -> None:
    """A fused qkv is sharded by rows and parts, out and down by columns; bytes are those of the
    scheme."""
    scheme = Scheme.parse(name)
    layout = Layout(tp=tp)
    if scheme.group == 40:
        pytest.skip("groups of 40 do not divide these columns")
    for spec in (
        spec
        for spec in model_specs(CONFIG)
        if quantizable(spec) and spec.name.startswith("blocks.0.")
    ):
        check_groups([spec], scheme.group, layout)
        num_rows, num_columns = spec.shape
        weight = drawn(num_rows, num_columns)
        whole = quantize(weight, scheme)
        for rank in range(tp):
            mine = boxes(spec, layout, layout.coord(rank))
            pieces = [whole.rows(b.slices[0].start, b.slices[0].stop) for b in mine]
            held = stack_rows(pieces).columns(mine[0].slices[1].start, mine[0].slices[1].stop)
            wanted = torch.cat([dequantize(whole, torch.float32)[box.slices] for box in mine])
            assert torch.equal(dequantize(held, torch.float32), wanted)
            assert held.num_bytes == scheme.num_bytes(local_shape(spec, layout, layout.coord(rank)))


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("int8", 10 * 256 + 10 * 2),
        ("int4-g64", 10 * 128 + 10 * 4 * 2),
        ("int4z-g64", 10 * 128 + 10 * 4 * 3),
        ("int3-g32", 10 * 96 + 10 * 8 * 2),
        ("fp8", 10 * 256 + 10 * 2),
    ],
)
def test_bytes(name: str, num_bytes: int) -> None:
    scheme = Scheme.parse(name)
    quantized = quantize(drawn(10, 256), scheme)
    assert scheme.num_bytes((10, 256)) == quantized.num_bytes == num_bytes


def test_known_values() -> None:
    """Two rows of 8, computed by hand: 7.5 steps to either side."""
    row = [7.5, -7.5, 7.0, 3.0, -1.0, 0.5, 0.0, 1.5]
    quantized = quantize(torch.tensor([row, [0.0] * 8]), Scheme.parse("int4-g8"))
    assert quantized.scales.tolist() == [[1.0], [1.0]]
    assert codes_of(quantized).tolist() == [
        [7, -8, 7, 3, -1, 0, 0, 2],
        [0] * 8,
    ]  # halves go to the even
    assert quantized.codes.tolist() == [[0x0F, 0xBF, 0x87, 0xA8], [0x88] * 4]
    three = from_codes(
        torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]]),
        Scheme.parse("int3z-g8"),
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.uint8),
    )
    assert three.codes.tolist() == [[0b10001000, 0b11000110, 0b11111010]]
    eight = quantize(torch.tensor([[448.0, -448.0, 1.0, 0.0]]), Scheme.parse("fp8"))
    assert eight.codes.dtype == FP8 and eight.codes.float().tolist() == [[448.0, -448.0, 1.0, 0.0]]


def test_zero_points_and_minima_are_exact() -> None:
    """With fp16 scales, s (q - z) and s q + m with m = -s z are the same fp32 numbers; a minimum
    that is not a multiple of the scale is exact."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (7, 64), generator=random)
    scales = torch.rand(7, 2, generator=random).half()
    points = torch.randint(16, (7, 2), generator=random).to(torch.uint8)
    scheme = Scheme.parse("int4z-g32")
    plain = dequantize(from_codes(codes, scheme, scales, points), torch.float32)
    minima = -(scales.float() * points.float())
    assert torch.equal(plain, dequantize(from_codes(codes, scheme, scales, minima), torch.float32))
    doubles = (codes.double().view(7, 2, 32) - points.double()[..., None]) * scales.double()[
        ..., None
    ]
    assert torch.equal(plain.double(), doubles.view(7, 64))
    odd = torch.randn(7, 2, generator=random).half()
    wanted = codes.view(7, 2, 32).float() * scales.float()[..., None] + odd.float()[..., None]
    kept = from_codes(codes, scheme, scales, odd)
    assert torch.equal(dequantize(kept, torch.float32), wanted.view(7, 64))
    again = encode(wanted.view(7, 64), scheme, scales, odd)
    assert same(again.codes, kept.codes)


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4z-g32", "int3-g64"])
def test_quantizing_twice_changes_nothing(name: str) -> None:
    scheme = Scheme.parse(name)
    once = quantize(drawn(6, 128), scheme)
    again = encode(dequantize(once, torch.float32), scheme, once.scales, once.zeros)
    assert same(once.codes, again.codes)


@pytest.mark.parametrize("name", NAMES)
def test_matmul_equals_that_of_the_dequantized_matrix(name: str) -> None:
    """Weights are in more than one strip. The tolerance is 1e-5 of the largest in fp32; 1e-2 in
    bf16, since strips may be summed in another order."""
    scheme = Scheme.parse(name)
    num_columns = 320 if scheme.group != 64 else 384
    weight = drawn(5000, num_columns, 3)
    quantized = quantize(weight, scheme)
    x = torch.randn(2, 3, num_columns, generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        wanted = x.to(dtype).double() @ dequantize(quantized, dtype).double().t()
        found = matmul(x.to(dtype), quantized)
        assert found.dtype == dtype and found.shape == (2, 3, 5000)
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_error_falls_with_bits_and_grows_with_groups() -> None:
    weight = drawn(64, 512, 5)

    def error(name: str) -> float:
        return float(
            (dequantize(quantize(weight, Scheme.parse(name)), torch.float32) - weight).norm()
            / weight.norm()
        )

    assert (
        error("int8") < error("int4-g32") < error("int4-g128") < error("int4") < error("int3-g128")
    )
    assert error("int4-g32") < error("int3-g32")
    skewed = drawn(64, 512, 5) + 0.2
    zero, none = (
        dequantize(quantize(skewed, Scheme.parse(name)), torch.float32)
        for name in ("int4z-g32", "int4-g32")
    )
    assert (zero - skewed).norm() < (none - skewed).norm()


def test_scales_of_zeros_are_one() -> None:
    scales, zeros = choose_scales(torch.zeros(3, 64), Scheme.parse("int4z-g32"))
    assert zeros is not None
    assert scales.eq(1).all() and zeros.eq(0).all()


@pytest.mark.parametrize("name", [*NAMES, "int4-g128"])
def test_names_round_trip(name: str) -> None:
    assert str(Scheme.parse(name)) == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("int5-g32", "unknown quantization scheme 'int5-g32'; did you mean int8-g32?"),
        ("int4_g64", "did you mean int4-g64?"),
        ("gptq", "gptq is a method of `convert`"),
        ("fp8z", "did you mean fp8?"),
        ("int4-g20", "the group size must be a multiple of 8, not 20; 32, 64 and 128 are common"),
        ("int4-g0", "unknown quantization scheme"),
        ("", "unknown quantization scheme"),
    ],
)
def test_unknown_names(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        Scheme.parse(name)


def test_groups_that_do_not_divide() -> None:
    """T26, and 576 / 128 of SmolLM2."""
    specs = model_specs(CONFIG)
    with pytest.raises(
        ValueError,
        match=r"groups of 128 columns do not divide the 576 columns of blocks\.0\.qkv; "
        r"groups of 32 and 64 do",
    ):
        check_groups(specs, 128, Layout())
    check_groups(specs, 64, Layout(tp=3))
    wide = ModelConfig("qwen2", 1, 8192, 29568, 64, 8, 128, 1000, 128, qkv_bias=True)
    check_groups(model_specs(wide), 128, Layout())
    with pytest.raises(
        ValueError,
        match=r"tp8 does not split the 29568 columns of blocks\.0\.down at multiples of groups of "
        r"128 columns; tp 1 works",
    ):
        check_groups(model_specs(wide), 128, Layout(tp=8))
    with pytest.raises(ValueError, match=r"tp 1 and 2 work$"):
        check_groups(model_specs(wide), 64, Layout(tp=4))
    check_groups(model_specs(wide), 32, Layout(tp=4))
    check_groups(model_specs(wide), None, Layout(tp=8))
    odd = ModelConfig("llama", 1, 40, 60, 10, 10, 4, 100, 128)
    with pytest.raises(ValueError, match="one scale per row works"):
        check_groups(model_specs(odd), 32, Layout())
    with pytest.raises(ValueError, match="8 columns \\(bytes\\); tp 1 works"):
        check_groups(model_specs(odd), None, Layout(tp=2))


def test_weights_that_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="groups must divide the columns"):
        quantize(torch.ones(2, 576), Scheme.parse("int4-g128"))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="infinities or NaNs"):
            quantize(torch.full((1, 32), bad), Scheme.parse("int8"))
