"""Reading checkpoints, by global names and boxes: no file knows the layout that wrote it, so any
layout reads any.

    checkpoints/step-00000100/
        index.json             step, layout, and for every piece of state its file, key, global start and shape
        index.sha256           the checksum of index.json
        rank-00000.safetensors master weights and moments in fp32, what that rank owned

A checkpoint is written aside, with the size and SHA-256 of every file in its index, and renamed
when whole: a kill leaves the one before. A damaged one is noticed when it is opened, and the one
before is taken.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.params import Box, ParamSpec

FORMAT_VERSION = 1
NAME = re.compile(r"step-(\d{8})")
State = Literal["master", "exp_avg", "exp_avg_sq"]
STATES: tuple[State, ...] = ("master", "exp_avg", "exp_avg_sq")
"""What training keeps of every parameter, each in fp32."""


@dataclass(frozen=True)
class Entry:
    """Where one rectangle of one parameter's state lies."""

    name: str
    state: State
    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))


class Damaged(ValueError):
    """A checkpoint that is not as it was written."""


class Checkpoint:
    """An open checkpoint: its step and layout, and any box of any parameter's state.

    Raises Damaged if a file is missing, of the wrong size, or does not match its checksum;
    ValueError for a format that is not known and OSError for what cannot be read, neither of which
    says that anything is wrong with it.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        try:
            if checksum(path / "index.json") != (path / "index.sha256").read_text(encoding="utf-8"):
                raise Damaged(
                    f"checkpoint {path} is damaged: index.json does not match its checksum"
                )
            index = json.loads((path / "index.json").read_text(encoding="utf-8"))
            if index["format_version"] != FORMAT_VERSION:
                known = f"this version reads {FORMAT_VERSION}"
                raise ValueError(
                    f"checkpoint {path} is of format version {index['format_version']}, and {known}"
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
            raise Damaged(
                f"checkpoint {path} is damaged: {Path(str(error.filename)).name} is missing"
            ) from None
        except (
            KeyError,
            TypeError,
            AttributeError,
            UnicodeDecodeError,
            json.JSONDecodeError,
            SafetensorError,
        ) as error:
            raise Damaged(f"checkpoint {path} is damaged: {type(error).__name__} {error}") from None
        self.path = path
        self.entries: dict[tuple[str, State], list[Entry]] = {}
        for entry in entries:
            self.entries.setdefault((entry.name, entry.state), []).append(entry)

    def read(self, spec: ParamSpec, state: State, box: Box) -> Tensor:
        """The box in fp32, put together from the rectangles that overlap it."""
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
            raise ValueError(f"checkpoint {self.path} does not hold all of {state} of {spec.name}")
        return out

    def check_model(self, specs: Iterable[ParamSpec]) -> None:
        """Raise ValueError that names a parameter missing here, or here and not in the model, or of
        another shape."""
        specs = tuple(specs)
        wanted = {(spec.name, state) for spec in specs if spec.tied_to is None for state in STATES}
        for what, odd in (
            ("lacks", wanted - self.entries.keys()),
            ("has unknown", self.entries.keys() - wanted),
        ):
            if odd:
                name, state = min(odd)
                raise ValueError(
                    f"checkpoint {self.path} {what} {state} of {name}: it is of another model"
                )
        for spec in specs:
            if not spec.tied_to and self.shapes.get(spec.name) != spec.shape:
                held = self.shapes.get(spec.name)
                raise ValueError(
                    f"checkpoint {self.path} holds {spec.name} as {held}, not {spec.shape}: it is of another model"
                )


def overlap(start_a: int, size_a: int, start_b: int, size_b: int) -> tuple[int, int]:
    return max(start_a, start_b), min(start_a + size_a, start_b + size_b)


def check_file(path: Path, record: dict[str, object], verify: bool) -> None:
    if path.stat().st_size != record["bytes"]:
        size = path.stat().st_size
        raise Damaged(
            f"checkpoint {path.parent} is damaged: {path.name} has {size} bytes, not {record['bytes']}"
        )
    if verify and checksum(path) != record["sha256"]:
        raise Damaged(
            f"checkpoint {path.parent} is damaged: {path.name} does not match its checksum"
        )


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest(run: Path, warn: Callable[[str], None], verify: bool = True) -> Checkpoint:
    """The newest whole checkpoint of a run; each damaged one is told of. Raises ValueError when
    there is none."""
    for path in reversed(list_checkpoints(run / "checkpoints")):
        try:
            return Checkpoint(path, verify)
        except Damaged as error:
            warn(f"{error}; trying the one before")
    raise ValueError(f"{run} holds no whole checkpoint")
