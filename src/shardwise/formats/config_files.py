"""Configs written by other programs: JSON files and metadata, with every fault in one sentence.

Imports no torch.
"""

import json
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import check_flag
from shardwise.writing.json_text import json_text

MAX_BYTES = 128 << 20
"""The largest text file that is read whole; the largest tokenizer.json have 35 MB."""


@contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Turn errors about the values of a config into a ValueError that begins with `source`."""
    try:
        yield
    except KeyError as missing:
        raise ValueError(
            f"{source}: {missing.args[0]} is missing, so the model's shape is unknown"
        ) from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{source} is malformed: {error}") from None


def read_whole_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises ValueError for another encoding and for a file of
    more than `max_bytes`."""
    num_bytes = file.stat().st_size
    if num_bytes > max_bytes:
        raise ValueError(f"{file} has {num_bytes} bytes, and at most {max_bytes} are supported")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None


def read_json_object(file: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ValueError unless the file holds one, of at most `max_bytes` and a 16th as many values:
    a value of two bytes takes a hundred in memory.
    """
    text = read_whole_text(file, max_bytes)
    if sum(map(text.count, ",:[")) > max_bytes // 16:
        raise ValueError(f"{file} holds more than {max_bytes // 16} values")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, but it holds a {type(content).__name__}")
    return content


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ValueError unless it is valid."""
    text = read_whole_text(file)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from None


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a missing file is an empty object."""
    return read_json_object(file) if file.is_file() else {}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented UTF-8 JSON."""
    file.write_text(json_text(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def get_flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return the boolean under `key`; `default` if the key is absent or null."""
    value = raw.get(key)
    return default if value is None else check_flag(key, value)


def get_object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object under `key`; an empty one if the key is absent or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, not {value!r:.60}")
    return value or {}


@dataclass(frozen=True)
class Fields:
    """The treatment of the fields of one object of a config.

    Attributes:
        read: fields that are obeyed.
        harmless: fields that change no logits, whatever their value.
        only: fields with the values that are supported; null is, too.
    """

    read: frozenset[str]
    harmless: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]

    def check(self, raw: Mapping[str, Any], own: frozenset[str], within: str = "") -> list[str]:
        """Return the names of unknown fields. Raises ValueError for a value that is refused.

        `own` are more fields that are obeyed; `within` is the prefix of names in messages.
        """
        for name, supported in self.only.items():
            value = raw.get(name)
            if value is not None and value not in supported:
                works = " or ".join(json_text(each) for each in supported) or "null"
                raise ValueError(
                    f"{within}{name} = {json_text(value):.60} is not supported; {works} works"
                )
        known = self.read | self.harmless | self.only.keys() | own
        is_on = (name for name, value in raw.items() if value is not None and value is not False)
        return [f"{within}{name}" for name in is_on if name not in known]


def warn_unknown(names: Sequence[str], source: str) -> None:
    """Warn about fields that are not known, if there are any."""
    if names:
        warnings.warn(
            f"{source} has fields that are not known and are ignored: {', '.join(names)}",
            stacklevel=3,
        )
