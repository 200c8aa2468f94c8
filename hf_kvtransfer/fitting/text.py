"""Calibration text from wherever it is."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CalibrationError
from ..text_files import json_lines, text_pieces


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
        path = Path(texts)
        return _jsonl(path) if path.suffix == ".jsonl" else text_pieces(path, CHUNK_LENGTH, CalibrationError)
    return texts


def _jsonl(path: Path) -> Iterator[str]:
    for number, row in json_lines(path, CalibrationError):
        if not isinstance(row, dict) or "text" not in row:
            raise CalibrationError(f"Line {number} of {path} is not a JSON object with a `text` field: {row!r:.80}.")
        yield row["text"]


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
