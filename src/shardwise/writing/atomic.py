"""Files and folders that appear complete or not at all: written aside, then renamed. Imports no
torch."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Return the hidden path next to `path` at which it is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def written_aside(path: Path, unique: bool = True) -> Iterator[Path]:
    """Yield a path next to `path`, which is renamed to `path` when the block succeeds and removed
    when it fails.

    The caller creates the file or folder there. A `unique` path has the number of this process in
    it; otherwise it is `partial_path(path)`, where a later process finds what a killed one left.
    """
    aside = partial_path(path.with_name(f"{path.name}.{os.getpid()}") if unique else path)
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        remove(aside)
        raise


def replace_durably(aside: Path, path: Path) -> None:
    """Rename the folder `aside` to `path` in place of any folder there, and return once the change
    is on disk, so that older copies may be removed."""
    sync(aside)
    remove(path)
    aside.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder with its content, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, in_use: str) -> Iterator[None]:
    """Hold a lock on an existing folder. Raises ValueError with the message `in_use` if another
    process holds it. File systems without locks are not protected."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(in_use) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
