"""Resolving the settings of a run: its layout, its model and its first weights."""

from dataclasses import replace
from pathlib import Path

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import FoundModel, find_model, model_path
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.run_checkpoint import list_checkpoints
from shardwise.layout import Layout
from shardwise.train.data.corpus import read_corpus
from shardwise.train.settings import ModelSettings, Run, Settings

SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
    "max_positions",
)


def resolve_run(settings: Settings) -> Run:
    """Parse the layout, and find the model and its weights. Raises ValueError if one of them, or
    the data set, is missing; `validate.validate_run` checks that they fit together."""
    layout = Layout.parse(settings.run.layout)
    vocab_size = read_corpus(Path(settings.data.folder)).vocab_size
    found = find_model(settings.model.name)
    is_count = found.kind == "count"
    config = resized(found.config, settings.model, vocab_size, settings.data.seq_len, is_count)
    return Run(settings, layout, config, given_weights(settings.model, found))


def resume_run(settings: Settings) -> Run | None:
    """Return the run in the folder of the settings, as its checkpoints and config.json describe it,
    so that neither base model nor hub is needed; None if it has none yet."""
    folder = Path(settings.run.folder)
    model = folder / "model"
    if not list_checkpoints(folder / "checkpoints") or not (model / "config.json").is_file():
        return None
    layout = Layout.parse(settings.run.layout)
    return Run(settings, layout, read_folder_config(model), None)


def given_weights(settings: ModelSettings, found: FoundModel) -> Path | None:
    if settings.weights == "random":
        return None
    if found.kind in ("count", "catalogue"):
        raise ValueError(
            f"{settings.name!r} is only a shape, without weights; name a folder, hub id or file"
        )
    return model_path(found)


def resized(
    config: ModelConfig,
    settings: ModelSettings,
    tokenizer_vocab_size: int,
    seq_len: int,
    is_count: bool,
) -> ModelConfig:
    """Return the model with the sizes that the settings change. A model named by its number of
    parameters takes the vocabulary of the tokenizer and the sequence length of the training."""
    changed = {name: size for name in SIZES if (size := getattr(settings, name))}
    if changed and settings.weights == "given":
        raise ValueError(
            f"model.{next(iter(changed))} changes the shape, so the given weights do not fit; "
            'use model.weights = "random"'
        )
    if is_count:
        changed = {"vocab_size": tokenizer_vocab_size, "max_positions": seq_len} | changed
    num_heads = changed.get("num_heads", config.num_heads)
    if "num_heads" in changed and "num_kv_heads" not in changed:
        divisors = (n for n in range(1, config.num_kv_heads + 1) if num_heads % n == 0)
        changed["num_kv_heads"] = max(divisors)
    if {"hidden_size", "num_heads"} & changed.keys():
        hidden_size = changed.get("hidden_size", config.hidden_size)
        if hidden_size % num_heads:
            raise ValueError(
                f"model.hidden_size {hidden_size} is not a multiple of {num_heads} heads"
            )
        changed["head_dim"] = hidden_size // num_heads
    if config.windowed_layers and "num_layers" in changed:
        layers = frozenset(range(changed["num_layers"]))
        all_windowed = len(config.windowed_layers) == config.num_layers
        windowed = layers if all_windowed else config.windowed_layers & layers
        return replace(config, **changed, windowed_layers=windowed)
    return replace(config, **changed)
