"""`open_weights`: the reader for a Hugging Face folder, a GGUF file or a run."""

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.gguf.gguf_reader import GgufReader
from shardwise.formats.huggingface.folder import FolderReader
from shardwise.formats.model_source import ModelSource, source_kind, source_path
from shardwise.formats.reader import Reader
from shardwise.formats.run_checkpoint import RunReader


def open_weights(source: ModelSource, config: ModelConfig) -> Reader:
    """Open the weights of a model. Raises ValueError unless they are those of `config`."""
    kind = source_kind(source)
    if kind == "gguf":
        return GgufReader(source if isinstance(source, Gguf) else source_path(source), config)
    return (RunReader if kind == "run" else FolderReader)(source_path(source), config)
