"""A file, or all files of a folder, are written whole or not at all: a disk that is full leaves what was there."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """
    Where to write a file, which takes the place of `path` when it is all there.

    Args:
        path (`Path`):
            Where it is to be, in a folder that is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # other processes may write it too
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Delete a file if it is there, and what processes that were killed have left of it."""
    for file in (path, *path.parent.glob(f".{path.name}.*")):
        file.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, replaced: Sequence[str] = ()) -> Iterator[Path]:
    """
    A folder to write files into, which are moved to `folder` when all of them are there.

    Args:
        folder (`Path`):
            Where they are to be. It is made if it is not there; other files in it are left alone.
        replaced (`Sequence[str]`, *optional*):
            Patterns of files there that go where no new one of their name takes their place.

    Raises:
        `OSError`: they cannot be written. Nothing has changed.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))  # on the same disk
    try:
        yield unfinished
        files = list(unfinished.iterdir())
        for file in files:
            file.replace(folder / file.name)
        names = {file.name for file in files}
        for old in (old for pattern in replaced for old in folder.glob(pattern) if old.name not in names):
            old.unlink()
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        if isinstance(error, SafetensorError):  # what its writer makes of a full disk
            raise OSError(
                f"{folder} cannot be written: {error}. It is left as it was: make room, and try again."
            ) from error
        raise
    unfinished.rmdir()
