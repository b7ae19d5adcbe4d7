"""A run from its settings to its folder: everything that can be refused is refused before a rank starts.

RUN/config.toml      the resolved settings
RUN/model/           config.json and tokenizer files, as in a Hugging Face folder
RUN/metrics.jsonl    a line a step
RUN/checkpoints/
"""

import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shardwise.catalogue import find_model, model_path
from shardwise.config import ModelConfig, to_hugging_face
from shardwise.layout import Layout
from shardwise.model.checkpoint import list_checkpoints, newest
from shardwise.model.load import open_weights
from shardwise.model.tokenizer import check_vocabulary, load_tokenizer
from shardwise.parallel.apply import check_trainable
from shardwise.parallel.launch import is_first_rank, joined_world_size, run_ranks
from shardwise.train.data import Batches, TokenFile
from shardwise.train.loop import Outcome, train
from shardwise.train.settings import Settings, shaped, to_toml


@dataclass(frozen=True)
class Run:
    """A run ready to start. `weights` is where its first weights come from; None: drawn from the seed."""

    settings: Settings
    config: ModelConfig
    weights: Path | None


def start_run(
    settings: Settings,
    resume: bool = False,
    warn: Callable[[str], None] = print,
    begin: Callable[[], None] = lambda: None,
) -> Outcome:
    """Check, make the folder, start the ranks, train. Raises ValueError before anything is written or started.

    `resume` goes on from the newest whole checkpoint; `warn` is told of damaged ones. `begin` is called when nothing is
    left to refuse.
    """
    run = check_run(settings)
    resumed = 0
    if is_first_rank():
        resumed = prepare_folder(run, resume, warn)
        begin()
    layout = Layout.parse(settings.run.layout)
    outcome: Outcome = run_ranks(train, layout.world_size, run.settings, run.config, run.weights, resumed)
    return outcome


def check_run(settings: Settings) -> Run:
    """Resolve the model and hold it against layout, data and tokenizer."""
    layout = Layout.parse(settings.run.layout)
    joined = joined_world_size()
    if joined is not None and joined != layout.world_size:
        raise ValueError(f"layout {layout} is for {layout.world_size} ranks, but torchrun started {joined}")
    data = settings.data
    tokens = TokenFile(Path(data.folder), "train")
    tokenizer = load_tokenizer(Path(data.folder))
    found = find_model(settings.model.name)
    config = shaped(found.config, settings.model, tokenizer.vocab_size, found.kind == "count")
    weights = None
    if settings.model.weights == "given":
        if found.kind in ("count", "catalogue"):
            raise ValueError(
                f"model {settings.model.name} names a shape and has no weights; name a folder, hub id or file"
            )
        weights = model_path(found)
        open_weights(weights, config).close()
    check_trainable(layout, config)
    if tokens.vocab_size > config.vocab_size:
        raise ValueError(
            f"{data.folder} was tokenized with {tokens.vocab_size} ids, but the model's vocabulary has "
            f"{config.vocab_size}; build the data with the model's own tokenizer"
        )
    check_vocabulary(tokenizer, config.vocab_size)
    if data.seq_len > config.max_positions:
        raise ValueError(f"data.seq_len {data.seq_len} is longer than the model's {config.max_positions} positions")
    Batches(tokens, data.seq_len, data.global_batch, layout.microbatches, 0, layout.dp, settings.run.seed)
    if settings.run.eval_every:
        TokenFile(Path(data.folder), "held_out").num_samples(data.seq_len)
    if settings.run.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard needs the extra: pip install 'shardwise[tensorboard]'")
    return Run(settings, config, weights)


def prepare_folder(run: Run, resume: bool, warn: Callable[[str], None]) -> int:
    """Make the run's folder, or hold a run that goes on against the one there. Returns the step to go on from."""
    folder = Path(run.settings.run.folder)
    begun = (folder / "config.toml").is_file()
    if begun and not resume:
        raise ValueError(f"{folder} already holds a run; add --resume to go on with it, or choose another run.folder")
    if resume and not begun:
        raise ValueError(f"{folder} holds no run to resume; leave out --resume to start one")
    if not begun and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and not a run; choose another run.folder")
    resumed = 0
    if begun:
        check_same_run(folder, run)
        if list_checkpoints(folder / "checkpoints"):  # else it was cut off before it could save, and starts anew
            resumed = newest(folder, warn).step
    try:
        (folder / "model").mkdir(parents=True, exist_ok=True)
        load_tokenizer(Path(run.settings.data.folder)).save(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(to_hugging_face(run.config), indent=2) + "\n")
        aside = folder / ".config.toml.partial"
        aside.write_text(to_toml(run.settings), encoding="utf-8")
        os.replace(aside, folder / "config.toml")  # last: what has a config.toml is a whole run
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror or error}") from None
    return resumed


def check_same_run(folder: Path, run: Run) -> None:
    """What decides the weights and the order of the data may not change in the middle of a run."""
    before = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    now = tomllib.loads(to_toml(run.settings))
    fixed = [("model", key) for key in now["model"]] + [("data", key) for key in now["data"]] + [("run", "seed")]
    for section, key in fixed:
        old, new = before.get(section, {}).get(key), now[section][key]
        if old != new:
            raise ValueError(f"{folder} was begun with {section}.{key} = {old!r}, not {new!r}; resume it with the same")
