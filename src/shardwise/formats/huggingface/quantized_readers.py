"""From the tensors of a quantized folder to the matrices of `format.py`, without loss: codes keep
their bits, scales their dtype. How each method stores them is told in `stored.py`.

Shapes: N rows (outputs), K columns (inputs), G groups of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.formats.huggingface.quantized_tensors import (
    ACT_ORDER,
    FolderFormat,
    StoredMatrix,
    scale_name,
)
from shardwise.quant.format import QuantizedMatrix, pack, unpack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight neighbours lies."""

Get = Callable[[str], Tensor | None]
"""A tensor of a matrix, by the end of its name; None where there is none."""


def import_matrix(format: FolderFormat, matrix: StoredMatrix, get: Get) -> QuantizedMatrix:
    """The matrix that these tensors are. Raises ValueError for one whose columns were put in
    another order."""
    read = {"gptq": read_gptq, "awq": read_awq}.get(format.method, read_by_rows)
    codes, scales, zeros = read(format, matrix, get)
    return QuantizedMatrix(format.scheme, matrix.shape, codes, scales.contiguous(), zeros)


Read = tuple[Tensor, Tensor, Tensor | None]


def read_gptq(format: FolderFormat, matrix: StoredMatrix, get: Get) -> Read:
    scheme = format.scheme
    num_rows, _ = matrix.shape
    packed = bytes_of(needed(get, "qweight").t())
    zeros = unpack(bytes_of(needed(get, "qzeros")), scheme.bits)[:, :num_rows].t().contiguous()
    if format.zeros_less_one:
        zeros = (zeros + 1) & (scheme.levels - 1)
    scales = needed(get, "scales").t()
    if scheme.zero:
        return packed, scales, zeros
    if not (zeros == scheme.levels // 2).all():
        raise ValueError(
            f"{matrix.stem} should be symmetric, but its zero points are not all in the middle"
        )
    return (with_sign(packed) if scheme.bits == 8 else packed), scales, None


def check_order(format: FolderFormat, matrix: StoredMatrix, order: Tensor | None) -> None:
    """Raise ValueError unless columns are in the order of their groups; `order` [K] says in which
    group each is."""
    if order is None:
        return
    num_columns = matrix.shape[1]
    if not torch.equal(
        order.long(), torch.arange(num_columns) // (format.scheme.group or num_columns)
    ):
        raise ValueError(f"{matrix.stem}: {ACT_ORDER}")


def read_awq(format: FolderFormat, matrix: StoredMatrix, get: Get) -> Read:
    def in_order(words: Tensor) -> Tensor:
        """[.., N / 8] words -> [N, ..] codes."""
        return (
            unpack(bytes_of(words), 4)
            .unflatten(1, (-1, 8))[..., AWQ_ORDER]
            .flatten(1)
            .t()
            .contiguous()
        )

    codes = in_order(needed(get, "qweight"))
    zeros = in_order(needed(get, "qzeros"))
    return pack(codes, 4), needed(get, "scales").t(), zeros


def read_by_rows(format: FolderFormat, matrix: StoredMatrix, get: Get) -> Read:
    """Of compressed-tensors and fp8, which keep rows as they are."""
    scheme = format.scheme
    num_rows, num_columns = matrix.shape
    num_groups = scheme.num_groups(num_columns)
    stored = needed(get, format.codes)
    scales = each_row(format, needed(get, scale_name(format)), num_rows, num_groups)
    packed = format.codes == "weight_packed"
    zeros = None
    if scheme.zero and packed:
        zeros = (
            unpack(bytes_of(needed(get, "weight_zero_point").t()), scheme.bits)[:, :num_rows]
            .t()
            .contiguous()
        )
    elif scheme.zero:
        zeros = each_row(format, with_sign(needed(get, "weight_zero_point")), num_rows, num_groups)
    if packed:
        codes = bytes_of(stored)[:, : scheme.row_bytes(num_columns)].contiguous()
        return (with_sign(codes) if scheme.bits == 8 and not scheme.zero else codes), scales, zeros
    return (with_sign(stored) if scheme.zero else stored), scales, zeros


def each_row(format: FolderFormat, scales: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """Scales [N, G], a row's own where it shares them with others."""
    per = num_rows if format.rows_per_scale is None else format.rows_per_scale
    return scales.reshape(-1, num_groups).repeat_interleave(per, 0)[:num_rows].contiguous()


def with_sign(codes: Tensor) -> Tensor:
    """Codes of 8 bits, 128 less and with a sign, or 128 more and without."""
    to = torch.int8 if codes.dtype == torch.uint8 else torch.uint8
    return (codes.short() + (128 if to == torch.uint8 else -128)).to(to)


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 words, the lowest first: [.., W] -> [.., 4 W]."""
    return words.contiguous().view(torch.uint8)


def needed(get: Get, name: str) -> Tensor:
    found = get(name)
    assert found is not None, f"{name}: stored_matrices has looked for it"
    return found
