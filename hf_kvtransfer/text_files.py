"""Rows of JSON Lines and pieces of plain text, read from files."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import KVTransferError


def json_lines(path: Path, error: type[KVTransferError]) -> Iterator[tuple[int, Any]]:
    """
    What each line of a JSON Lines file holds, with its number (from 1). Blank lines are left out.

    Raises:
        `error`: a line is not JSON, or the file cannot be read.
    """
    for number, line in enumerate(_lines(path, error), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as cause:
                raise error(f"Line {number} of {path} is not JSON ({cause}): {line[:80]!r}.") from cause
            yield number, row


def text_pieces(path: Path, length: int, error: type[KVTransferError]) -> Iterator[str]:
    """
    A text file in pieces of at least `length` characters (the last may be shorter), cut at blank lines.

    Raises:
        `error`: the file cannot be read.
    """
    piece = ""
    for blank, lines in itertools.groupby(_lines(path, error), key=lambda line: not line.strip()):
        piece += "".join(lines)
        if blank and len(piece) >= length:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def _lines(path: Path, error: type[KVTransferError]) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path} cannot be read as UTF-8 text: {cause}.") from cause
