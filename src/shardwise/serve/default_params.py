"""Parameters of sampling for requests that leave them out. Imports no torch."""

from shardwise.formats.huggingface.generation_config import read_sampling_defaults
from shardwise.formats.model_source import ModelSource, source_path
from shardwise.serve.request import SamplingParams


def default_params(source: ModelSource, generation_config: str) -> SamplingParams:
    """Return the sampling parameters of the model's `generation_config.json`, unless
    `generation_config` is "none"; fields that it does not have keep their defaults.

    Raises ValueError for values out of range.
    """
    if generation_config == "none":
        return SamplingParams()
    given = read_sampling_defaults(source)
    try:
        return SamplingParams(**given)  # type: ignore[arg-type]  # checked here
    except ValueError as error:
        raise ValueError(
            f"{source_path(source)}, generation_config.json: {error} --generation-config none "
            "ignores it"
        ) from None
