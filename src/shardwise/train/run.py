"""The folder of a run, and starting or resuming one.

RUN/config.toml      the resolved settings
RUN/model/           config.json and tokenizer files, as in a Hugging Face folder
RUN/metrics.jsonl    one line per step
RUN/checkpoints/
"""

import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from shardwise.formats.config_files import read_toml
from shardwise.formats.huggingface.hf_config import to_hugging_face
from shardwise.formats.run_checkpoint import list_checkpoints, newest_checkpoint
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.parallel.launch import is_first_rank, run_ranks
from shardwise.parallel.offload import check_space
from shardwise.train.checkpoint import remove_partial
from shardwise.train.loop import Outcome
from shardwise.train.rank import offload_folder, train
from shardwise.train.settings import Run, Settings, to_toml
from shardwise.train.validate import offloaded_bytes, ranks_here, validated_run
from shardwise.writing.atomic import exclusive, partial_path, written_aside
from shardwise.writing.json_text import json_text

SETTINGS_FILE = "config.toml"
WRITTEN_FIRST = {"model", "offload", "data.json", partial_path(Path(SETTINGS_FILE)).name}
"""Names in the folder of a run that was killed before it wrote its settings."""
FIXED = {("run", "seed"), ("run", "precision"), ("run", "gradients")}
"""Settings that cannot change when a run resumes, in addition to those of model and data."""
SAME_WHEREVER = {("run", "folder"), ("data", "folder")}
"""Folders that may move: that of the run, and that of the data, which checksums compare."""
PATHS = {("model", "name")}
"""Settings that may be a path, relative in the settings of earlier versions."""


def start_run(
    settings: Settings,
    resume: bool = False,
    warn: Callable[[str], None] = print,
    begin: Callable[[Run], None] = lambda run: None,
) -> Outcome:
    """Validate the settings, prepare the folder, start the ranks and train.

    With `resume` the run continues from its newest complete checkpoint; `warn` receives a line for
    each damaged one. `begin` is called with the run once nothing is left to refuse. Raises
    ValueError before anything is written or started.
    """
    run = validated_run(settings, resume)
    with locked(Path(settings.run.folder)) if is_first_rank() else nullcontext():
        step = 0
        if is_first_rank():
            if settings.run.offload == "file":
                num_bytes = offloaded_bytes(run.config, run.layout) * ranks_here(run.layout)
                check_space(offload_folder(settings), num_bytes)
            step = prepare_folder(run, resume, warn)
            begin(run)
        outcome: Outcome = run_ranks(train, run.layout.world_size, run, step)
    return outcome


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, which is created if need be. Raises ValueError if another process
    is training in it, or if it cannot be written."""
    is_new = not folder.exists()
    in_use = f"{folder} is being trained by another process; choose another run.folder"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(folder, in_use))
        except FileExistsError:
            raise not_a_run(folder) from None
        except (OSError, UnicodeEncodeError) as error:
            raise not_writable(folder, error) from None
        try:
            yield
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def not_a_run(folder: Path) -> ValueError:
    return ValueError(f"{folder} is not empty and not a run; choose another run.folder")


def not_writable(folder: Path, error: OSError | UnicodeEncodeError) -> ValueError:
    return ValueError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}")


def prepare_folder(run: Run, resume: bool, warn: Callable[[str], None]) -> int:
    """Create the folder of a run, or update that of a run to resume, and return the step to start
    from."""
    folder = Path(run.settings.run.folder)
    check_folder(folder, resume)
    step = resume_step(folder, run, warn) if resume else 0
    if step < run.settings.run.steps:
        write_run_folder(folder, run)
    return step


def check_folder(folder: Path, resume: bool) -> None:
    """Raise ValueError unless there is a run to resume, or a new run can use the folder."""
    is_run = (folder / SETTINGS_FILE).is_file()
    if is_run and not resume:
        raise ValueError(
            f"{folder} already holds a run; resume it with --resume, or choose another run.folder"
        )
    if resume and not is_run:
        raise ValueError(f"{folder} holds no run to resume; leave out --resume to start one")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not is_run and names - WRITTEN_FIRST:
        raise not_a_run(folder)


def resume_step(folder: Path, run: Run, warn: Callable[[str], None]) -> int:
    """Return the step of the newest complete checkpoint, 0 without one. Raises ValueError if the
    settings do not continue the run in `folder`."""
    remove_partial(folder / "checkpoints")
    check_same_run(folder, run, warn)
    if not list_checkpoints(folder / "checkpoints"):
        warn(f"{folder} holds no checkpoint, so it restarts from step 0")
        return 0
    return newest_checkpoint(folder, warn).step


def write_run_folder(folder: Path, run: Run) -> None:
    """Write what describes a run. The settings come last: a folder that has them is complete."""
    data = Path(run.settings.data.folder)
    try:
        (folder / "model").mkdir(parents=True, exist_ok=True)
        load_tokenizer(data).save(folder / "model")
        config = json_text(to_hugging_face(run.config), indent=2) + "\n"
        (folder / "model" / "config.json").write_text(config)
        shutil.copyfile(data / "data.json", folder / "data.json")
        with written_aside(folder / SETTINGS_FILE, unique=False) as aside:
            aside.write_text(to_toml(with_absolute_paths(run.settings)), encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        raise not_writable(folder, error) from None


def with_absolute_paths(settings: Settings) -> Settings:
    """Return settings that mean the same in any working directory."""
    data = replace(settings.data, folder=absolute(settings.data.folder))
    model = settings.model
    if Path(model.name).exists():
        model = replace(model, name=absolute(model.name))
    return replace(settings, data=data, model=model)


def absolute(path: str) -> str:
    return str(Path(path).resolve())


def check_same_run(folder: Path, run: Run, warn: Callable[[str], None]) -> None:
    """Raise ValueError if the settings change what the weights are or the order of the data. `warn`
    receives a line for every other change."""
    path = folder / SETTINGS_FILE
    before = read_toml(path)
    data = Path(run.settings.data.folder)
    if (folder / "data.json").read_bytes() != (data / "data.json").read_bytes():
        raise ValueError(
            f"{data} is not the data set that {folder} started with; build the same one again, or "
            "name where it is with --set data.folder=DIR"
        )
    now = tomllib.loads(to_toml(with_absolute_paths(run.settings)))
    for section, key in ((name, key) for name, values in now.items() for key in values):
        table = before.get(section)
        old = table.get(key) if isinstance(table, dict) else None
        new = now[section][key]
        if old == new or (section, key) in SAME_WHEREVER:
            continue
        if (section, key) in PATHS and isinstance(old, str) and absolute(old) == new:
            continue
        if section in ("model", "data") or (section, key) in FIXED:
            raise ValueError(
                f"{folder} started with {section}.{key} = {old!r}, not {new!r}; resume it with the "
                "same value"
            )
        warn(f"{section}.{key} changed from {old!r} to {new!r}")
