"""What an evaluation has finished so far, on disk, so that it can go on after an interruption."""

import json
from pathlib import Path
from typing import Any

from ..errors import EvaluationDataError
from ..nested import describe_differences


class WorkFile:
    """
    A JSONL file: a header that says what is evaluated, then a record for each finished document.

    Args:
        path (`Path`, *optional*):
            Continued if it exists, made if not. `None` keeps the records in memory only.
        header (`dict`):
            Everything that the records depend on.

    Raises:
        `EvaluationDataError`: the file is of another evaluation, damaged, or something else.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]):
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path is None:
            return
        first_line = json.dumps(header) + "\n"
        *lines, half_written = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if lines:
            found, *self.records = (self._parse(number, line) for number, line in enumerate(lines, start=1))
            # As it looks when it is read back: tuples become lists.
            self._check_same(found, json.loads(first_line))
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - len(half_written))
        elif first_line.encode().startswith(half_written):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(first_line, encoding="utf-8")
        else:
            raise EvaluationDataError(
                f"{path} is not the work file of this evaluation: it begins with {half_written[:40]!r}. Give another "
                "path, or delete the file."
            )

    def append(self, record: dict[str, Any]) -> None:
        """Add a record, in the form in which it is read back."""
        line = json.dumps(record)
        self.records.append(json.loads(line))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise EvaluationDataError(
                f"Line {number} of the work file {self.path} is damaged ({error}). Delete the file to start anew."
            ) from error

    def _check_same(self, found: dict[str, Any], header: dict[str, Any]) -> None:
        if differences := describe_differences(found, header):
            raise EvaluationDataError(
                f"The work file {self.path} is of another evaluation: {differences}. Go on with what it was begun "
                "with, or delete it to start anew."
            )
