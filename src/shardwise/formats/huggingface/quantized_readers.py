"""Reading the tensors of a quantized Hugging Face folder as `QuantizedMatrix`, without loss.

Codes keep their bits and scales their dtype. How each method stores them is described in
`quantized_tensors.py`.

Shapes: N rows (outputs), K columns (inputs), G groups per row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.formats.huggingface.quantization_config import ACT_ORDER, FolderQuantization
from shardwise.formats.huggingface.quantized_tensors import StoredMatrix, scale_suffix
from shardwise.quant.format import QuantizedMatrix, pack, unpack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within its word of each of eight consecutive codes."""

GetTensor = Callable[[str], Tensor | None]
"""Returns a tensor of the matrix by its suffix; None if there is none."""

Content = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales [N, G], and zero points [N, G] or None."""


def import_matrix(
    quantization: FolderQuantization, matrix: StoredMatrix, get: GetTensor
) -> QuantizedMatrix:
    """Return the matrix that a folder's tensors store. Raises ValueError for zero points of a
    symmetric matrix that are not in the middle."""
    readers = {"gptq": _read_gptq, "awq": _read_awq}
    read = readers.get(quantization.method, _read_row_major)
    codes, scales, zeros = read(quantization, matrix, get)
    return QuantizedMatrix(quantization.scheme, matrix.shape, codes, scales.contiguous(), zeros)


def check_column_order(
    quantization: FolderQuantization, matrix: StoredMatrix, groups: Tensor | None
) -> None:
    """Raise ValueError unless columns are ordered by group; `groups` [K] is the group of each."""
    if groups is None:
        return
    num_columns = matrix.shape[1]
    columns_per_group = quantization.scheme.group or num_columns
    if not torch.equal(groups.long(), torch.arange(num_columns) // columns_per_group):
        raise ValueError(f"{matrix.stem}: {ACT_ORDER}")


def _read_gptq(quantization: FolderQuantization, matrix: StoredMatrix, get: GetTensor) -> Content:
    scheme = quantization.scheme
    num_rows, _ = matrix.shape
    packed = _bytes_of(_required(get, "qweight").t())
    stored = unpack(_bytes_of(_required(get, "qzeros")), scheme.bits)
    stored = stored[:, :num_rows].t().contiguous()
    zeros = (stored + 1) & (scheme.levels - 1) if quantization.zeros_minus_one else stored
    scales = _required(get, "scales").t()
    if scheme.zero:
        return packed, scales, zeros
    middle = scheme.levels // 2
    # some files say version 1 and store symmetric zero points as version 2 does
    if not (zeros == middle).all() and not (stored == middle).all():
        raise ValueError(
            f"{matrix.stem} should be symmetric, but its zero points are not all in the middle"
        )
    return (_flip_sign(packed) if scheme.bits == 8 else packed), scales, None


def _read_awq(quantization: FolderQuantization, matrix: StoredMatrix, get: GetTensor) -> Content:
    codes = _unpack_awq(_required(get, "qweight"))
    zeros = _unpack_awq(_required(get, "qzeros"))
    return pack(codes, 4), _required(get, "scales").t(), zeros


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack words [.., N / 8] into codes [N, ..]."""
    codes = unpack(_bytes_of(words), 4).unflatten(1, (-1, 8))
    return codes[..., AWQ_ORDER].flatten(1).t().contiguous()


def _read_row_major(
    quantization: FolderQuantization, matrix: StoredMatrix, get: GetTensor
) -> Content:
    """Read a matrix of compressed-tensors or fp8, which store rows one after the other."""
    scheme = quantization.scheme
    num_rows, num_columns = matrix.shape
    num_groups = scheme.num_groups(num_columns)
    stored = _required(get, quantization.codes)
    scales = _required(get, scale_suffix(quantization))
    scales = _expand_rows(quantization, scales, num_rows, num_groups)
    if quantization.codes != "weight_packed":
        if not scheme.zero:
            return stored, scales, None
        zeros = _flip_sign(_required(get, "weight_zero_point"))
        zeros = _expand_rows(quantization, zeros, num_rows, num_groups)
        return _flip_sign(stored), scales, zeros
    codes = _bytes_of(stored)[:, : scheme.row_bytes(num_columns)].contiguous()
    if not scheme.zero:
        return (_flip_sign(codes) if scheme.bits == 8 else codes), scales, None
    zeros = unpack(_bytes_of(_required(get, "weight_zero_point").t()), scheme.bits)
    return codes, scales, zeros[:, :num_rows].t().contiguous()


def _expand_rows(
    quantization: FolderQuantization, values: Tensor, num_rows: int, num_groups: int
) -> Tensor:
    """Return scales or zero points [N, G], repeated for rows that share them."""
    repeats = num_rows if quantization.rows_per_scale is None else quantization.rows_per_scale
    return values.reshape(-1, num_groups).repeat_interleave(repeats, 0)[:num_rows].contiguous()


def _flip_sign(codes: Tensor) -> Tensor:
    """Convert 8-bit codes between int8 and uint8, which differ by 128."""
    if codes.dtype == torch.uint8:
        return (codes.short() - 128).to(torch.int8)
    return (codes.short() + 128).to(torch.uint8)


def _bytes_of(words: Tensor) -> Tensor:
    """View int32 words [.., W] as bytes [.., 4 W], the lowest first."""
    return words.contiguous().view(torch.uint8)


def _required(get: GetTensor, suffix: str) -> Tensor:
    tensor = get(suffix)
    assert tensor is not None, f"{suffix}: checked by find_matrices"
    return tensor
