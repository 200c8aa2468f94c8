"""Calibration text from wherever it is."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CalibrationError


# Of a plain text file, in characters: some hundred tokens, as much context as the maps need to see.
CHUNK_LENGTH = 2000


def calibration_texts(texts: str | Path | Iterable) -> Iterable:
    """
    Pieces of text from a file, a dataset or an iterable.

    Args:
        texts (`str`, `Path` or `Iterable`):
            A `.jsonl` file with a `text` field in each row, any other text file (cut at blank lines), the name of a
            dataset for `datasets.load_dataset` (its `train` split, streamed), or an iterable of strings or of token
            ids.

    Raises:
        `CalibrationError`: a row has no text, or `datasets` is needed and not installed.
    """
    if isinstance(texts, str | Path):
        if not Path(texts).is_file():
            return _dataset(str(texts))
        return _jsonl(Path(texts)) if Path(texts).suffix == ".jsonl" else _chunks(Path(texts))
    return texts


def _jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise CalibrationError(
                    f"Line {number} of {path} is not a JSON object with a `text` field: {line[:80]!r}."
                ) from error


def _chunks(path: Path) -> Iterator[str]:
    chunk = ""
    with path.open(encoding="utf-8") as file:
        for blank, lines in itertools.groupby(file, key=lambda line: not line.strip()):
            chunk += "".join(lines)
            if blank and len(chunk) >= CHUNK_LENGTH:
                yield chunk
                chunk = ""
    if chunk.strip():
        yield chunk


def _dataset(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"`texts={name!r}` is no file. To read it as the name of a dataset, `pip install datasets`."
        ) from error
    for row in load_dataset(name, split="train", streaming=True):
        if "text" not in row:
            raise CalibrationError(
                f"Dataset {name!r} has columns {sorted(row)}, but no `text`: pass an iterable of strings."
            )
        yield row["text"]
