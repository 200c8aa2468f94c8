"""Files of a folder are written all or none: a disk that is full leaves what was there."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def written_whole(folder: Path, replaced: Sequence[str] = ()) -> Iterator[Path]:
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
