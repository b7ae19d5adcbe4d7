"""`load_tokenizer`: the tokenizer of a Hugging Face folder, a GGUF file or a run."""

from pathlib import Path

from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.gguf.gguf_tokenizer import tokenizer_from_gguf
from shardwise.formats.tokenizers.folder_tokenizer import has_tokenizer, tokenizer_from_folder
from shardwise.formats.tokenizers.tokenizer import Tokenizer, backend_errors, check_usable


def load_tokenizer(source: str | Path | Gguf) -> Tokenizer:
    """Load the tokenizer of a `.gguf` file (a path, or already open), a Hugging Face folder, or a
    Shardwise run, which has it in `model/`.

    Raises ValueError if there is none, or none that can be read.
    """
    path = source.path if isinstance(source, Gguf) else Path(source)
    with backend_errors(f"the tokenizer of {path} cannot be used"):
        tokenizer = _from_gguf(source) if isinstance(source, Gguf) else _from_path(path)
        check_usable(tokenizer)
    return tokenizer


def _from_path(path: Path) -> Tokenizer:
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; expected a model folder, a run folder or a .gguf file"
        )
    if path.is_dir():
        is_run = not has_tokenizer(path) and (path / "model").is_dir()
        return tokenizer_from_folder(path / "model" if is_run else path)
    if path.suffix != ".gguf":
        raise ValueError(f"{path} has no tokenizer: it is neither a folder nor a .gguf file")
    return _from_gguf(read_gguf(path))


def _from_gguf(gguf: Gguf) -> Tokenizer:
    try:
        return tokenizer_from_gguf(gguf.metadata)
    except ValueError as error:
        raise ValueError(f"{gguf.path}: {error}") from None
