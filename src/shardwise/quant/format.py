"""What a quantized matrix is: small codes q, a scale s for each group of columns of a row, and
perhaps an offset.

    w = s q          symmetric
    w = s (q - z)    zero: an integer zero point z for each group, as GPTQ, AWQ and compressed-tensors have
    w = s q + m      zero: a minimum m for each group, as Q4_1 of GGUF has

Both kinds of offset are kept as they come, told apart by their dtype, since neither can stand for
the other without loss: m / s is no integer, and s z has more bits than the scale's own dtype.
Weights are worked out in fp32 and rounded once. Where scales are bf16 or fp16, s (q - z) is exact
in fp32, and so is s q + m with m = -s z: a kernel may work with either. `quantize` makes zero
points.

Shapes: N rows (outputs), K columns (inputs), G groups of a row, M rows of activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.scheme import GROUP_MULTIPLE, Scheme

SCALE_DTYPE = torch.bfloat16
"""Of the scales that `quantize` chooses: other engines may load them in bf16 or fp16, and lose
nothing."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
STRIP_ELEMENTS = 1 << 20
"""Weights that are plain numbers at a time in a product."""

ChooseScales = Callable[[Tensor, Scheme], tuple[Tensor, Tensor | None]]
"""Scales and zeros [N, G] for a matrix [N, K]: `choose_scales`, or as a format of others wants
them."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [N, K]. Code i of a row is its bits b i to b i + b - 1, counted from the lowest bit
    of its first byte: 4 bits lie two a byte, 3 bits eight in three bytes. The last byte is filled
    with zeros.

    codes: [N, bytes of a row]; uint8, or with 8 bits one a byte, int8 if symmetric and
    float8_e4m3fn for fp8. Symmetric codes of 4 and 3 bits are stored as q + 8 and q + 4. scales:
    [N, G] in bf16, fp16 or fp32. zeros: [N, G], uint8 zero points or floating-point minima.
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, num_columns = self.shape
        scheme = self.scheme
        groups = (num_rows, scheme.num_groups(num_columns))
        assert self.codes.shape == (
            num_rows,
            scheme.row_bytes(num_columns),
        ) and self.codes.dtype == code_dtype(scheme)
        assert self.scales.shape == groups and self.scales.is_floating_point()
        assert scheme.zero == (self.zeros is not None), scheme
        assert self.zeros is None or self.zeros.shape == groups
        assert (
            self.zeros is None or self.zeros.dtype == torch.uint8 or self.zeros.is_floating_point()
        )

    @property
    def num_bytes(self) -> int:
        return sum(
            each.nbytes for each in (self.codes, self.scales, self.zeros) if each is not None
        )

    def to(self, device: torch.device | str) -> "QuantizedMatrix":
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def rows(self, start: int, stop: int) -> "QuantizedMatrix":
        """Rows [start, stop), views of these."""
        return self.select_rows(slice(start, stop))

    def select_rows(self, rows: slice | Tensor) -> "QuantizedMatrix":
        """Some rows, or all in another order."""
        codes = self.codes[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(
            self,
            shape=(len(codes), self.shape[1]),
            codes=codes,
            scales=self.scales[rows],
            zeros=zeros,
        )

    def columns(self, start: int, stop: int) -> "QuantizedMatrix":
        """Columns [start, stop); they begin and end with groups, or, without groups, with whole
        bytes."""
        scheme = self.scheme
        whole = self.shape[1]
        unit = scheme.group or GROUP_MULTIPLE
        assert (
            start % unit == 0 and (stop % unit == 0 or stop == whole) and start <= stop <= whole
        ), (start, stop)
        codes = self.codes[:, scheme.row_bytes(start) : scheme.row_bytes(stop)].contiguous()
        groups = (
            slice(0, 1)
            if scheme.group is None
            else slice(start // scheme.group, stop // scheme.group)
        )
        zeros = None if self.zeros is None else self.zeros[:, groups].contiguous()
        return QuantizedMatrix(
            scheme, (self.shape[0], stop - start), codes, self.scales[:, groups].contiguous(), zeros
        )

    def cut(self, rows: slice, columns: slice) -> "QuantizedMatrix":
        """A rectangle, copied, so that the rest need not be kept."""
        piece = self.rows(rows.start, rows.stop).columns(columns.start, columns.stop)
        zeros = None if piece.zeros is None else piece.zeros.clone()
        return replace(piece, codes=piece.codes.clone(), scales=piece.scales.clone(), zeros=zeros)

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Its rows as plain numbers, STRIP_ELEMENTS at a time."""
        for start, stop in strip_rows(self.shape):
            yield dequantize(self.rows(start, stop), dtype)


def strip_rows(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of strips of about STRIP_ELEMENTS."""
    num_rows, num_columns = shape
    step = max(1, STRIP_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def code_dtype(scheme: Scheme) -> torch.dtype:
    if scheme.kind == "fp8":
        return FP8
    return torch.int8 if scheme.bits == 8 and not scheme.zero else torch.uint8


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """A matrix [N, K] rounded to nearest, each row by itself. Raises ValueError for groups that do
    not divide K and for what is no number."""
    if weight.dim() != 2 or (scheme.group and weight.shape[1] % scheme.group):
        raise ValueError(
            f"{scheme} does not fit a weight of {tuple(weight.shape)}: its groups must divide the columns"
        )
    if not weight.isfinite().all():
        raise ValueError("a weight that is infinite or no number cannot be quantized")
    return round_to_nearest(weight, scheme, choose_scales)


def round_to_nearest(weight: Tensor, scheme: Scheme, choose: "ChooseScales") -> QuantizedMatrix:
    """Every weight at the code nearest to it, with the scales that `choose` finds."""
    return encode(weight, scheme, *choose(weight, scheme))


def choose_scales(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales [N, G] and zero points of the range of each group, so that nothing is off by more than
    half a step but for the rounding of the scale: symmetric steps are 2 max|w| / (levels - 1), as
    in GPTQ and compressed-tensors; with zero points the range is stretched to hold 0. Where all
    weights of a group are 0 its scale is 1."""
    groups = grouped(weight, scheme).float()
    zeros = None
    if scheme.zero:
        low = groups.amin(-1).clamp(max=0)
        high = groups.amax(-1).clamp(min=0)
        scales = usable((high - low) / (scheme.levels - 1))
        zeros = (-low / scales.float()).round_().clamp_(0, scheme.levels - 1).to(torch.uint8)
    elif scheme.kind == "fp8":
        scales = usable(groups.abs().amax(-1) / FP8_MAX)
    else:
        scales = usable(groups.abs().amax(-1) / ((scheme.levels - 1) / 2))
    return scales, zeros


def usable(scales: Tensor) -> Tensor:
    rounded = scales.to(SCALE_DTYPE)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def encode(
    weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> QuantizedMatrix:
    """The nearest codes of a matrix [N, K] with these scales, and zero points or minima, [N, G]."""
    if scheme.kind == "fp8":
        floats = (
            (grouped(weight, scheme).float() / scales.float()[..., None])
            .clamp_(-FP8_MAX, FP8_MAX)
            .to(FP8)
        )
        return QuantizedMatrix(scheme, matrix_shape(weight), floats.view(weight.shape), scales)
    return from_codes(nearest_codes(weight, scheme, scales, zeros), scheme, scales, zeros)


def nearest_codes(
    weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """The integers [N, K] of `encode`, in fp32."""
    groups = grouped(weight, scheme).float()
    steps = scales.float()[..., None]
    if zeros is not None and zeros.is_floating_point():
        codes = ((groups - zeros.float()[..., None]) / steps).round_()
    else:
        codes = (groups / steps).round_()
        codes = codes if zeros is None else codes.add_(zeros[..., None])
    low = 0 if scheme.zero else -(scheme.levels // 2)
    return codes.clamp_(low, low + scheme.levels - 1).view(weight.shape)


def from_codes(
    codes: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> QuantizedMatrix:
    """A matrix of integers [N, K], of any dtype: with zeros 0 to 2^b - 1, else with a sign."""
    stored = pack((codes + scheme.implicit_zero).to(code_dtype(scheme)), scheme.bits)
    return QuantizedMatrix(scheme, matrix_shape(codes), stored, scales, zeros)


def codes_of(quantized: QuantizedMatrix) -> Tensor:
    """The codes [N, K]: int8 where they have a sign, uint8 where `zeros` say, float8 of fp8."""
    scheme = quantized.scheme
    num_columns = quantized.shape[1]
    if scheme.bits == 8:
        return quantized.codes
    codes = unpack(quantized.codes, scheme.bits)[:, :num_columns]
    return codes if scheme.zero else codes.to(torch.int8) - scheme.implicit_zero


def dequantize(quantized: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype`: worked out in fp32, rounded once."""
    return dequantize_codes(
        codes_of(quantized), quantized.scheme, quantized.scales, quantized.zeros
    ).to(dtype)


def dequantize_codes(
    codes: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """What codes [N, K] stand for, in fp32."""
    values = grouped(codes, scheme).float()
    steps = scales.float()[..., None]
    if zeros is None:
        values = values * steps
    elif zeros.dtype == torch.uint8:
        values = (values - zeros.float()[..., None]).mul_(steps)
    else:
        values = (values * steps).add_(zeros.float()[..., None])
    return values.view(codes.shape)


class Strips(Protocol):
    """A matrix [N, K] that gives its rows as plain numbers, a few at a time: a quantized one, or
    several."""

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]: ...


def matmul(x: Tensor, matrix: Strips) -> Tensor:
    """x [..., K] -> [..., N] in the dtype of x: the product with the dequantized matrix, which is
    never whole."""
    return torch.cat([F.linear(x, strip) for strip in matrix.strips(x.dtype)], -1)


def stack_rows(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix of the rows of several of the same scheme and width."""
    first = pieces[0]
    assert all(each.scheme == first.scheme and each.shape[1] == first.shape[1] for each in pieces)
    zeros = (
        None
        if first.zeros is None
        else torch.cat([each.zeros for each in pieces if each.zeros is not None])
    )
    codes = torch.cat([each.codes for each in pieces])
    scales = torch.cat([each.scales for each in pieces])
    return QuantizedMatrix(first.scheme, (len(codes), first.shape[1]), codes, scales, zeros)


def grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] -> [N, G, columns of a group]."""
    num_groups = scheme.num_groups(weight.shape[1])
    return weight.unflatten(1, (num_groups, weight.shape[1] // max(1, num_groups)))


def matrix_shape(matrix: Tensor) -> tuple[int, int]:
    num_rows, num_columns = matrix.shape
    return num_rows, num_columns


# -- bits
# ---------------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] of uint8 into the bytes of each row; 8 bits are as they are."""
    if bits == 8:
        return codes
    num_bytes = -(-codes.shape[1] * bits // 8)
    codes = F.pad(codes, (0, -codes.shape[1] % 8))
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4)[:, :num_bytes].contiguous()
    assert bits == 3
    eights = codes.unflatten(1, (-1, 8)).int()
    words = (eights << torch.arange(0, 24, 3, device=codes.device)).sum(-1, dtype=torch.int32)
    packed = torch.stack((words & 255, words >> 8 & 255, words >> 16), -1).to(torch.uint8)
    return packed.flatten(1)[:, :num_bytes].contiguous()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes in the bytes of each row, and the zeros that fill up its last bytes: [N, bytes] ->
    [N, K or more]."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    assert bits == 3
    first, second, third = (
        F.pad(packed, (0, -packed.shape[1] % 3)).unflatten(1, (-1, 3)).int().unbind(-1)
    )
    words = first | second << 8 | third << 16
    return (
        ((words[..., None] >> torch.arange(0, 24, 3, device=packed.device)) & 7)
        .to(torch.uint8)
        .flatten(1)
    )
