"""The log of a shadow: JSON Lines, appended to while a service runs, and what they say together."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EvidenceError
from .results import ArmScore, PassageResult
from .statistics import figures


_CAPABILITY = "traffic"


class ShadowLog:
    """
    A file of JSON Lines that outlives crashes and may be shared by several processes.

    Args:
        path (`str` or `Path`):
            The file. It is made, with its folder, if it is not there.

    Raises:
        `ValueError`: it cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
        except OSError as error:
            raise ValueError(f"`log` cannot be written ({error}). Pass a file in a folder that can be.") from error

    def append(self, line: dict[str, Any]) -> None:
        """
        Add a line, in one write.

        Raises:
            `OSError`: it cannot be written.
        """
        text = json.dumps(line).encode() + b"\n"
        with self.path.open("ab+", buffering=0) as file:
            # What a crash has cut off must not swallow this line.
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = b"\n" + text
            file.write(text)


def loggable(scores: dict[str, ArmScore]) -> dict[str, dict[str, Any]]:
    """Scores of the arms as a line of the log has them."""
    return PassageResult("", _CAPABILITY, None, None, None, scores).rounded().to_dict()["arms"]


def summarize_shadow_log(log: str | Path, mapper: str | None = None) -> dict[str, Any]:
    """
    What the log of [`ShadowTransfer`] says so far.

    Args:
        log (`str` or `Path`):
            The file.
        mapper (`str`, *optional*):
            Digest of the mapper whose lines are taken, by default the one of the last line.

    Returns:
        `dict`: `mapper` (its name and digest, `None` if there is no line of it); the number of replies `compared` and
        `failed`; `errors` and `not_compared`, how often each; the number of `damaged` lines; and `figures`, see
        [`figures`], with each conversation as a document, `None` if nothing was compared.

    Raises:
        `EvidenceError`: the file cannot be read.
    """
    lines = list(_lines(Path(log)))
    readable = [line for line in lines if line is not None]
    if mapper is None and readable:
        mapper = readable[-1]["mapper"]["digest"]
    results: list[PassageResult] = []
    errors: Counter[str] = Counter()
    not_compared: Counter[str] = Counter()
    name = None
    seen: Counter[tuple[str, int | None]] = Counter()
    damaged = len(lines) - len(readable)
    for number, line in enumerate(readable, start=1):
        if line["mapper"]["digest"] != mapper:
            continue
        name = line["mapper"]
        try:
            if "error" in line:
                errors[line["error"]] += 1
            elif "not_compared" in line:
                not_compared.update(line["not_compared"])
            else:
                results.append(_result(line, number, seen))
        except (EvidenceError, KeyError, TypeError):
            damaged += 1
    return {
        "mapper": name,
        "compared": len(results),
        "failed": errors.total(),
        "errors": dict(errors),
        "not_compared": dict(not_compared),
        "damaged": damaged,
        "figures": figures(results) if results else None,
    }


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line, `None` for one that is none of a shadow's, as one that a crash has cut off."""
    try:
        with path.open("rb") as file:
            for text in filter(None, map(bytes.strip, file)):
                try:
                    line = json.loads(text)
                    yield line if isinstance(line["mapper"]["digest"], str) else None
                except (ValueError, TypeError, KeyError):
                    yield None
    except OSError as error:
        raise EvidenceError(f"The log {path} cannot be read: {error}.") from error


def _result(line: dict[str, Any], number: int, seen: Counter[tuple[str, int | None]]) -> PassageResult:
    conversation, turn = line["conversation"], line["turn"]
    document = f"line {number}" if conversation is None else f"conversation {conversation}"
    # After a restart turns are counted from the first again, and the rows of a batch may be of one conversation.
    seen[document, turn] += 1
    if seen[document, turn] > 1:
        document += f", again ({seen[document, turn]})"
    row = {"document": document, "capability": _CAPABILITY, "turn": turn, "choices": None, "label": None}
    result = PassageResult.from_dict(row | {"arms": line["arms"]})
    problem = result.problem()
    if problem is not None:
        raise EvidenceError(problem)
    return result
