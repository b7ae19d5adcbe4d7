"""Reading documents from files: plain text, JSON lines and Parquet with texts or conversations, and
Python's standard library as text that every machine has.

Documents come in chunks of about a million characters, so that memory stays bounded however long a
document is.
"""

import codecs
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from shardwise.writing.json_text import json_text

CHUNK_CHARACTERS = 1 << 20
TEXT = "text"
MESSAGES = "messages"
"""The fields that are read where none is named: a text, or else a conversation."""

READ_COMPRESSED = (".gz", ".zst")
COMPRESSED = (".bz2", ".xz", ".zip", ".lz4")
"""The suffixes of compressed files that are read, and of those that are not."""

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]
"""render(messages): the text of a conversation in a model's chat template."""

COMPILED = frozenset({"__pycache__"})
NOT_LIBRARY = COMPILED | {
    *("site-packages", "dist-packages", "lib-dynload", "ensurepip"),  # other people's code
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "__phello__"),  # tests, programs
    *("encodings", "pydoc_data"),  # tables and generated text
}


class TextChunk(NamedTuple):
    """A document or a part of one, and the number of source bytes read for it. `is_chat`: it is a
    rendered conversation."""

    text: str
    ends_document: bool
    source_bytes: int
    is_chat: bool = False


def fail(bad_row: ValueError) -> None:
    raise bad_row


@dataclass(frozen=True)
class Reading:
    """The way in which documents are read.

    Attributes:
        render: returns a list of messages as text.
        field: what holds a document in JSON and .parquet; None is "text", or else "messages".
        on_bad: called with an error that names a row (line, item) that holds no document; where it
            returns, the row is left out.
    """

    render: Render
    field: str | None = None
    on_bad: Callable[[ValueError], None] = fail


def source_files(source: Path | Sequence[Path]) -> list[Path]:
    """Return the files of a source in reading order. Raises ValueError if one is missing, or if
    there are none."""
    roots = [source] if isinstance(source, Path) else list(source)
    for root in roots:
        if not root.exists():
            raise ValueError(f"{root} does not exist.")
    files = [file for root in roots for file in (text_files(root) if root.is_dir() else [root])]
    if not files:
        name = source if isinstance(source, Path) else "The list of source files"
        raise ValueError(f"{name} holds no files to read.")
    return files


def text_files(root: Path) -> list[Path]:
    """Return the files under `root` without binary ones: folders of text may hold pictures too."""
    return [file for file in walk(root) if file.is_file() and not is_binary(file)]


def is_binary(path: Path) -> bool:
    """Return whether a file has none of the known formats and a zero byte near its start."""
    if format_of(path) in READERS or path.suffix.lower() in READ_COMPRESSED:
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


def walk(root: Path, excluded: frozenset[str] = COMPILED) -> list[Path]:
    """Return the files under `root`, sorted by the parts of their paths, without hidden files and
    excluded folders. Linked folders are walked once, after all others; broken links are returned.
    """

    def fail_to_list(error: OSError) -> None:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}.")

    files = []
    walked = set()
    roots = [root]
    while roots:
        for folder, folders, names in os.walk(roots.pop(0), onerror=fail_to_list):
            identity = os.path.realpath(folder)
            if identity in walked:
                folders.clear()
                continue
            walked.add(identity)
            seen = [Path(folder, name) for name in sorted(folders) if not name.startswith(".")]
            seen = [path for path in seen if path.name not in excluded]
            roots += [path for path in seen if path.is_symlink()]
            folders[:] = [path.name for path in seen if not path.is_symlink()]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.parts)


def read_file(path: Path, reading: Reading) -> Iterator[TextChunk]:
    """Yield the documents of one file, which may be compressed (.gz, .zst).

    Raises ValueError for a file that cannot be read; rows of it go to `reading.on_bad`.
    """
    if path.suffix.lower() in COMPRESSED:
        raise ValueError(
            f"{path} is compressed in a way that is not read; decompress it, or use .gz or .zst."
        )
    reader = READERS.get(format_of(path))
    return reader(path, reading) if reader else read_text(path)


def format_of(path: Path) -> str:
    """Return the lower-case suffix of a file, or that before .gz or .zst."""
    is_compressed = path.suffix.lower() in READ_COMPRESSED
    return Path(path.stem if is_compressed else path.name).suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed if it ends in .gz or .zst. Raises ValueError for damaged ones."""
    suffix = path.suffix.lower()
    if suffix not in READ_COMPRESSED:
        with path.open("rb") as plain:
            yield plain
        return
    open_compressed, damage = zstd_opener(path) if suffix == ".zst" else (gzip.open, zlib.error)
    try:
        with open_compressed(path, "rb") as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, EOFError, damage) as error:
        kind = "Zstandard" if suffix == ".zst" else "gzip"
        raise ValueError(f"{path} is not a complete {kind} file: {error}.") from error


def zstd_opener(path: Path) -> tuple[Callable[..., Any], type[Exception]]:
    """Return the function that opens a Zstandard file, and the error of damaged ones."""
    try:
        from backports import zstd
    except ImportError as error:
        raise ValueError(
            f"Reading {path} needs an extra: in the clone, pip install '.[zstd]'."
        ) from error
    return zstd.open, zstd.ZstdError


def read_text(path: Path) -> Iterator[TextChunk]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    offset_bytes = reported_bytes = 0
    with open_bytes(path) as file:
        while True:
            chunk = file.read(CHUNK_CHARACTERS)
            pending_bytes = len(decoder.getstate()[0])
            try:
                text += decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = offset_bytes - pending_bytes + error.start
                raise ValueError(
                    f"{path} is not UTF-8 text (byte {position}); convert it or exclude it."
                ) from error
            offset_bytes += len(chunk)
            if not chunk:
                yield TextChunk(text, True, offset_bytes - reported_bytes)
                return
            if len(text) >= CHUNK_CHARACTERS:
                end = break_point(text, 0, len(text))
                yield TextChunk(text[:end], False, offset_bytes - reported_bytes)
                reported_bytes = offset_bytes
                text = text[end:]


def read_json(path: Path, reading: Reading) -> Iterator[TextChunk]:
    """Yield the documents of a JSON list of objects, or of JSON lines under the name .json.

    Without a field a file whose first object has no document is itself one, such as the settings of
    a program among its sources.
    """
    with open_bytes(path) as file:
        first = file.readline().removeprefix(codecs.BOM_UTF8)
        is_list = first.lstrip().startswith(b"[")
        content = parsed_json(first + file.read() if is_list else first)
    if is_list and isinstance(content, list) and (reading.field or has_document(content[:1])):
        for number, record in enumerate(content, 1):
            yield from read_record(record, 0, f"{path}, item {number}", reading)
    elif not is_list and (reading.field or has_document([content])):
        yield from read_jsonl(path, reading)
    elif reading.field:
        raise ValueError(f"{path} is neither a JSON list of objects nor JSON lines.")
    else:
        yield from read_text(path)


def parsed_json(content: bytes) -> object:
    """Return the value of JSON, or None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def has_document(records: Sequence[object]) -> bool:
    """Return whether the first record has a field that is read where none is named."""
    first = records[0] if records else None
    return isinstance(first, dict) and default_field(first) in first


def read_jsonl(path: Path, reading: Reading) -> Iterator[TextChunk]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                record = parsed_line(line, number, where)
            except ValueError as error:
                reading.on_bad(error)
                continue
            if record is not None:
                yield from read_record(record, len(line), where, reading)


def parsed_line(line: bytes, number: int, where: str) -> object:
    """Return the value of a JSON line, None for an empty one. Raises ValueError, naming `where`."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text; convert the file or remove the line."
        ) from error
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    return [] if record is None else record  # null, which is no object either


def read_record(
    record: object, num_bytes: int, where: str, reading: Reading
) -> Iterator[TextChunk]:
    """Yield the document in a field of a JSON object."""
    try:
        if not isinstance(record, dict):
            raise ValueError(
                f'{where} is not a JSON object; each must look like {{"{reading.field or TEXT}": '
                '"..."}.'
            )
        name = reading.field or default_field(record)
        if name not in record:
            raise ValueError(f'{where} has no field "{name}", only {names_of(record)}.')
    except ValueError as error:
        reading.on_bad(error)
        return
    yield from read_value(record[name], num_bytes, f'The field "{name}" of {where}', reading)


def read_value(value: object, num_bytes: int, place: str, reading: Reading) -> Iterator[TextChunk]:
    """Yield the document that is a text or a list of messages; `place` names it in errors."""
    try:
        text = render_messages(value, reading.render, place) if isinstance(value, list) else value
        valid = valid_text(text, place)
    except ValueError as error:
        reading.on_bad(error)
        return
    yield from text_chunks(valid, num_bytes, is_chat=isinstance(value, list))


def read_parquet(path: Path, reading: Reading) -> Iterator[TextChunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"Reading {path} needs an extra: in the clone, pip install '.[parquet]'."
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            name = reading.field or default_field(columns)
            if name not in columns:
                raise ValueError(f'{path} has no column "{name}", only {names_of(columns)}.')
            row = 0
            row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=[name]):
                for value in batch.column(0).to_pylist():
                    place = f'The column "{name}" of {path}, row {row},'
                    yield from read_value(value, row_bytes, place, reading)
                    row += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}.") from error


def default_field(names: Mapping[str, object] | Sequence[str]) -> str:
    return MESSAGES if MESSAGES in names and TEXT not in names else TEXT


def render_messages(value: list[Any], render: Render, place: str) -> str:
    """Return a list of messages as text. Raises ValueError, naming `place`, for another list."""
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'{place} is neither text nor messages: item {number} must look like {{"role": '
                f'"user", "content": "..."}}.'
            )
    if not value:
        raise ValueError(f"{place} has no messages.")
    try:
        return render(value)
    except ValueError as error:
        raise ValueError(f"{place} cannot be rendered as text: {error}.") from error


def valid_text(text: object, place: str) -> str:
    """Return a document. Raises ValueError, naming `place`, if it is no valid text."""
    if not isinstance(text, str):
        raise ValueError(f"{place} is not text but {json_text(text, default=repr)[:40]}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds half of a surrogate pair, which is not valid text."
        ) from error
    return text


READERS: dict[str, Callable[[Path, Reading], Iterator[TextChunk]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
}
"""The reader of each format; other files are one document of text."""


def names_of(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def text_chunks(text: str, source_bytes: int, is_chat: bool) -> Iterator[TextChunk]:
    """Yield the chunks of a document that is in memory."""
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        end = break_point(text, start, start + CHUNK_CHARACTERS)
        yield TextChunk(text[start:end], False, 0, is_chat)
        start = end
    yield TextChunk(text[start:], True, source_bytes, is_chat)


def break_point(text: str, start: int, stop: int) -> int:
    """Return where to split a long text in [start, stop) so that few tokens change: after the last
    line break, otherwise after the last space."""
    return (text.rfind("\n", start, stop) + 1) or (text.rfind(" ", start, stop) + 1) or stop


def python_source_files() -> list[Path]:
    """Return the source files of Python's standard library in a fixed order: real text to train on
    where there is no other."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in walk(root, NOT_LIBRARY)
        if file.suffix == ".py" and file.is_file() and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise ValueError(
            f"This Python has no source files in {root}; name a folder of text instead."
        )
    return files
