"""Writing checkpoints and resuming from them; `model/checkpoint.py` says what one holds and reads it."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwise.model.checkpoint import FORMAT_VERSION, Checkpoint, Entry, checksum, list_checkpoints
from shardwise.model.folder import share_mode
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.zero import Store
from shardwise.params import ParamSpec, boxes


def save_checkpoint(target: Path, store: Store, mesh: Mesh, specs: Iterable[ParamSpec], step: int) -> None:
    """Write the state after `step` steps to the folder `target`. Every rank calls it; replicas write nothing.

    Raises OSError, on every rank, when a rank cannot write: the checkpoint before stays as it was.
    """
    aside = target.parent / f".{target.name}.partial"
    error: OSError | None = None
    if mesh.rank == 0:
        error = attempt(lambda: make_empty(aside))
    raise_together(mesh, error)
    if mesh.replicate.rank == 0:
        error = attempt(lambda: write_rank(aside, store, mesh, specs))
    raise_together(mesh, error)
    if mesh.rank == 0:
        error = attempt(lambda: publish(aside, target, str(mesh.layout), specs, step))
    raise_together(mesh, error)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_rank(folder: Path, store: Store, mesh: Mesh, specs: Iterable[ParamSpec]) -> None:
    """This rank's tensors and, beside them, their entries with the checksum."""
    name = f"rank-{mesh.rank:05d}.safetensors"
    by_name = {spec.name: spec for spec in specs}
    tensors, entries = {}, []
    for parameter, state, local in store.state():
        for box in boxes(by_name[parameter], mesh.layout, mesh.coord):
            key = f"{state}/{parameter}/{box.part}"
            tensors[key] = local[box.local_slices].contiguous()
            entries.append(asdict(Entry(parameter, state, name, key, box.start, box.shape)))
    path = folder / name
    save_file(tensors, path)
    share_mode(path)
    record = {"entries": entries, "bytes": path.stat().st_size, "sha256": checksum(path)}
    (folder / f"{name}.json").write_text(json.dumps(record))


def publish(aside: Path, target: Path, layout: str, specs: Iterable[ParamSpec], step: int) -> None:
    """Join the ranks' records into one index and give the checkpoint its name."""
    files, entries = {}, []
    for path in sorted(aside.glob("rank-*.safetensors.json")):
        record = json.loads(path.read_text())
        files[path.name.removesuffix(".json")] = {"bytes": record["bytes"], "sha256": record["sha256"]}
        entries += record["entries"]
        path.unlink()
    shapes = {spec.name: spec.shape for spec in specs if spec.tied_to is None}
    index = {"format_version": FORMAT_VERSION, "step": step, "layout": layout, "shapes": shapes, "files": files,
             "entries": entries}  # fmt: skip
    (aside / "index.json").write_text(json.dumps(index))
    (aside / "index.sha256").write_text(checksum(aside / "index.json"))
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)


def attempt(work: Callable[[], None]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    except SafetensorError as error:  # it tells the number of a system error in its text alone
        number = re.search(r"os error (\d+)", str(error))
        return OSError(int(number[1]), str(error)) if number else OSError(str(error))
    return None


def raise_together(mesh: Mesh, error: OSError | None) -> None:
    """No rank goes on to wait for one that failed."""
    failed = mesh.world.gather(0.0 if error is None else float(error.errno or errno.EIO))
    if error is not None:
        raise error
    for rank, number in enumerate(failed):
        if number:
            why = os.strerror(int(number))
            raise OSError(int(number), f"rank {rank} could not write its part of the checkpoint: {why}")


def remove_old(latest: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to `latest`, and what a kill left half written.

    Later ones, which the run could not go on from, push out none and are left to whoever can mend them.
    """
    for partial in latest.parent.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for path in [path for path in list_checkpoints(latest.parent) if path.name <= latest.name][:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def load_state(checkpoint: Checkpoint, store: Store, mesh: Mesh, specs: Iterable[ParamSpec]) -> None:
    """Fill the store from a checkpoint of any layout."""
    by_name = {spec.name: spec for spec in specs}
    checkpoint.check_model(by_name.values())
    for name, state, local in store.state():
        for box in boxes(by_name[name], mesh.layout, mesh.coord):
            local[box.local_slices] = checkpoint.read(by_name[name], state, box).to(local.device)
    store.num_steps = checkpoint.step
    store.refresh()
