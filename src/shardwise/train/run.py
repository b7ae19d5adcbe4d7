"""A run from its settings to its folder: everything that can be refused is refused before a rank starts.

RUN/config.toml      the resolved settings
RUN/model/           config.json and tokenizer files, as in a Hugging Face folder
RUN/metrics.jsonl    a line a step
RUN/checkpoints/
"""

import fcntl
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch

from shardwise.catalogue import find_model, model_path
from shardwise.config import ModelConfig, from_hugging_face, to_hugging_face
from shardwise.layout import Layout
from shardwise.model.checkpoint import list_checkpoints, newest
from shardwise.model.load import open_weights
from shardwise.model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from shardwise.parallel.apply import check_trainable
from shardwise.parallel.launch import device_of, is_first_rank, joined_world_size, local_world_size, run_ranks
from shardwise.plan.memory import training_ledgers
from shardwise.train.data import Batches, TokenFile
from shardwise.train.loop import Outcome, train
from shardwise.train.settings import Settings, shaped, to_toml

MADE_FIRST = {"model", "data.json", ".config.toml.partial"}
"""What the folder of a run that was cut off at its very start may hold."""
FIXED = {("run", "seed"), ("run", "precision"), ("run", "gradients")}


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
    layout = Layout.parse(settings.run.layout)
    with locked(Path(settings.run.folder)) if is_first_rank() else nullcontext():
        resumed = 0
        if is_first_rank():
            resumed = prepare_folder(run, resume, warn)
            begin()
        outcome: Outcome = run_ranks(train, layout.world_size, run.settings, run.config, run.weights, resumed)
    return outcome


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process out of a run's folder; ValueError if one is in it. The folder is made if need be."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except FileExistsError:
        raise ValueError(f"{folder} is not empty and not a run; choose another run.folder") from None
    except (OSError, UnicodeEncodeError) as error:
        raise ValueError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"{folder} is being trained by another process; choose another run.folder") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        os.close(lock)


def check_run(settings: Settings) -> Run:
    """Resolve the model and hold it against layout, data and tokenizer."""
    layout = Layout.parse(settings.run.layout)
    joined = joined_world_size()
    if joined is not None and joined != layout.world_size:
        raise ValueError(
            f"torchrun started {joined} ranks, but layout {layout} is for {layout.world_size}; "
            f"--layout dp{joined} works"
        )
    data = settings.data
    tokens = TokenFile(Path(data.folder), "train")
    tokenizer = load_tokenizer(Path(data.folder))
    found = find_model(settings.model.name)
    config = shaped(found.config, settings.model, tokenizer.vocab_size, data.seq_len, found.kind == "count")
    weights = None
    if settings.model.weights == "given":
        if found.kind in ("count", "catalogue"):
            raise ValueError(
                f"model {settings.model.name} names a shape and has no weights; name a folder, hub id or file"
            )
        weights = model_path(found)
        open_weights(weights, config).close()
        check_same_tokenizer(weights, tokenizer, data.folder)
    check_expressible(config)
    check_trainable(layout, config)
    check_memory(config, layout, settings)
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
        check_held_out(settings)
    if settings.run.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard needs the extra: pip install 'shardwise[tensorboard]'")
    return Run(settings, config, weights)


def check_expressible(config: ModelConfig) -> None:
    """What is trained must be what its config.json says, or nothing could read it back."""
    known = from_hugging_face(to_hugging_face(config))
    for field in fields(config):
        ours, theirs = getattr(config, field.name), getattr(known, field.name)
        if ours != theirs:
            raise ValueError(f"a model of the {config.family} family has no {field.name} of its own: {theirs!r} works")


def check_same_tokenizer(weights: Path, tokenizer: Tokenizer, data_folder: str) -> None:
    """Given weights mean nothing to ids of another vocabulary."""
    try:
        own = load_tokenizer(weights)
    except ValueError:
        return  # none to compare with
    if own.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ValueError(
            f"{data_folder} was tokenized with another vocabulary than that of {weights}; "
            f"build it with --tokenizer {weights}"
        )


def check_held_out(settings: Settings) -> None:
    try:
        TokenFile(Path(settings.data.folder), "held_out").num_samples(settings.data.seq_len)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; without evaluation (run.eval_every=0) it trains as it is"
        ) from None


def check_memory(config: ModelConfig, layout: Layout, settings: Settings) -> None:
    """Refuse a run whose states alone exceed the memory, by the planner's figures, before it exceeds it."""
    needed = max(stage.total_bytes for stage in training_ledgers(config, layout, settings.run.precision))
    ranks = (local_world_size() or layout.world_size) if device_of(0, layout.world_size).type == "cpu" else 1
    held = memory_bytes(device_of(0, layout.world_size))
    if needed * ranks > held:
        raise ValueError(
            f"the parameters, gradients and optimizer of {layout} take {needed / 1e9:,.3g} GB a rank, on {ranks} "
            f"rank{'s' if ranks > 1 else ''} more than the {held / 1e9:,.3g} GB there are; "
            "`shardwise plan` tells what would fit"
        )
    sequence_bytes = 3 * 8 * settings.data.seq_len  # ids, targets and positions
    if settings.data.global_batch * sequence_bytes > held:
        works = held // sequence_bytes // layout.data_size * layout.data_size
        raise ValueError(f"a global batch of {settings.data.global_batch} sequences exceeds the memory; {works} do not")


def memory_bytes(device: torch.device) -> int:
    """All the memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def prepare_folder(run: Run, resume: bool, warn: Callable[[str], None]) -> int:
    """Make the run's folder, or hold a run that goes on against the one there. Returns the step to go on from."""
    folder = Path(run.settings.run.folder)
    begun = (folder / "config.toml").is_file()
    if begun and not resume:
        raise ValueError(f"{folder} already holds a run; add --resume to go on with it, or choose another run.folder")
    if resume and not begun:
        raise ValueError(f"{folder} holds no run to resume; leave out --resume to start one")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not begun and held - MADE_FIRST:
        raise ValueError(f"{folder} is not empty and not a run; choose another run.folder")
    data = Path(run.settings.data.folder)
    resumed = 0
    if begun:
        check_same_run(folder, run, warn)
        if list_checkpoints(folder / "checkpoints"):
            resumed = newest(folder, warn).step
        else:
            warn(f"{folder} holds no checkpoint, so it starts anew")
        if resumed >= run.settings.run.steps:
            return resumed  # nothing to do, and nothing to write down
    try:
        (folder / "model").mkdir(parents=True, exist_ok=True)
        load_tokenizer(data).save(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(to_hugging_face(run.config), indent=2) + "\n")
        shutil.copyfile(data / "data.json", folder / "data.json")
        aside = folder / ".config.toml.partial"
        aside.write_text(to_toml(run.settings), encoding="utf-8")
        os.replace(aside, folder / "config.toml")  # last: what has a config.toml is a whole run
    except (OSError, UnicodeEncodeError) as error:
        raise ValueError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return resumed


def check_same_run(folder: Path, run: Run, warn: Callable[[str], None]) -> None:
    """What the weights are and in which order the data comes may not change in the middle of a run; other settings may,
    and are told."""
    try:
        before = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / 'config.toml'} is not valid TOML: {error}") from None
    if (folder / "data.json").read_bytes() != (Path(run.settings.data.folder) / "data.json").read_bytes():
        raise ValueError(
            f"{run.settings.data.folder} is another data set than {folder} was begun with; build that again"
        )
    now = tomllib.loads(to_toml(run.settings))
    for section, key in ((name, key) for name, values in now.items() for key in values):
        table = before.get(section)
        old, new = table.get(key) if isinstance(table, dict) else None, now[section][key]
        if old == new:
            continue
        if section in ("model", "data") or (section, key) in FIXED:
            raise ValueError(f"{folder} was begun with {section}.{key} = {old!r}, not {new!r}; resume it with the same")
        warn(f"{section}.{key} was {old!r} and is {new!r} from here on")
