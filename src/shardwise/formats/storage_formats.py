"""The storage format in which each matrix of a model is served when it is quantized.

The planner counts these formats and the loader follows them. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.config import ModelConfig
from shardwise.formats.families import family_of
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.quantization_config import parse_quantization_config
from shardwise.formats.huggingface.quantized_tensors import StoredMatrix, find_matrices
from shardwise.formats.huggingface.weight_files import read_headers
from shardwise.formats.model_source import ModelSource, source_path
from shardwise.formats.tensor_names import TensorNames, fit_prefix, stored_parts, stored_shapes
from shardwise.layout import Layout
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.scheme import (
    AS_STORED,
    AUTO,
    UNQUANTIZED,
    StorageFormat,
    StorageFormats,
    can_stay_quantized,
    check_groups,
    check_shards,
    ggml_format,
    has_product,
    parse_quant,
    quantizable,
)


def quantized_formats(
    source: ModelSource | None,
    config: ModelConfig,
    layout: Layout,
    quant: str,
    multiplies_codes: bool = True,
) -> StorageFormats:
    """Return the storage formats that `quant` selects: those of the model's files, or a scheme's.

    `source` is None for a shape without weights. `multiplies_codes` states whether the device has
    kernels that multiply by codes; without, `auto` selects none. Raises ValueError if `quant` is
    unknown, if it is `as-stored` and the model is not quantized, if it is a scheme and the model is
    quantized, and if the layout would split groups of columns.
    """
    stored = {} if source is None else stored_formats(source, config)
    path = None if source is None else source_path(source)
    return choose_formats(stored, path, config, layout, quant, multiplies_codes)


def choose_formats(
    stored: StorageFormats,
    path: Path | None,
    config: ModelConfig,
    layout: Layout,
    quant: str,
    multiplies_codes: bool = True,
) -> StorageFormats:
    """Return the storage formats that `quant` selects for a model stored in the formats `stored`.

    Raises ValueError as `quantized_formats` does.
    """
    scheme = parse_quant(quant)
    if quant == UNQUANTIZED:
        return {}
    if quant == AUTO:
        kept = formats_with_product(stored, config) if multiplies_codes else {}
        check_formats(config, kept, layout)
        return kept
    if scheme is None:
        if not stored:
            model = "this shape without weights" if path is None else str(path)
            raise ValueError(
                f"{model} is not quantized, so {AS_STORED} does not apply; int8 or int4-g64 "
                "quantizes it"
            )
        check_formats(config, stored, layout)
        return stored
    if stored:
        names = ", ".join(sorted({format.name for format in stored.values()}))
        raise ValueError(
            f"{path} is already quantized ({names}); use --quant {AS_STORED}, or convert it to "
            "bf16 first"
        )
    specs = [spec for spec in model_specs(config) if quantizable(spec)]
    check_groups(specs, scheme.group, layout)
    return {
        (spec.name, part.name): scheme.storage_format() for spec in specs for part in spec.all_parts
    }


def formats_with_product(stored: StorageFormats, config: ModelConfig) -> StorageFormats:
    """Return the formats of matrices that kernels multiply by: all parts of a matrix are stored in
    one format that has a product."""
    kept: dict[tuple[str, str], StorageFormat] = {}
    for spec in model_specs(config):
        parts = [(spec.name, part.name) for part in spec.all_parts]
        formats = [stored.get(part) for part in parts]
        first = formats[0]
        if first is not None and has_product(first) and all(each == first for each in formats):
            kept |= dict.fromkeys(parts, first)
    return kept


def check_formats(config: ModelConfig, formats: StorageFormats, layout: Layout) -> None:
    """Raise ValueError, with the tp that work, if the layout would split groups of columns."""
    if formats:
        groups = {name: format.group for (name, _), format in formats.items()}
        check_shards(model_specs(config), groups, layout)


def stored_formats(source: ModelSource, config: ModelConfig) -> StorageFormats:
    """Return the formats of the matrices that a GGUF file or a folder stores quantized; a run
    stores none."""
    if isinstance(source, Gguf):
        return gguf_formats(source, config)
    path = Path(source)
    if path.is_dir():
        return folder_formats(path, config) if (path / "config.json").is_file() else {}
    return gguf_formats(read_gguf(path), config)


def gguf_formats(gguf: Gguf, config: ModelConfig) -> StorageFormats:
    """Return the formats of the matrices that a GGUF file stores quantized."""
    formats = {}
    for spec in model_specs(config):
        if can_stay_quantized(spec):
            for name, part in stored_parts(spec, family_of(config).gguf).items():
                tensor = gguf.tensors.get(part.name)
                format = None if tensor is None else ggml_format(tensor.kind)
                if format is not None:
                    formats[spec.name, name] = format
    return formats


def folder_formats(folder: Path, config: ModelConfig) -> StorageFormats:
    """Return the formats of the matrices that a Hugging Face folder stores quantized."""
    quantization = parse_quantization_config(read_config_json(folder), str(folder / "config.json"))
    if quantization is None:
        return {}
    specs = model_specs(config)
    headers = read_headers(folder)
    names = fit_prefix(family_of(config).folder, headers)
    matrices = find_matrices(quantization, headers, stored_shapes(specs, names))
    return matrix_formats(matrices, specs, names)


def matrix_formats(
    matrices: Mapping[str, StoredMatrix], specs: Iterable[ParamSpec], names: TensorNames
) -> StorageFormats:
    """Return the formats of quantized `matrices` by parameter and part."""
    return {
        (spec.name, name): matrices[part.name].format
        for spec in specs
        if can_stay_quantized(spec)
        for name, part in stored_parts(spec, names).items()
        if part.name in matrices
    }
