"""The matrix as a Markdown table."""

import importlib
import inspect
import pkgutil
import re
import sys
from typing import NamedTuple

import torch
import transformers

from .families import FAMILIES, UNSUPPORTED


class Cell(NamedTuple):
    test: str
    family: str


HEADER = """# What was run, on which model families

Written by `make generation-table`, which runs `tests/generation` ({versions}). Do not edit it.

Every cell is a test of its own with tiny random models of the family's architecture in float32. **ok**: with the
identity mapper the target's tokens are the same as when it reads the text itself, and the logits and scores, where
`generate` gives them, are within 1e-5. The controls, `test_control_...`, are **ok** when a cache of another document
or of other positions gives *other* logits. Any other entry is explained below the tables.

"""


def expected_cells() -> set[Cell]:
    """The cells that the tests of this package make."""
    cells = set()
    package = importlib.import_module(__package__)
    for module_info in pkgutil.iter_modules(package.__path__):
        if not module_info.name.startswith("test_"):
            continue
        module = importlib.import_module(f"{__package__}.{module_info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and function.__module__ == module.__name__:
                parameters = inspect.signature(function).parameters
                for fixture, families in (("case", FAMILIES), ("unsupported", UNSUPPORTED)):
                    if fixture in parameters:
                        cells |= {Cell(name, family) for family in families}
    return cells


def render(cells: dict[Cell, str]) -> str:
    """
    The file's text.

    Args:
        cells (`dict[Cell, str]`):
            What each test noted about its family: nothing if all is as native, or a word, a colon and why.
    """
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, "
    parts = [HEADER.format(versions=versions + f"Python {sys.version_info.major}.{sys.version_info.minor}")]
    notes: dict[str, list[Cell]] = {}
    for cell, note in cells.items():
        if note:
            notes.setdefault(note, []).append(cell)
    for title, families in (("Decoding", FAMILIES), ("Refused by name", UNSUPPORTED)):
        tests = dict.fromkeys(cell.test for cell in cells if cell.family in families)
        rows = [["", *families], ["---"] * (len(families) + 1)]
        rows += [
            [f"`{test}`"] + [cells[test, family].partition(":")[0] or "ok" for family in families] for test in tests
        ]
        parts.append(f"## {title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n")
    parts.append("## Notes\n\n")
    for note, where in notes.items():
        word, _, reason = note.partition(": ")
        tests = ", ".join(f"`{test}`" for test in dict.fromkeys(cell.test for cell in where))
        families = dict.fromkeys(cell.family for cell in where)
        everywhere = len(families) == len(FAMILIES)
        parts.append(f"- **{word}** ({tests}, {'all families' if everywhere else ', '.join(families)}): {reason}\n")
    return "".join(parts)


def listed_cells(text: str) -> set[Cell]:
    """The cells that a rendered file has."""
    cells, families = set(), []
    for line in text.splitlines():
        entries = [entry.strip() for entry in line.strip("|").split("|")]
        if line.startswith("|  |"):
            families = entries[1:]
        elif match := re.fullmatch(r"`(test_\w+)`", entries[0]):
            cells |= {Cell(match[1], family) for family, entry in zip(families, entries[1:], strict=True) if entry}
    return cells
