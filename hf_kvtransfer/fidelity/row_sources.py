"""Files and iterables of rows."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import EvaluationDataError
from ..text_files import json_lines, text_pieces
from .rows import Row, parse_row


_JSON_LINES = (".jsonl", ".ndjson", ".json")
# Characters of the name of a missing file; more are a text that is none.
_LONGEST_SHOWN = 255
_LOOKS_LIKE_A_FILE = re.compile(r"\S+\.(jsonl|ndjson|json|txt|md)")


@dataclasses.dataclass
class RowSource:
    """
    The rows of one file or iterable.

    Args:
        name (`str`):
            Unique among the sources of one evaluation.
        path (`Path`, *optional*):
            The file.
        sha256 (`str`):
            Of the file's bytes; of an iterable, of its rows as JSON.
        rows (`list[tuple[int, Row]]`):
            Rows with their numbers from 1: the line, of plain text the piece.
    """

    name: str
    path: Path | None
    sha256: str
    rows: list[tuple[int, Row]]

    def place(self, number: int) -> str:
        """Where a row is, for messages."""
        return _place(self.path, number)


def open_sources(data: Any, piece_length: int) -> list[RowSource]:
    """
    Read and check all rows.

    Args:
        data (`str`, `Path`, `Mapping` or `Iterable`):
            A file, files, rows, or any of these under the name of their capability.
        piece_length (`int`):
            Characters at which plain text is cut, at the next blank line.

    Raises:
        `EvaluationDataError`: a file is missing or cannot be read, or a row cannot be used.
    """
    parts = data.items() if isinstance(data, Mapping) else [(None, data)]
    sources: list[RowSource] = []
    for capability, part in parts:
        if capability is not None and not (isinstance(capability, str) and capability.strip()):
            raise EvaluationDataError(f"The keys of `data` must be names of capabilities, got {capability!r}.")
        for opened in _open(part, capability, piece_length):
            taken = {source.name for source in sources}
            numbered = (f"{opened.name} ({i})" for i in range(2, len(taken) + 2))
            opened.name = next(name for name in (opened.name, *numbered) if name not in taken)
            sources.append(opened)
    if not sources:
        raise EvaluationDataError("`data` is empty: give at least one file or row.")
    return sources


def _open(data: Any, capability: str | None, piece_length: int) -> Iterator[RowSource]:
    if isinstance(data, str | Path):
        yield _file(Path(data), capability, piece_length)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        items = list(data)
        if any(_is_file_name(item) for item in items):
            for number, item in enumerate(items, start=1):
                if not isinstance(item, str | Path):
                    raise EvaluationDataError(
                        f"Item {number} of `data` is a row ({type(item).__name__}) among files. Give files and rows "
                        'apart, under a name for each: {"code": ["a.jsonl"], "dialogue": [{"messages": [...]}]}.'
                    )
                yield _file(Path(item), capability, piece_length)
        else:
            rows = _parsed(enumerate(items, start=1), None, capability)
            digest = hashlib.sha256()
            for _, row in rows:
                fields = {name: value for name, value in dataclasses.asdict(row).items() if value is not None}
                digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
            yield RowSource("iterable", None, digest.hexdigest(), rows)
    else:
        raise EvaluationDataError(
            f"`data` must be a file, a list of files, rows, or these by capability, got {data!r:.80}."
        )


def _is_file_name(item: Any) -> bool:
    if isinstance(item, str):
        return _LOOKS_LIKE_A_FILE.fullmatch(item) is not None or ("\n" not in item and os.path.isfile(item))
    return isinstance(item, Path)


def _file(path: Path, capability: str | None, piece_length: int) -> RowSource:
    if not os.path.isfile(path):  # not `Path.is_file`, which raises for a name that is too long
        name = str(path)
        shown = name if len(name) <= _LONGEST_SHOWN and "\n" not in name else f"{name[:80]!r}..."
        raise EvaluationDataError(
            f"There is no file {shown}. Files of evaluation data are JSON Lines or plain text. A text itself is a "
            "row: give a list of rows, without files among them."
        )
    numbered: Iterable[tuple[int, Any]]
    if path.suffix in _JSON_LINES:
        numbered = json_lines(path, EvaluationDataError)
    else:
        numbered = enumerate(text_pieces(path, piece_length, EvaluationDataError), start=1)
    rows = _parsed(numbered, path, capability)
    with path.open("rb") as file:
        return RowSource(path.name, path, hashlib.file_digest(file, "sha256").hexdigest(), rows)


def _parsed(numbered: Iterable[tuple[int, Any]], path: Path | None, capability: str | None) -> list[tuple[int, Row]]:
    rows = []
    for number, row in numbered:
        try:
            rows.append((number, parse_row(row, capability)))
        except EvaluationDataError as error:
            raise EvaluationDataError(f"{_place(path, number)}: {error}") from error
    return rows


def _place(path: Path | None, number: int) -> str:
    return f"Row {number} of `data`" if path is None else f"Line {number} of {path}"
