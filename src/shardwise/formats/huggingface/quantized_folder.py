"""The quantized matrices of a Hugging Face folder, under the names that they would have if they
were plain."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from shardwise.formats.huggingface.hf_config import read_config_json
from shardwise.formats.huggingface.quantized_readers import check_order, import_matrix
from shardwise.formats.huggingface.quantized_tensors import (
    FolderFormat,
    Headers,
    StoredMatrix,
    folder_format,
    plain_headers,
    stored_matrices,
)
from shardwise.quant.format import QuantizedMatrix


@dataclass
class QuantizedFolder:
    """`get` reads a tensor of the folder. The matrix that was read last is kept, since it is asked
    for in strips."""

    format: FolderFormat | None
    matrices: Mapping[str, StoredMatrix]
    plain_shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], Tensor | None]
    last: dict[str, QuantizedMatrix] = field(default_factory=dict)

    @classmethod
    def at(
        cls,
        folder: Path,
        headers: Headers,
        wanted: Mapping[str, tuple[int, ...]],
        get: Callable[[str], Tensor | None],
    ) -> "QuantizedFolder":
        """Raises ValueError for a format that cannot be read, and unless each matrix has all its
        tensors."""
        format = folder_format(read_config_json(folder), str(folder / "config.json"))
        if format is None:
            return cls(None, {}, {name: shape for name, (_, shape) in headers.items()}, get)
        matrices = stored_matrices(format, headers, wanted)
        for each in matrices.values():
            check_order(format, each, get(f"{each.stem}.g_idx"))
        return cls(format, matrices, plain_headers(format, headers, matrices), get)

    def read(self, name: str) -> QuantizedMatrix:
        """The whole matrix of that name."""
        if name not in self.last:
            assert self.format is not None
            matrix = self.matrices[name]
            self.last.clear()
            self.last[name] = import_matrix(
                self.format, matrix, lambda suffix: self.get(f"{matrix.stem}.{suffix}")
            )
        return self.last[name]
