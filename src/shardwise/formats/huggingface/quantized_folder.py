"""The quantized matrices of a Hugging Face folder, under the names of unquantized ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.quantization_config import (
    FolderQuantization,
    parse_quantization_config,
)
from shardwise.formats.huggingface.quantized_readers import check_column_order, import_matrix
from shardwise.formats.huggingface.quantized_tensors import (
    Headers,
    StoredMatrix,
    dequantized_shapes,
    find_matrices,
)
from shardwise.quant.format import QuantizedMatrix


@dataclass
class QuantizedFolder:
    """The quantized matrices of a folder; empty if it is not quantized.

    Attributes:
        quantization: how they are stored; None if the folder is not quantized.
        matrices: by the names that they would have unquantized.
        shapes: of all tensors, as if none was quantized.
        get: reads a tensor of the folder; None if there is none of that name.
        last_read: the matrix that was read last, since it is read in strips.
    """

    quantization: FolderQuantization | None
    matrices: Mapping[str, StoredMatrix]
    shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], Tensor | None]
    last_read: dict[str, QuantizedMatrix] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        headers: Headers,
        shapes: Mapping[str, tuple[int, ...]],
        get: Callable[[str], Tensor | None],
    ) -> "QuantizedFolder":
        """Find the quantized ones of the model's tensors, which have `shapes` unquantized.

        Raises ValueError for an unsupported format, and unless each matrix has all its tensors.
        """
        source = str(folder / "config.json")
        quantization = parse_quantization_config(read_config_json(folder), source)
        if quantization is None:
            return cls(None, {}, {name: shape for name, (_, shape) in headers.items()}, get)
        matrices = find_matrices(quantization, headers, shapes)
        for matrix in matrices.values():
            check_column_order(quantization, matrix, get(f"{matrix.stem}.g_idx"))
        return cls(quantization, matrices, dequantized_shapes(quantization, headers, matrices), get)

    def read(self, name: str) -> QuantizedMatrix:
        """Return a whole matrix."""
        if name not in self.last_read:
            assert self.quantization is not None
            matrix = self.matrices[name]
            self.last_read.clear()
            self.last_read[name] = import_matrix(
                self.quantization, matrix, lambda suffix: self.get(f"{matrix.stem}.{suffix}")
            )
        return self.last_read[name]
