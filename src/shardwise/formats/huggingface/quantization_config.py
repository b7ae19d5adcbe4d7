"""`quantization_config` in the config.json of a Hugging Face folder: how its matrices are stored.

Imports no torch. Formats: https://github.com/ModelCloud/GPTQModel,
https://github.com/casper-hansen/AutoAWQ, https://github.com/vllm-project/compressed-tensors,
https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.formats.config_files import config_errors, get_object
from shardwise.formats.families import FAMILIES
from shardwise.quant.scheme import Scheme

Method = Literal["gptq", "awq", "compressed-tensors", "fp8"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "compressed-tensors", "fp8")
ACT_ORDER = (
    "its columns are ordered by activation (act-order, desc_act), which is not supported; quantize "
    "without it, or use a GGUF file"
)


@dataclass(frozen=True)
class FolderQuantization:
    """The storage of the quantized matrices of a folder.

    Attributes:
        method: the format that the folder names.
        scheme: bits, groups and zero points of the codes.
        codes: the suffix of the tensor with the codes.
        rows_per_scale: how many rows share a scale; None if all of them do.
        zeros_minus_one: zero points are stored less one (GPTQ version 1).
    """

    method: Method
    scheme: Scheme
    codes: Literal["qweight", "weight_packed", "weight"]
    rows_per_scale: int | None = 1
    zeros_minus_one: bool = False


def parse_quantization_config(raw: dict[str, Any], source: str) -> FolderQuantization | None:
    """Parse the content of a config.json; return None if the model is not quantized.

    Raises ValueError, in one sentence that begins with `source`, for an unsupported format.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    parsers = {
        "gptq": _parse_gptq,
        "awq": _parse_awq,
        "compressed-tensors": _parse_compressed_tensors,
        "fp8": _parse_fp8,
    }
    with config_errors(source):
        if not isinstance(config, dict):
            raise ValueError(f"quantization_config must be an object, not {config!r:.60}")
        method = config.get("quant_method")
        if not isinstance(method, str) or method not in parsers:
            raise ValueError(
                f"unknown quantization method {method!r}; supported are {', '.join(METHODS)}"
            )
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is not None and family.folder.transposed:
            raise ValueError(
                f"quantized folders of {family.model_type} are not supported, since it stores "
                "matrices as [in, out]; a GGUF file is"
            )
        return parsers[method](config)


def _parse_gptq(config: dict[str, Any]) -> FolderQuantization:
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ in the format {version!r} is not supported; gptq and gptq_v2 are")
    if config.get("dynamic"):
        raise ValueError(
            "its layers are quantized in different ways (`dynamic`); only one way for all is "
            "supported"
        )
    is_symmetric = config.get("sym", True)
    group = _group_size(config.get("group_size"))
    scheme = _int_scheme(config.get("bits"), group, not is_symmetric)
    return FolderQuantization("gptq", scheme, "qweight", zeros_minus_one=version == "gptq")


def _parse_awq(config: dict[str, Any]) -> FolderQuantization:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    has_zeros = bool(config.get("zero_point", True))
    if version != "gemm" or bits != 4 or not has_zeros:
        raise ValueError(
            f"AWQ with {bits} bits in version {version!r}"
            f"{'' if has_zeros else ' without zero points'} is not supported; 4 bits in version "
            "gemm with zero points are"
        )
    return FolderQuantization("awq", _int_scheme(4, _group_size(group), True), "qweight")


def _parse_compressed_tensors(config: dict[str, Any]) -> FolderQuantization:
    groups = list(get_object(config, "config_groups").values())
    weights = [get_object(group, "weights") for group in groups]
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    kinds = {tuple(str(each.get(key)) for key in keys) for each in weights}
    format = config.get("format")
    if format == "mixed-precision" or len(kinds) > 1:
        raise ValueError(
            "its layers are quantized in different ways; only one way for all is supported"
        )
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if format not in known or not kinds:
        raise ValueError(
            f"compressed-tensors in the format {format!r} is not supported; pack-quantized, "
            "int-quantized and float-quantized are"
        )
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key) and get_object(config, key).get("format") != "dense":
            raise ValueError(f"its {key} is not supported; only models without one are")
    return _parse_weights(weights[0], is_packed=format == "pack-quantized")


def _parse_weights(weights: dict[str, Any], is_packed: bool) -> FolderQuantization:
    """Parse the quantization arguments of compressed-tensors."""
    bits = weights.get("num_bits")
    has_zeros = not weights.get("symmetric", True)
    if weights.get("actorder") in ("group", "dynamic", True):
        raise ValueError(ACT_ORDER)
    rows, group = _scale_shape(weights)
    if weights.get("type", "int") == "float":
        if bits != 8 or is_packed or has_zeros:
            raise ValueError(
                f"floats of {bits} bits{', packed,' * is_packed} are not supported; unpacked ones "
                "of 8 bits are"
            )
        return FolderQuantization("compressed-tensors", Scheme("fp8", group=group), "weight", rows)
    if not is_packed and bits != 8:
        raise ValueError(f"codes of {bits} bits that are not packed are not supported")
    scheme = _int_scheme(bits, group, has_zeros)
    codes: Literal["weight_packed", "weight"] = "weight_packed" if is_packed else "weight"
    return FolderQuantization("compressed-tensors", scheme, codes, rows)


def _scale_shape(weights: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the rows and columns that share a scale; None for all of them."""
    match weights.get("strategy"):
        case "channel":
            return 1, None
        case "group":
            return 1, _group_size(weights.get("group_size"))
        case "tensor":
            return None, None
        case "block":
            return _block_sizes(weights.get("block_structure"))
        case strategy:
            raise ValueError(
                f"scales per {strategy} are not supported; scales per channel, group, block or "
                "tensor are"
            )


def _parse_fp8(config: dict[str, Any]) -> FolderQuantization:
    block = config.get("weight_block_size")
    if block is None:
        return FolderQuantization("fp8", Scheme("fp8"), "weight", None)
    rows, columns = _block_sizes(block)
    return FolderQuantization("fp8", Scheme("fp8", group=_group_size(columns)), "weight", rows)


def _block_sizes(block: Any) -> tuple[int, int]:
    """Return the rows and columns of a block that shares a scale."""
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(
            f"a block of scales must be two whole numbers of at least 1, not {block!r:.60}"
        )
    return block[0], block[1]


def _int_scheme(bits: Any, group: int | None, has_zeros: bool) -> Scheme:
    if bits not in (3, 4, 8):
        raise ValueError(f"codes of {bits} bits are not supported; 3, 4 and 8 bits are")
    return Scheme("int", bits, group, has_zeros)


def _group_size(size: Any) -> int | None:
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            "a group size must be a whole number of at least 1, or -1 for the row, "
            f"not {size!r:.60}"
        )
    return size
