"""The tensors in which Hugging Face folders store each quantized matrix. Imports no torch.

A matrix [N, K] of b bits with G groups per row is stored, in int32 words filled from the lowest
bit, as

    gptq                qweight [K b / 32, N], scales [G, N], qzeros [G, N b / 32] (less one in
                        version 1), g_idx [K]
    awq                 qweight [K, N b / 32], scales [G, N], qzeros [G, N b / 32]; the eight codes
                        of a word are in the order 0 2 4 6 1 3 5 7
    compressed-tensors  weight_packed [N, K b / 32], with half the range added to codes, or weight
                        [N, K] in int8 or fp8; weight_scale [N, G]; weight_zero_point if asymmetric
    fp8                 weight [N, K] in float8_e4m3fn, and weight_scale_inv (a factor, despite its
                        name) per block of rows and columns, or one weight_scale for all
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from shardwise.formats.dtype_names import NUM_BYTES
from shardwise.formats.huggingface.quantization_config import FolderQuantization
from shardwise.quant.scheme import StorageFormat

UNUSED = ("input_scale", "g_idx", "weight_shape")
"""Further tensors of a quantized matrix: activations are not quantized, and the rest is known."""

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of every tensor of a folder, by its name."""


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix of a folder: its name without suffix, its shape, its format in memory."""

    stem: str
    shape: tuple[int, int]
    format: StorageFormat


def find_matrices(
    quantization: FolderQuantization, headers: Headers, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredMatrix]:
    """Return the quantized ones of the model's tensors (`….weight`, with their `shapes`).

    Raises ValueError if one lacks a tensor, has one of the wrong shape or dtype, or is also stored
    unquantized.
    """
    matrices = {}
    group = quantization.scheme.group
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        if name == stem or len(shape) != 2 or not _is_quantized(quantization, headers, stem):
            continue
        if quantization.codes != "weight" and name in headers:
            raise ValueError(f"{stem} is stored twice: quantized, and as {name}")
        num_rows, num_columns = shape
        if group and num_columns % group:
            raise ValueError(
                f"{stem} has groups of {group} columns, which do not divide its {num_columns}"
            )
        _check_tensors(quantization, headers, stem, (num_rows, num_columns))
        scale_dtype, _ = headers[f"{stem}.{scale_suffix(quantization)}"]
        if scale_dtype not in NUM_BYTES:
            raise ValueError(
                f"{stem}.{scale_suffix(quantization)} is stored as {scale_dtype}; supported are "
                f"{', '.join(NUM_BYTES)}"
            )
        format = quantization.scheme.storage_format(NUM_BYTES[scale_dtype])
        matrices[name] = StoredMatrix(stem, (num_rows, num_columns), format)
    return matrices


def _is_quantized(quantization: FolderQuantization, headers: Headers, stem: str) -> bool:
    dtype, _ = headers.get(f"{stem}.{quantization.codes}", (None, ()))
    if quantization.codes != "weight":
        return dtype == "I32"
    return dtype == ("F8_E4M3" if quantization.scheme.kind == "fp8" else "I8")


def _check_tensors(
    quantization: FolderQuantization, headers: Headers, stem: str, shape: tuple[int, int]
) -> None:
    """Raise ValueError unless a matrix has all its tensors, in one of the shapes they may have."""
    for suffix, allowed in required_tensors(quantization, *shape).items():
        header = headers.get(f"{stem}.{suffix}")
        if header is None:
            raise ValueError(
                f"{stem} is quantized, but has no {suffix}, without which its codes cannot be read"
            )
        if header[1] not in allowed:
            raise ValueError(
                f"{stem}.{suffix} is {list(header[1])} and should be {list(allowed[0])}"
            )


def scale_suffix(quantization: FolderQuantization) -> str:
    """Return the suffix of the tensor with the scales."""
    if quantization.codes == "qweight":
        return "scales"
    if quantization.method == "fp8" and quantization.rows_per_scale is not None:
        return "weight_scale_inv"
    return "weight_scale"


def required_tensors(
    quantization: FolderQuantization, num_rows: int, num_columns: int
) -> dict[str, list[tuple[int, ...]]]:
    """Return the tensors of a matrix by suffix, each with the shapes that it may have."""
    scheme = quantization.scheme
    bits = scheme.bits
    groups = scheme.num_groups(num_columns)
    if quantization.codes == "qweight":
        codes = (num_columns, num_rows * bits // 32)
        if quantization.method == "gptq":
            codes = (num_columns * bits // 32, num_rows)
        return {
            "qweight": [codes],
            "scales": [(groups, num_rows)],
            "qzeros": [(groups, num_rows * bits // 32)],
        }
    rows_per_scale = quantization.rows_per_scale
    scale_rows = 1 if rows_per_scale is None else ceil(num_rows / rows_per_scale)
    scales: list[tuple[int, ...]] = [(scale_rows, groups)]
    if rows_per_scale is None:
        scales += [(1,), ()]
    if scheme.group is None:
        scales += [(scale_rows,)]
    is_packed = quantization.codes == "weight_packed"
    code_columns = ceil(num_columns * bits / 32) if is_packed else num_columns
    tensors: dict[str, list[tuple[int, ...]]] = {
        quantization.codes: [(num_rows, code_columns)],
        scale_suffix(quantization): scales,
    }
    if scheme.zero:
        packed_zeros: list[tuple[int, ...]] = [(ceil(num_rows * bits / 32), groups)]
        tensors["weight_zero_point"] = packed_zeros if is_packed else scales
    return tensors


def dequantized_shapes(
    quantization: FolderQuantization, headers: Headers, matrices: Mapping[str, StoredMatrix]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's tensors as if none was quantized."""
    quantized = {
        f"{matrix.stem}.{suffix}"
        for matrix in matrices.values()
        for suffix in (*required_tensors(quantization, *matrix.shape), *UNUSED)
    }
    shapes = {name: shape for name, (_, shape) in headers.items() if name not in quantized}
    return shapes | {name: matrix.shape for name, matrix in matrices.items()}
