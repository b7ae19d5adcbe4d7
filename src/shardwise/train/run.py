"""A run from its settings to its folder, and on again from there.

RUN/config.toml      the resolved settings
RUN/model/           config.json and tokenizer files, as in a Hugging Face folder
RUN/metrics.jsonl    a line a step
RUN/checkpoints/
"""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from shardwise.atomic import exclusive, written_aside
from shardwise.formats.huggingface.hf_config import to_hugging_face
from shardwise.formats.run_checkpoint import list_checkpoints, newest
from shardwise.formats.tokenizers.tokenizer import load_tokenizer
from shardwise.layout import Layout
from shardwise.parallel.launch import is_first_rank, run_ranks
from shardwise.parallel.offload import check_room
from shardwise.train.checkpoint import remove_partial
from shardwise.train.loop import Outcome, offload_folder, train
from shardwise.train.settings import Settings, to_toml
from shardwise.train.validate import Run, check_run, offloaded_bytes, ranks_here

MADE_FIRST = {"model", "offload", "data.json", ".config.toml.partial"}
"""What the folder of a run that was cut off at its very start may hold."""
FIXED = {("run", "seed"), ("run", "precision"), ("run", "gradients")}


def start_run(
    settings: Settings,
    resume: bool = False,
    warn: Callable[[str], None] = print,
    begin: Callable[[], None] = lambda: None,
) -> Outcome:
    """Check, make the folder, start the ranks, train. Raises ValueError before anything is written
    or started.

    `resume` goes on from the newest whole checkpoint; `warn` is told of damaged ones. `begin` is
    called when nothing is left to refuse.
    """
    run = check_run(settings)
    layout = Layout.parse(settings.run.layout)
    with locked(Path(settings.run.folder)) if is_first_rank() else nullcontext():
        resumed = 0
        if is_first_rank():
            if settings.run.offload == "file":
                check_room(
                    offload_folder(settings),
                    offloaded_bytes(run.config, layout) * ranks_here(layout),
                )
            resumed = prepare_folder(run, resume, warn)
            begin()
        outcome: Outcome = run_ranks(
            train, layout.world_size, run.settings, run.config, run.weights, resumed
        )
    return outcome


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process out of a run's folder; ValueError if one is in it. The folder is
    made if need be."""
    made = not folder.exists()
    in_use = f"{folder} is being trained by another process; choose another run.folder"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(folder, in_use))
        except FileExistsError:
            raise ValueError(
                f"{folder} is not empty and not a run; choose another run.folder"
            ) from None
        except (OSError, UnicodeEncodeError) as error:
            raise ValueError(
                f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}"
            ) from None
        try:
            yield
        finally:
            if made and not any(folder.iterdir()):
                folder.rmdir()


def prepare_folder(run: Run, resume: bool, warn: Callable[[str], None]) -> int:
    """Make the run's folder, or hold a run that goes on against the one there. Returns the step to
    go on from."""
    folder = Path(run.settings.run.folder)
    begun = (folder / "config.toml").is_file()
    if begun and not resume:
        raise ValueError(
            f"{folder} already holds a run; add --resume to go on with it, or choose another run.folder"
        )
    if resume and not begun:
        raise ValueError(f"{folder} holds no run to resume; leave out --resume to start one")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not begun and held - MADE_FIRST:
        raise ValueError(f"{folder} is not empty and not a run; choose another run.folder")
    data = Path(run.settings.data.folder)
    resumed = 0
    if begun:
        remove_partial(folder / "checkpoints")
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
        (folder / "model" / "config.json").write_text(
            json.dumps(to_hugging_face(run.config), indent=2) + "\n"
        )
        shutil.copyfile(data / "data.json", folder / "data.json")
        with written_aside(folder / "config.toml", unique=False) as aside:  # last: makes it a run
            aside.write_text(to_toml(run.settings), encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        raise ValueError(
            f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    return resumed


def check_same_run(folder: Path, run: Run, warn: Callable[[str], None]) -> None:
    """What the weights are and in which order the data comes may not change in the middle of a run;
    other settings may, and are told."""
    try:
        before = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / 'config.toml'} is not valid TOML: {error}") from None
    if (folder / "data.json").read_bytes() != (
        Path(run.settings.data.folder) / "data.json"
    ).read_bytes():
        raise ValueError(
            f"{run.settings.data.folder} is another data set than {folder} was begun with; build that again"
        )
    now = tomllib.loads(to_toml(run.settings))
    for section, key in ((name, key) for name, values in now.items() for key in values):
        table = before.get(section)
        old = table.get(key) if isinstance(table, dict) else None
        new = now[section][key]
        if old == new:
            continue
        if section in ("model", "data") or (section, key) in FIXED:
            raise ValueError(
                f"{folder} was begun with {section}.{key} = {old!r}, not {new!r}; resume it with the same"
            )
        warn(f"{section}.{key} was {old!r} and is {new!r} from here on")
