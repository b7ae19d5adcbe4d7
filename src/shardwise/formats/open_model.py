"""`open_model`: the config and tokenizer of a model with weights, read once and passed on."""

from dataclasses import dataclass

from shardwise.config import ModelConfig
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.model_source import ModelSource, open_source, read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary


@dataclass(frozen=True)
class OpenModel:
    """The files of a model, its config and its tokenizer."""

    source: ModelSource
    config: ModelConfig
    tokenizer: Tokenizer


def open_model(source: ModelSource) -> OpenModel:
    """Open a Hugging Face folder, a GGUF file or a run.

    Raises ValueError for files that cannot be read, and for a tokenizer with more tokens than the
    model has.
    """
    opened = source if isinstance(source, Gguf) else open_source(source)
    config = read_config(opened)
    tokenizer = load_tokenizer(opened)
    check_vocabulary(tokenizer, config.vocab_size)
    return OpenModel(opened, config, tokenizer)
