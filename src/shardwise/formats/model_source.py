"""The files of a model on this machine: what kind they are, and the config that they state.

Imports no torch.
"""

from pathlib import Path
from typing import Literal

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_config import config_from_gguf
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.huggingface.hf_config import read_folder_config

ModelSource = str | Path | Gguf
"""The path of a Hugging Face folder, a run or a .gguf file; or an open GGUF file, whose header is
then not read again."""

EXPECTED = "a model is a Hugging Face folder, a .gguf file or a run"


def open_source(path: str | Path) -> Path | Gguf:
    """Open a .gguf file; return any other path as it is. Raises ValueError for a broken file."""
    path = Path(path)
    return read_gguf(path) if path.suffix == ".gguf" and path.is_file() else path


def source_path(source: ModelSource) -> Path:
    """Return the path of a model, open or not."""
    return source.path if isinstance(source, Gguf) else Path(source)


def source_kind(source: ModelSource) -> Literal["folder", "gguf", "run"]:
    """Return what a model with weights is stored as. Raises ValueError if it is none of these."""
    path = source_path(source)
    if path.is_dir():
        return "run" if (path / "model" / "config.json").is_file() else "folder"
    if not path.exists():
        raise ValueError(f"{path} does not exist; {EXPECTED}")
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is not a model; {EXPECTED}")
    return "gguf"


def read_config(source: ModelSource) -> ModelConfig:
    """Read the config of a model. Raises ValueError if it has none that can be read."""
    kind = source_kind(source)
    path = source_path(source)
    if kind == "gguf":
        file = source if isinstance(source, Gguf) else read_gguf(path)
        return config_from_gguf(file, str(path))
    return read_folder_config(path / "model" if kind == "run" else path)
