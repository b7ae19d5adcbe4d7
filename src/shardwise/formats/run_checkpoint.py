"""Reading the checkpoints of training runs.

    checkpoints/step-00000100/
        index.json             step, layout, and per box of state its file, key, start and shape
        index.sha256           the checksum of index.json
        rank-00000.safetensors master weights and moments in fp32, the boxes that this rank owned

State is stored by global parameter name and box, so a run under any layout can read what any other
layout wrote (resharding). A checkpoint is written under a temporary name, with the size and SHA-256
of every file in its index, and renamed when complete, so a killed run still has the one before. A
damaged checkpoint is detected when it is opened, and the one before is used.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.formats.config_files import read_json_object
from shardwise.params import ParamSpec
from shardwise.shards import Box

FORMAT_VERSION = 1
MAX_INDEX_BYTES = 1 << 34
"""An index has a line for each box of state, on thousands of ranks for large models."""
NAME = re.compile(r"step-(\d{8})")
State = Literal["master", "exp_avg", "exp_avg_sq"]
STATES: tuple[State, ...] = ("master", "exp_avg", "exp_avg_sq")
"""The state of every parameter, each in fp32."""
MALFORMED = (KeyError, TypeError, AttributeError, SafetensorError)
"""Exceptions that reading a malformed index or file raises."""


@dataclass(frozen=True)
class Entry:
    """One box of one parameter's state: its file and key there, its global start and shape."""

    name: str
    state: State
    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))


class DamagedCheckpoint(ValueError):
    """A checkpoint that differs from what was written."""


class Checkpoint:
    """An open checkpoint, from which any box of any parameter's state can be read.

    Attributes:
        step: the number of steps that were trained.
        layout: the short form of the layout that wrote it.
        shapes: the global shape of every parameter.
        entries: the stored boxes by parameter and state.

    Raises DamagedCheckpoint if a file is missing, has the wrong size, or does not match its
    checksum. Raises ValueError for an unknown format version and OSError for files that cannot be
    read, neither of which means that it is damaged.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        try:
            if checksum(path / "index.json") != (path / "index.sha256").read_text(encoding="utf-8"):
                raise DamagedCheckpoint(
                    f"checkpoint {path} is damaged: index.json does not match its checksum"
                )
            index = read_index(path)
            if index["format_version"] != FORMAT_VERSION:
                known = f"this version of shardwise reads {FORMAT_VERSION}"
                raise ValueError(
                    f"checkpoint {path} has format version {index['format_version']}; {known}"
                )
            self.step = int(index["step"])
            self.layout = str(index["layout"])
            entries = [
                Entry(**{**e, "start": tuple(e["start"]), "shape": tuple(e["shape"])})
                for e in index["entries"]
            ]
            self.shapes = {name: tuple(shape) for name, shape in index["shapes"].items()}
            for name, record in index["files"].items():
                check_file(path / name, record, verify)
            self._files = {name: safe_open(path / name, "pt") for name in index["files"]}
        except FileNotFoundError as error:
            raise DamagedCheckpoint(
                f"checkpoint {path} is damaged: {Path(str(error.filename)).name} is missing"
            ) from None
        except MALFORMED as error:
            raise DamagedCheckpoint(
                f"checkpoint {path} is damaged: {type(error).__name__} {error}"
            ) from None
        self.path = path
        self.entries: dict[tuple[str, State], list[Entry]] = {}
        for entry in entries:
            self.entries.setdefault((entry.name, entry.state), []).append(entry)

    def read(self, spec: ParamSpec, state: State, box: Box) -> Tensor:
        """Return a box in fp32, assembled from the stored boxes that overlap it."""
        out = torch.empty(box.shape)
        filled = 0
        for entry in self.entries.get((spec.name, state), []):
            span = [
                overlap(*pair)
                for pair in zip(box.start, box.shape, entry.start, entry.shape, strict=True)
            ]
            if any(stop <= start for start, stop in span):
                continue
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(span, box.start, strict=True))
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(span, entry.start, strict=True))
            out[here] = self._files[entry.file].get_slice(entry.key)[there]
            filled += out[here].numel()
        if filled != out.numel():
            raise ValueError(f"checkpoint {self.path} does not store all of {state} of {spec.name}")
        return out

    def check_model(self, specs: Iterable[ParamSpec]) -> None:
        """Raise ValueError, naming a parameter, unless the checkpoint stores exactly `specs`."""
        specs = tuple(specs)
        expected = {(spec.name, state) for spec in specs if not spec.tied_to for state in STATES}
        for fault, keys in (
            ("lacks", expected - self.entries.keys()),
            ("has unknown", self.entries.keys() - expected),
        ):
            if keys:
                name, state = min(keys)
                raise ValueError(
                    f"checkpoint {self.path} {fault} {state} of {name}: it is of another model"
                )
        for spec in specs:
            shape = self.shapes.get(spec.name)
            if not spec.tied_to and shape != spec.shape:
                raise ValueError(
                    f"checkpoint {self.path} stores {spec.name} as {shape}, not {spec.shape}: it "
                    "is of another model"
                )


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a checkpoint. Raises DamagedCheckpoint unless it is a JSON object."""
    try:
        return read_json_object(path / "index.json", MAX_INDEX_BYTES)
    except ValueError as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {error}") from None


def overlap(start_a: int, size_a: int, start_b: int, size_b: int) -> tuple[int, int]:
    """Return [start, stop) of the intersection of two ranges; stop <= start if there is none."""
    return max(start_a, start_b), min(start_a + size_a, start_b + size_b)


def check_file(path: Path, record: dict[str, object], verify: bool) -> None:
    """Raise DamagedCheckpoint unless a file has the size and checksum in its record."""
    size = path.stat().st_size
    if size != record["bytes"]:
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name} has {size} bytes, "
            f"not {record['bytes']}"
        )
    if verify and checksum(path) != record["sha256"]:
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name} does not match its checksum"
        )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_checkpoint(run: Path, warn: Callable[[str], None], verify: bool = True) -> Checkpoint:
    """Open the newest complete checkpoint of a run. `warn` gets a message for each damaged one.

    `verify` compares checksums. Raises ValueError if the run has none.
    """
    for path in reversed(list_checkpoints(run / "checkpoints")):
        try:
            return Checkpoint(path, verify)
        except DamagedCheckpoint as error:
            warn(f"{error}; trying the one before")
    raise ValueError(f"{run} has no complete checkpoint")
