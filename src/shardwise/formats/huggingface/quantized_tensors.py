"""How Hugging Face folders store a quantized model: what `quantization_config` says, and the
tensors that each matrix then is. Imports no torch.

A matrix [N, K] of b bits with G groups a row is stored, in int32 words filled from the lowest bit,

    gptq                qweight [K b / 32, N], scales [G, N], qzeros [G, N b / 32] (of version 1 less one), g_idx [K]
    awq                 qweight [K, N b / 32], scales [G, N], qzeros [G, N b / 32], the eight codes of a word in the
                        order 0 2 4 6 1 3 5 7
    compressed-tensors  weight_packed [N, K b / 32], codes with half their range added, or weight [N, K] in int8 or fp8;
                        weight_scale [N, G], for asymmetric ones weight_zero_point
    fp8                 weight [N, K] in float8_e4m3fn, weight_scale_inv for each block of rows and columns (it is
                        multiplied by), or a weight_scale for all

Formats: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ,
https://github.com/vllm-project/compressed-tensors,
https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from shardwise.formats.config_files import config_errors, get_object
from shardwise.formats.dtype_names import NUM_BYTES
from shardwise.formats.families import FAMILIES
from shardwise.quant.scheme import Scheme, StorageFormat

Method = Literal["gptq", "awq", "compressed-tensors", "fp8"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "compressed-tensors", "fp8")
LEFT_OUT = ("input_scale", "g_idx", "weight_shape")
"""Beside a quantized matrix, and not needed: activations are not quantized."""

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of every tensor of a folder, by its name."""


@dataclass(frozen=True)
class FolderFormat:
    """How the quantized matrices of a folder are stored. `codes` is what the tensor of codes is
    called; `rows_per_scale` how many rows share a scale, None: all; `zeros_less_one` that of GPTQ's
    version 1."""

    method: Method
    scheme: Scheme
    codes: Literal["qweight", "weight_packed", "weight"]
    rows_per_scale: int | None = 1
    zeros_less_one: bool = False


def folder_format(raw: dict[str, Any], source: str) -> FolderFormat | None:
    """What a folder's `config.json` says; None where its model is not quantized. Raises ValueError
    for a format that cannot be read."""
    given = raw.get("quantization_config") or raw.get("compression_config")
    if not given:
        return None
    with config_errors(source):
        if not isinstance(given, dict):
            raise ValueError(f"quantization_config must be an object, not {given!r:.60}")
        method = given.get("quant_method")
        if method not in METHODS:
            raise ValueError(
                f"quantized by {method!r}, which cannot be read; {', '.join(METHODS)} can"
            )
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is not None and family.folder.transposed:
            raise ValueError(
                f"quantized folders of {family.model_type} cannot be read, since it stores "
                "matrices as [in, out]; a GGUF file can"
            )
        return {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors, "fp8": fp8}[
            method
        ](given)


def gptq(given: dict[str, Any]) -> FolderFormat:
    version = given.get("checkpoint_format") or given.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ in the format {version!r} cannot be read; gptq and gptq_v2 can")
    if given.get("dynamic"):
        raise ValueError(
            "its layers are quantized in different ways (`dynamic`); only one way for all can be read"
        )
    symmetric = given.get("sym", True)
    scheme = int_scheme(given.get("bits"), group_of(given.get("group_size")), not symmetric)
    return FolderFormat("gptq", scheme, "qweight", zeros_less_one=version == "gptq")


def awq(given: dict[str, Any]) -> FolderFormat:
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    bits = given.get("bits", given.get("w_bit"))
    group = given.get("group_size", given.get("q_group_size"))
    if version != "gemm" or bits != 4 or not given.get("zero_point", True):
        raise ValueError(
            f"AWQ of {bits} bits in version {version!r}{' without zero points' * (not given.get('zero_point', True))} "
            "cannot be read; of 4 bits in version gemm with zero points it can"
        )
    return FolderFormat("awq", int_scheme(4, group_of(group), True), "qweight")


def compressed_tensors(given: dict[str, Any]) -> FolderFormat:
    groups = list(get_object(given, "config_groups").values())
    weights = [get_object(group, "weights") for group in groups]
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    kinds = {tuple(str(each.get(key)) for key in keys) for each in weights}
    form = given.get("format")
    if form == "mixed-precision" or len(kinds) > 1:
        raise ValueError(
            "its layers are quantized in different ways; only one way for all can be read"
        )
    if (
        form not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
        or not kinds
    ):
        raise ValueError(
            f"compressed-tensors in the format {form!r} cannot be read; pack-quantized, int-quantized and "
            "float-quantized can"
        )
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if given.get(key) and get_object(given, key).get("format") != "dense":
            raise ValueError(f"its {key} cannot be followed; only models without one can be read")
    return of_weights(weights[0], packed=form == "pack-quantized")


def of_weights(weights: dict[str, Any], packed: bool) -> FolderFormat:
    """The format of compressed-tensors with these arguments of quantization."""
    bits = weights.get("num_bits")
    zero = not weights.get("symmetric", True)
    if weights.get("actorder") in ("group", "dynamic", True):
        raise ValueError(ACT_ORDER)
    rows: int | None
    match weights.get("strategy"):
        case "channel":
            rows = 1
            group = None
        case "group":
            rows = 1
            group = group_of(weights.get("group_size"))
        case "tensor":
            rows = None
            group = None
        case "block":
            rows, group = block_sizes(weights.get("block_structure"))
        case strategy:
            raise ValueError(
                f"scales for each {strategy} cannot be read; for each channel, group, block or tensor can"
            )
    if weights.get("type", "int") == "float":
        if bits != 8 or packed or zero:
            raise ValueError(
                f"floats of {bits} bits{', packed,' * packed} cannot be read; of 8, unpacked, can"
            )
        return FolderFormat("compressed-tensors", Scheme("fp8", group=group), "weight", rows)
    if not packed and bits != 8:
        raise ValueError(f"codes of {bits} bits that are not packed cannot be read")
    return FolderFormat(
        "compressed-tensors",
        int_scheme(bits, group, zero),
        "weight_packed" if packed else "weight",
        rows,
    )


def fp8(given: dict[str, Any]) -> FolderFormat:
    block = given.get("weight_block_size")
    if block is None:
        return FolderFormat("fp8", Scheme("fp8"), "weight", None)
    rows, columns = block_sizes(block)
    return FolderFormat("fp8", Scheme("fp8", group=group_of(columns)), "weight", rows)


ACT_ORDER = (
    "its columns are in the order of their activations (act-order, desc_act), which cannot be read; quantize it "
    "without, or use a GGUF file"
)


def block_sizes(block: Any) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale."""
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise ValueError(
            f"a block of scales must be two whole numbers of at least 1, not {block!r:.60}"
        )
    return block[0], block[1]


def int_scheme(bits: Any, group: int | None, zero: bool) -> Scheme:
    if bits not in (3, 4, 8):
        raise ValueError(f"codes of {bits} bits cannot be read; of 3, 4 and 8 can")
    return Scheme("int", bits, group, zero)


def group_of(size: Any) -> int | None:
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"a group size must be a whole number of at least 1, or -1 for the row, not {size!r:.60}"
        )
    return size


# -- tensors
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix of a folder; `format` is its format in memory."""

    stem: str
    shape: tuple[int, int]
    format: StorageFormat


def stored_matrices(
    format: FolderFormat, headers: Headers, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredMatrix]:
    """Those of the `wanted` tensors (`….weight` and their shapes) that are quantized. Raises
    ValueError where one lacks a tensor, or has one of another shape than it should."""
    found = {}
    for name, shape in wanted.items():
        stem = name.removesuffix(".weight")
        if name == stem or len(shape) != 2 or not is_quantized(format, headers, stem):
            continue
        num_rows, num_columns = shape
        if format.scheme.group and num_columns % format.scheme.group:
            raise ValueError(
                f"{stem} has groups of {format.scheme.group} columns, which do not divide its {num_columns}"
            )
        for suffix, shapes in parts(format, num_rows, num_columns).items():
            held = headers.get(f"{stem}.{suffix}")
            if held is None:
                raise ValueError(
                    f"{stem} is quantized, but has no {suffix}: without it the codes mean nothing"
                )
            if held[1] not in shapes:
                raise ValueError(
                    f"{stem}.{suffix} is {list(held[1])} and should be {list(shapes[0])}"
                )
        scales, _ = headers[f"{stem}.{scale_name(format)}"]
        if scales not in NUM_BYTES:
            raise ValueError(
                f"{stem}.{scale_name(format)} is stored as {scales}; {', '.join(NUM_BYTES)} can be read"
            )
        found[name] = StoredMatrix(
            stem, (num_rows, num_columns), format.scheme.storage_format(NUM_BYTES[scales])
        )
    return found


def is_quantized(format: FolderFormat, headers: Headers, stem: str) -> bool:
    dtype, _ = headers.get(f"{stem}.{format.codes}", (None, ()))
    return dtype == {"weight": "F8_E4M3" if format.scheme.kind == "fp8" else "I8"}.get(
        format.codes, "I32"
    )


def scale_name(format: FolderFormat) -> str:
    if format.codes == "qweight":
        return "scales"
    return (
        "weight_scale_inv"
        if format.method == "fp8" and format.rows_per_scale is not None
        else "weight_scale"
    )


def parts(
    format: FolderFormat, num_rows: int, num_columns: int
) -> dict[str, list[tuple[int, ...]]]:
    """The tensors that a matrix must have, and what shapes they may be."""
    bits = format.scheme.bits
    groups = format.scheme.num_groups(num_columns)
    if format.codes == "qweight":
        codes = (
            (num_columns * bits // 32, num_rows)
            if format.method == "gptq"
            else (num_columns, num_rows * bits // 32)
        )
        return {
            "qweight": [codes],
            "scales": [(groups, num_rows)],
            "qzeros": [(groups, num_rows * bits // 32)],
        }
    scale_rows = 1 if format.rows_per_scale is None else ceil(num_rows / format.rows_per_scale)
    scales: list[tuple[int, ...]] = [(scale_rows, groups)]
    if format.rows_per_scale is None:
        scales += [(1,), ()]
    if format.scheme.group is None:
        scales += [(scale_rows,)]
    packed = format.codes == "weight_packed"
    needed: dict[str, list[tuple[int, ...]]] = {
        format.codes: [(num_rows, ceil(num_columns * bits / 32) if packed else num_columns)],
        scale_name(format): scales,
    }
    if format.scheme.zero:
        needed["weight_zero_point"] = [(ceil(num_rows * bits / 32), groups)] if packed else scales
    return needed


def plain_headers(
    format: FolderFormat, headers: Headers, matrices: Mapping[str, StoredMatrix]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors as if nothing was quantized."""
    own = {
        f"{each.stem}.{suffix}"
        for each in matrices.values()
        for suffix in (*parts(format, *each.shape), *LEFT_OUT)
    }
    plain = {name: shape for name, (_, shape) in headers.items() if name not in own}
    return plain | {name: each.shape for name, each in matrices.items()}
