"""In what form each matrix of a model is held when it is served quantized: what the planner counts
and the loader follows. Imports no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.config import ModelConfig
from shardwise.formats.families import family_of
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.quantized_tensors import (
    StoredMatrix,
    folder_format,
    stored_matrices,
)
from shardwise.formats.huggingface.weight_files import read_headers
from shardwise.formats.model_source import ModelSource, source_path
from shardwise.formats.tensor_names import TensorNames, fit_prefix, stored_parts, stored_shapes
from shardwise.layout import Layout
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.scheme import (
    AS_STORED,
    StorageFormats,
    can_stay_quantized,
    check_groups,
    check_shards,
    ggml_format,
    parse_quant,
    quantizable,
)


def quantized_formats(
    source: ModelSource | None, config: ModelConfig, layout: Layout, quant: str
) -> StorageFormats:
    """The formats that `quant` asks for: those of the model at `source`, or those of a scheme.
    Raises ValueError for what is not known, is not stored quantized, or is so already, and for
    groups that the layout would cut."""
    return choose_formats(
        {} if source is None else stored_formats(source, config),
        None if source is None else source_path(source),
        config,
        layout,
        quant,
    )


def choose_formats(
    stored: StorageFormats, path: Path | None, config: ModelConfig, layout: Layout, quant: str
) -> StorageFormats:
    """The same where the `stored` ones are known."""
    scheme = parse_quant(quant)
    if scheme is None:
        if not stored:
            where = (
                "a shape without weights"
                if path is None
                else f"{path}, which is not stored quantized"
            )
            raise ValueError(
                f"{AS_STORED} has nothing to keep in {where}; int8 or int4-g64 quantizes a model"
            )
        check_formats(config, stored, layout)
        return stored
    if stored:
        names = ", ".join(sorted({format.name for format in stored.values()}))
        raise ValueError(
            f"{path} is quantized already ({names}), and twice is not done; {AS_STORED} keeps it, or convert it first"
        )
    specs = [spec for spec in model_specs(config) if quantizable(spec)]
    check_groups(specs, scheme.group, layout)
    return {(spec.name, part.name): scheme.storage_format() for spec in specs for part in spec.rows}


def check_formats(config: ModelConfig, formats: StorageFormats, layout: Layout) -> None:
    """Raise ValueError, with the tp that work, where the layout would cut groups of columns."""
    check_shards(
        model_specs(config), {name: format.group for (name, _), format in formats.items()}, layout
    )


def stored_formats(source: ModelSource, config: ModelConfig) -> StorageFormats:
    """Those of the matrices that a GGUF file or a folder stores quantized; a run has none."""
    if isinstance(source, Gguf):
        return gguf_formats(source, config)
    path = Path(source)
    if path.is_dir():
        return folder_formats(path, config) if (path / "config.json").is_file() else {}
    return gguf_formats(read_gguf(path), config)


def gguf_formats(gguf: Gguf, config: ModelConfig) -> StorageFormats:
    names = family_of(config).gguf
    found = {}
    for spec in model_specs(config):
        for part, stored in stored_parts(spec, names).items() if can_stay_quantized(spec) else ():
            format = (
                ggml_format(gguf.tensors[stored.name].kind) if stored.name in gguf.tensors else None
            )
            if format is not None:
                found[spec.name, part] = format
    return found


def folder_formats(folder: Path, config: ModelConfig) -> StorageFormats:
    method = folder_format(read_config_json(folder), str(folder / "config.json"))
    if method is None:
        return {}
    specs = model_specs(config)
    headers = read_headers(folder)
    names = fit_prefix(family_of(config).folder, headers)
    return matrix_formats(
        stored_matrices(method, headers, stored_shapes(specs, names)), specs, names
    )


def matrix_formats(
    matrices: Mapping[str, StoredMatrix], specs: Iterable[ParamSpec], names: TensorNames
) -> StorageFormats:
    """Those of a folder's quantized matrices."""
    return {
        (spec.name, part): matrices[stored.name].format
        for spec in specs
        if can_stay_quantized(spec)
        for part, stored in stored_parts(spec, names).items()
        if stored.name in matrices
    }
