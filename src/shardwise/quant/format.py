"""Quantized matrices: small codes q, one scale s per group of columns of a row, and perhaps an
offset.

    w = s q          symmetric
    w = s (q - z)    zeros: integer zero points z, as in GPTQ, AWQ and compressed-tensors
    w = s q + m      zeros: minima m, as in Q4_1 of GGUF

Both types of offset are stored as they come and distinguished by their dtype. Neither can represent
the other without loss: m / s is not an integer, and s z has more bits than the dtype of the scale.
Weights are computed in fp32 and rounded once. With scales in bf16 or fp16, s (q - z) is exact in
fp32, and so is s q + m with m = -s z, so a kernel may use either. `quantize` produces zero points.

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
"""The dtype of the scales that `quantize` chooses: engines that load scales in bf16 or in fp16
represent them exactly."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
STRIP_ELEMENTS = 1 << 20
"""The number of weights that a matmul dequantizes at once."""

ChooseScales = Callable[[Tensor, Scheme], tuple[Tensor, Tensor | None]]
"""Returns scales and zeros [N, G] for a matrix [N, K]: `choose_scales`, or the rule of another
format."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A quantized matrix [N, K].

    Attributes:
        scheme: bits, groups and symmetry.
        shape: (N, K).
        codes: [N, bytes of a row]. With 8 bits one code per byte: uint8, int8 if symmetric,
            float8_e4m3fn for fp8. With fewer bits uint8: code i of a row is its bits b i to
            b i + b - 1, counted from the lowest bit of the first byte, so 4 bits lie two per byte
            and 3 bits eight in three bytes; the last byte is padded with zeros. Symmetric codes of
            4 and 3 bits are stored as q + 8 and q + 4.
        scales: [N, G] in bf16, fp16 or fp32.
        zeros: [N, G], zero points in uint8 or minima in floating point; None if symmetric.
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, num_columns = self.shape
        scheme = self.scheme
        zeros = self.zeros
        groups = (num_rows, scheme.num_groups(num_columns))
        assert self.codes.shape == (num_rows, scheme.row_bytes(num_columns))
        assert self.codes.dtype == code_dtype(scheme)
        assert self.scales.shape == groups and self.scales.is_floating_point()
        assert scheme.zero == (zeros is not None), scheme
        assert zeros is None or zeros.shape == groups
        assert zeros is None or zeros.dtype == torch.uint8 or zeros.is_floating_point()

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def to(self, device: torch.device | str) -> "QuantizedMatrix":
        zeros = None if self.zeros is None else self.zeros.to(device)
        scales = self.scales.to(device)
        return replace(self, codes=self.codes.to(device), scales=scales, zeros=zeros)

    def rows(self, start: int, stop: int) -> "QuantizedMatrix":
        """Return a view of rows [start, stop)."""
        return self.select_rows(slice(start, stop))

    def select_rows(self, rows: slice | Tensor) -> "QuantizedMatrix":
        """Return the rows of a slice (a view) or of a tensor of indices (a copy)."""
        codes = self.codes[rows]
        shape = (len(codes), self.shape[1])
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, shape=shape, codes=codes, scales=self.scales[rows], zeros=zeros)

    def columns(self, start: int, stop: int) -> "QuantizedMatrix":
        """Return a copy of columns [start, stop), which begin and end at groups or, without groups,
        at whole bytes."""
        scheme = self.scheme
        num_rows, num_columns = self.shape
        unit = scheme.group or GROUP_MULTIPLE
        assert start % unit == 0 and start <= stop <= num_columns, (start, stop)
        assert stop % unit == 0 or stop == num_columns, (start, stop)
        codes = self.codes[:, scheme.row_bytes(start) : scheme.row_bytes(stop)].contiguous()
        groups = slice(0, 1)
        if scheme.group is not None:
            groups = slice(start // scheme.group, stop // scheme.group)
        scales = self.scales[:, groups].contiguous()
        zeros = None if self.zeros is None else self.zeros[:, groups].contiguous()
        return QuantizedMatrix(scheme, (num_rows, stop - start), codes, scales, zeros)

    def submatrix(self, rows: slice, columns: slice) -> "QuantizedMatrix":
        """Return a copy of a rectangle, which does not keep the rest in memory."""
        part = self.rows(rows.start, rows.stop).columns(columns.start, columns.stop)
        zeros = None if part.zeros is None else part.zeros.clone()
        return replace(part, codes=part.codes.clone(), scales=part.scales.clone(), zeros=zeros)

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the dequantized rows, about STRIP_ELEMENTS weights at a time."""
        for start, stop in strip_rows(self.shape):
            yield dequantize(self.rows(start, stop), dtype)


def strip_rows(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of strips of rows of about STRIP_ELEMENTS weights."""
    num_rows, num_columns = shape
    step = max(1, STRIP_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def code_dtype(scheme: Scheme) -> torch.dtype:
    if scheme.kind == "fp8":
        return FP8
    return torch.int8 if scheme.bits == 8 and not scheme.zero else torch.uint8


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """Round a matrix [N, K] to nearest, each row separately. Raises ValueError if groups do not
    divide K and if a weight is not finite."""
    if weight.dim() != 2 or (scheme.group and weight.shape[1] % scheme.group):
        raise ValueError(
            f"{scheme} does not fit a weight of shape {tuple(weight.shape)}: "
            "groups must divide the columns"
        )
    if not weight.isfinite().all():
        raise ValueError("a weight with infinities or NaNs cannot be quantized")
    return round_to_nearest(weight, scheme, choose_scales)


def round_to_nearest(weight: Tensor, scheme: Scheme, choose: ChooseScales) -> QuantizedMatrix:
    """Round every weight to the nearest code, with the scales that `choose` returns."""
    return encode(weight, scheme, *choose(weight, scheme))


def choose_scales(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return scales [N, G], and zero points if the scheme has them, from the range of each group.

    No weight is off by more than half a step, apart from the rounding of the scale. Symmetric steps
    are 2 max|w| / (levels - 1), as in GPTQ and compressed-tensors; with zero points the range is
    extended to include 0. The scale of a group of zeros is 1.
    """
    groups = grouped(weight, scheme).float()
    if scheme.zero:
        low = groups.amin(-1).clamp(max=0)
        high = groups.amax(-1).clamp(min=0)
        scales = nonzero_scales((high - low) / (scheme.levels - 1))
        zeros = (-low / scales.float()).round_().clamp_(0, scheme.levels - 1)
        return scales, zeros.to(torch.uint8)
    largest_code = FP8_MAX if scheme.kind == "fp8" else (scheme.levels - 1) / 2
    return nonzero_scales(groups.abs().amax(-1) / largest_code), None


def nonzero_scales(scales: Tensor) -> Tensor:
    """Return the scales in SCALE_DTYPE, with 1 instead of 0."""
    narrow = scales.to(SCALE_DTYPE)
    return torch.where(narrow == 0, torch.ones_like(narrow), narrow)


def encode(
    weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> QuantizedMatrix:
    """Round a matrix [N, K] to the nearest codes for scales, and zero points or minima, [N, G]."""
    if scheme.kind == "fp8":
        values = grouped(weight, scheme).float() / scales.float()[..., None]
        codes = values.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        return QuantizedMatrix(scheme, matrix_shape(weight), codes.view(weight.shape), scales)
    return from_codes(nearest_codes(weight, scheme, scales, zeros), scheme, scales, zeros)


def nearest_codes(
    weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """Return the integers [N, K] of `encode`, in fp32."""
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
    """Pack integers [N, K] of any dtype: 0 to 2^b - 1 with zeros, signed without."""
    stored = pack((codes + scheme.implicit_zero).to(code_dtype(scheme)), scheme.bits)
    return QuantizedMatrix(scheme, matrix_shape(codes), stored, scales, zeros)


def codes_of(quantized: QuantizedMatrix) -> Tensor:
    """Return the codes [N, K]: int8 if symmetric, uint8 with zeros, float8 for fp8."""
    scheme = quantized.scheme
    num_columns = quantized.shape[1]
    if scheme.bits == 8:
        return quantized.codes
    codes = unpack(quantized.codes, scheme.bits)[:, :num_columns]
    return codes if scheme.zero else codes.to(torch.int8) - scheme.implicit_zero


def dequantize(quantized: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] in `dtype`: computed in fp32, rounded once."""
    scheme = quantized.scheme
    weights = dequantize_codes(codes_of(quantized), scheme, quantized.scales, quantized.zeros)
    return weights.to(dtype)


def dequantize_codes(
    codes: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """Return the weights [N, K] of codes [N, K], in fp32."""
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
    """A matrix [N, K] that yields its dequantized rows, a few at a time."""

    def strips(self, dtype: torch.dtype) -> Iterator[Tensor]: ...


def matmul(x: Tensor, matrix: Strips) -> Tensor:
    """Return x [..., K] @ W^T: [..., N] in the dtype of x. The whole of W is never dequantized."""
    return torch.cat([F.linear(x, strip) for strip in matrix.strips(x.dtype)], -1)


def stack_rows(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate the rows of matrices of one scheme and width."""
    first = parts[0]
    assert all(each.scheme == first.scheme and each.shape[1] == first.shape[1] for each in parts)
    zeros = [each.zeros for each in parts if each.zeros is not None]
    codes = torch.cat([each.codes for each in parts])
    scales = torch.cat([each.scales for each in parts])
    shape = (len(codes), first.shape[1])
    return QuantizedMatrix(first.scheme, shape, codes, scales, torch.cat(zeros) if zeros else None)


def grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return a view of [N, K] as [N, G, columns of a group]."""
    num_groups = scheme.num_groups(weight.shape[1])
    return weight.unflatten(1, (num_groups, weight.shape[1] // max(1, num_groups)))


def matrix_shape(matrix: Tensor) -> tuple[int, int]:
    num_rows, num_columns = matrix.shape
    return num_rows, num_columns


# Packing of bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [N, K] into the bytes of each row. Codes of 8 bits are returned as they
    are."""
    if bits == 8:
        return codes
    num_bytes = -(-codes.shape[1] * bits // 8)
    codes = F.pad(codes, (0, -codes.shape[1] % 8))
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4)[:, :num_bytes].contiguous()
    assert bits == 3
    octets = codes.unflatten(1, (-1, 8)).int()
    words = (octets << torch.arange(0, 24, 3, device=codes.device)).sum(-1, dtype=torch.int32)
    packed = torch.stack((words & 255, words >> 8 & 255, words >> 16), -1).to(torch.uint8)
    return packed.flatten(1)[:, :num_bytes].contiguous()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack [N, bytes of a row] into uint8 codes [N, K or more], padding of the last bytes
    included."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    assert bits == 3
    triples = F.pad(packed, (0, -packed.shape[1] % 3)).unflatten(1, (-1, 3)).int()
    first, second, third = triples.unbind(-1)
    words = first | second << 8 | third << 16
    shifts = torch.arange(0, 24, 3, device=packed.device)
    return ((words[..., None] >> shifts) & 7).to(torch.uint8).flatten(1)
