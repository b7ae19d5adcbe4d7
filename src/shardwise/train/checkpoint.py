"""Writing checkpoints, and loading them into a store of any layout. `formats/run_checkpoint.py`
describes and reads the files."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from shardwise.formats.run_checkpoint import (
    FORMAT_VERSION,
    STATES,
    Checkpoint,
    Entry,
    State,
    checksum,
    list_checkpoints,
)
from shardwise.formats.safetensors import write_safetensors
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.state_store import StateStore
from shardwise.params import ParamSpec
from shardwise.shards import Box, is_first_holder
from shardwise.writing.atomic import partial_path, replace_durably, sync
from shardwise.writing.json_text import json_text


def save_checkpoint(
    target: Path, store: StateStore, mesh: Mesh, specs: Iterable[ParamSpec], step: int
) -> None:
    """Write the state after `step` steps to the folder `target`. Every rank calls it; replicas
    write nothing.

    Raises OSError on every rank if one cannot write; the previous checkpoint stays as it was.
    """
    aside = partial_path(target)
    error: OSError | None = None
    try:
        if mesh.rank == 0:
            error = attempt(lambda: make_empty(aside))
        raise_together(mesh, error)
        error = attempt(lambda: write_rank(aside, store, mesh))
        raise_together(mesh, error)
        if mesh.rank == 0:
            error = attempt(lambda: publish(aside, target, str(mesh.layout), specs, step))
        raise_together(mesh, error)
    except OSError:  # every rank has stopped writing
        if mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_rank(folder: Path, store: StateStore, mesh: Mesh) -> None:
    """Write what this rank is the first to own, and next to it a record of its entries with the
    checksum of the file."""
    name = f"rank-{mesh.rank:05d}.safetensors"
    shapes = {}
    entries = []
    for state, spec, box, view in owned(store, mesh):
        key = f"{state}/{spec.name}/{box.part}/{','.join(map(str, box.start))}"
        shapes[key] = view.dtype, box.shape
        entries.append(asdict(Entry(spec.name, state, name, key, box.start, box.shape)))
    if not entries:
        return
    path = folder / name
    sha256 = write_safetensors(path, shapes, (view for *_, view in owned(store, mesh)))
    record = {"entries": entries, "bytes": path.stat().st_size, "sha256": sha256}
    (folder / f"{name}.json").write_text(json_text(record))


def owned(store: StateStore, mesh: Mesh) -> Iterator[tuple[State, ParamSpec, Box, Tensor]]:
    """Yield the states that this rank owns and no lower rank holds. Offloaded memory behind a view
    may be released once the next one is taken."""
    for state in STATES:
        for spec, box, view in store.owned(state):
            if is_first_holder(spec, spec.part(box.part), mesh.layout, mesh.coord):
                yield state, spec, box, view


def publish(aside: Path, target: Path, layout: str, specs: Iterable[ParamSpec], step: int) -> None:
    """Join the records of the ranks into one index, and give the checkpoint its name."""
    files = {}
    entries = []
    for path in sorted(aside.glob("rank-*.safetensors.json")):
        record = json.loads(path.read_text())
        files[path.name.removesuffix(".json")] = {
            "bytes": record["bytes"],
            "sha256": record["sha256"],
        }
        entries += record["entries"]
        path.unlink()
    shapes = {spec.name: spec.shape for spec in specs if spec.tied_to is None}
    index = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "layout": layout,
        "shapes": shapes,
        "files": files,
        "entries": entries,
    }
    (aside / "index.json").write_text(json_text(index))
    (aside / "index.sha256").write_text(checksum(aside / "index.json"))
    for path in (aside / "index.json", aside / "index.sha256"):
        sync(path)
    replace_durably(aside, target)


def attempt(work: Callable[[], None]) -> OSError | None:
    """Run `work` and return its OSError, if any, so that all ranks can raise together."""
    try:
        work()
    except OSError as error:
        return error
    return None


def raise_together(mesh: Mesh, error: OSError | None) -> None:
    """Raise OSError on every rank if one has an error, so that no rank waits for one that
    failed."""
    failed = mesh.world.gather(0.0 if error is None else float(error.errno or errno.EIO))
    if error is not None:
        raise error
    for rank, number in enumerate(failed):
        if number:
            reason = os.strerror(int(number))
            raise OSError(
                int(number), f"rank {rank} could not write its part of the checkpoint: {reason}"
            )


def remove_old(latest: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to `latest`. Later ones, which are damaged
    since the run did not resume from them, are not counted and not removed."""
    usable = [path for path in list_checkpoints(latest.parent) if path.name <= latest.name]
    for path in usable[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove the checkpoints that were incomplete when the run was killed."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def load_state(checkpoint: Checkpoint, store: StateStore, specs: Iterable[ParamSpec]) -> None:
    """Fill the store from a checkpoint, which any layout may have written."""
    checkpoint.check_model(specs)
    for state in STATES:
        for spec, box, view in store.owned(state):
            view.copy_(checkpoint.read(spec, state, box))
    store.num_steps = checkpoint.step
    store.refresh()
