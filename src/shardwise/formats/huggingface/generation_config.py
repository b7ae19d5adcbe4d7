"""Defaults of sampling that a model ships in `generation_config.json`."""

from pathlib import Path

from shardwise.formats.config_files import read_optional_json
from shardwise.formats.gguf.gguf_file import Gguf
from shardwise.formats.model_source import ModelSource

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The fields that transformers and `SamplingParams` share."""


def read_sampling_defaults(source: ModelSource) -> dict[str, float]:
    """Return the sampling fields of the model's `generation_config.json`; a GGUF file has none.

    Raises ValueError for a field that is not a number.
    """
    if isinstance(source, Gguf) or not Path(source).is_dir():
        return {}
    folder = Path(source)
    is_run = not (folder / "config.json").is_file()
    file = (folder / "model" if is_run else folder) / "generation_config.json"
    content = read_optional_json(file)
    defaults = {}
    for name in SAMPLING_FIELDS:
        value = content.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{file}: {name} is {value!r:.40}, but must be a number")
        defaults[name] = value
    return defaults
