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
    Forms,
    check_cuts,
    check_groups,
    gguf_form,
    keepable,
    parse_quant,
    quantizable,
)


def quantized_forms(
    source: ModelSource | None, config: ModelConfig, layout: Layout, quant: str
) -> Forms:
    """The forms that `quant` asks for: those of the model at `source`, or those of a scheme.
    Raises ValueError for what is not known, is not stored quantized, or is so already, and for
    groups that the layout would cut."""
    return chosen_forms(
        {} if source is None else kept_forms(source, config),
        None if source is None else source_path(source),
        config,
        layout,
        quant,
    )


def chosen_forms(
    stored: Forms, path: Path | None, config: ModelConfig, layout: Layout, quant: str
) -> Forms:
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
        check_forms(config, stored, layout)
        return stored
    if stored:
        names = ", ".join(sorted({form.name for form in stored.values()}))
        raise ValueError(
            f"{path} is quantized already ({names}), and twice is not done; {AS_STORED} keeps it, or convert it first"
        )
    specs = [spec for spec in model_specs(config) if quantizable(spec)]
    check_groups(specs, scheme.group, layout)
    return {(spec.name, part.name): scheme.form() for spec in specs for part in spec.rows}


def check_forms(config: ModelConfig, forms: Forms, layout: Layout) -> None:
    """Raise ValueError, with the tp that work, where the layout would cut groups of columns."""
    check_cuts(model_specs(config), {name: form.group for (name, _), form in forms.items()}, layout)


def kept_forms(source: ModelSource, config: ModelConfig) -> Forms:
    """Those of the matrices that a GGUF file or a folder stores quantized; a run has none."""
    if isinstance(source, Gguf):
        return gguf_forms(source, config)
    path = Path(source)
    if path.is_dir():
        return folder_forms(path, config) if (path / "config.json").is_file() else {}
    return gguf_forms(read_gguf(path), config)


def gguf_forms(gguf: Gguf, config: ModelConfig) -> Forms:
    names = family_of(config).gguf
    found = {}
    for spec in model_specs(config):
        for part, stored in stored_parts(spec, names).items() if keepable(spec) else ():
            form = (
                gguf_form(gguf.tensors[stored.name].kind) if stored.name in gguf.tensors else None
            )
            if form is not None:
                found[spec.name, part] = form
    return found


def folder_forms(folder: Path, config: ModelConfig) -> Forms:
    format = folder_format(read_config_json(folder), str(folder / "config.json"))
    if format is None:
        return {}
    specs = model_specs(config)
    headers = read_headers(folder)
    names = fit_prefix(family_of(config).folder, headers)
    return matrix_forms(stored_matrices(format, headers, stored_shapes(specs, names)), specs, names)


def matrix_forms(
    matrices: Mapping[str, StoredMatrix], specs: Iterable[ParamSpec], names: TensorNames
) -> Forms:
    """Those of a folder's quantized matrices."""
    return {
        (spec.name, part): matrices[stored.name].form
        for spec in specs
        if keepable(spec)
        for part, stored in stored_parts(spec, names).items()
        if stored.name in matrices
    }
