"""Weights of Hugging Face folders: any box of a parameter, read as a slice of its file."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.families import family_of
from shardwise.formats.huggingface.quantized_folder import QuantizedFolder
from shardwise.formats.huggingface.weight_files import headers_of, open_slices
from shardwise.formats.safetensors import DTYPES
from shardwise.formats.storage_formats import matrix_formats
from shardwise.formats.tensor_names import (
    check_stored,
    distinct_parts,
    fit_prefix,
    fit_tied,
    stored_parts,
    stored_shapes,
)
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.format import QuantizedMatrix, dequantize, strip_rows
from shardwise.shards import Box


class FolderReader:
    """The weights of a Hugging Face folder; a `ModelReader` (see `load.py`).

    Opening it reads only headers. Raises ValueError unless the folder stores exactly the parameters
    of `config`.
    """

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        folder = Path(path)
        specs = model_specs(config)
        with ExitStack() as opened:
            self._slices = opened.enter_context(open_slices(folder, "pt"))
            self._names = fit_prefix(family_of(config).folder, self._slices)
            if config.tied:
                self._names = fit_tied(self._names, self._slices)
            shapes = stored_shapes(specs, self._names)
            headers = headers_of(self._slices)
            self._quantized = QuantizedFolder.open(folder, headers, shapes, self._tensor)
            check_stored(self._without_zero_biases(shapes), specs, self._names, folder)
            self._check_ties(specs, folder)
            self.dtype = self._common_dtype(specs, folder)
            self._opened = opened.pop_all()
        self.formats = matrix_formats(self._quantized.matrices, specs, self._names)

    def _without_zero_biases(self, known: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the stored shapes without biases of quantized matrices that the model does not
        have and that are zero: AutoGPTQ stores one for each matrix."""

        def is_unused(name: str) -> bool:
            weight = name.removesuffix("bias") + "weight"
            is_extra = name.endswith(".bias") and name not in known
            return (
                is_extra and weight in self._quantized.matrices and not self._slices[name][:].any()
            )

        shapes = self._quantized.shapes
        return {name: shape for name, shape in shapes.items() if not is_unused(name)}

    def _check_ties(self, specs: Iterable[ParamSpec], folder: Path) -> None:
        """Raise ValueError if a tied parameter is stored with values of its own."""
        by_name = {spec.name: spec for spec in specs}
        for spec in by_name.values():
            if spec.tied_to is None:
                continue
            (copy,) = distinct_parts(spec, self._names)
            (original,) = distinct_parts(by_name[spec.tied_to], self._names)
            if copy.name == original.name:
                continue
            stored = copy.name in self._slices and original.name in self._slices
            is_quantized = copy.name in self._quantized.matrices  # its codes are not the original's
            if is_quantized or (stored and not self._are_equal(copy.name, original.name)):
                raise ValueError(
                    f"{folder} stores {copy.name} with other values than {original.name}, although "
                    'its config.json says "tie_word_embeddings": true; set that to false to use '
                    "both"
                )

    def _are_equal(self, one: str, other: str) -> bool:
        """Compare two matrices a few rows at a time."""
        slices = self._slices[one], self._slices[other]
        if slices[0].get_shape() != slices[1].get_shape():
            return False
        return all(
            torch.equal(*(each[start:stop].float() for each in slices))
            for start, stop in strip_rows(tuple(slices[0].get_shape()))
        )

    def _common_dtype(self, specs: Iterable[ParamSpec], folder: Path) -> torch.dtype:
        """Return the dtype of most elements; quantized ones count as bf16."""
        elements: Counter[torch.dtype] = Counter()
        for name, shape in stored_shapes(specs, self._names).items():
            if name in self._quantized.matrices:
                elements[torch.bfloat16] += math.prod(shape)
            elif name in self._slices:
                dtype = self._slices[name].get_dtype()
                if dtype not in DTYPES:
                    raise ValueError(
                        f"{folder} stores {name} as {dtype}; supported are {', '.join(DTYPES)}"
                    )
                elements[DTYPES[dtype]] += math.prod(shape)
        return elements.most_common(1)[0][0]

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        """Return a box in the dtype of the file; it may be a view of the mapped file."""
        part = stored_parts(spec, self._names)[box.part]
        if part.name in self._quantized.matrices:
            rows, columns = part.slices(box)
            matrix = self._quantized.read(part.name).select_rows(rows)
            return dequantize(matrix, torch.float32)[:, columns]
        tensor = self._slices[part.name][part.slices(box)]
        return tensor.T if part.transposed else tensor

    def read_quantized(self, spec: ParamSpec, box: Box) -> QuantizedMatrix:
        """Return a box of a part that is stored quantized, without dequantizing it."""
        part = stored_parts(spec, self._names)[box.part]
        rows, columns = part.slices(box)
        return self._quantized.read(part.name).submatrix(rows, columns)

    def _tensor(self, name: str) -> Tensor | None:
        tensor: Tensor | None = self._slices[name][...] if name in self._slices else None
        return tensor

    def close(self) -> None:
        self._slices.clear()
        self._opened.close()
