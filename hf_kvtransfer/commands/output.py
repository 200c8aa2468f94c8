"""What commands print: results on stdout, everything else on stderr."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console


if TYPE_CHECKING:
    from ..fidelity.gate import Verdict
    from ..fidelity.report import FidelityReport
    from ..fidelity.tables import Table

# A table is only as wide as its cells: a pipe or a log gets it whole, whatever width it is said to have.
_WIDTH_OF_PIPES = 240


def print_report(report: "FidelityReport", probe: bool = True) -> None:
    """Print what was measured and when, and the tables; the probe's operating curve if `probe`."""
    from ..fidelity.tables import tables

    source, target = (side["identity"].get("name") for side in (report.source, report.target))
    data = ", ".join(f"{file.get('name')} ({file.get('documents')} documents)" for file in report.data)
    print_line(f"{source} to {target}, measured {report.created} on {data}\n")
    for content in tables(report if probe else dataclasses.replace(report, probe=None)):
        print_table(content)


def print_table(content: "Table") -> None:
    """Print a table, as wide as its cells."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    table = Table(
        title=content.title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        # Nine columns of figures fit into a terminal of 80.
        show_edge=False,
        padding=(0, 1, 0, 0) if console.width > 120 else 0,
    )
    for number, name in enumerate(content.header):
        table.add_column(escape(name), justify="right" if number else "left", overflow="fold")
    for row in content.rows:
        table.add_row(*map(escape, row))
    console.print(table)
    if content.note:
        console.print(content.note, style="dim", markup=False)
    console.print()


def print_line(text: str, style: str = "") -> None:
    """Print a result, in lines as long as they are."""
    _console().print(text, style=style, markup=False, soft_wrap=True)


def print_verdict(verdict: "Verdict", remark: str | None = None) -> None:
    """Print what the gate decided, and a remark on what it could not see."""
    print_line(str(verdict), "bold green" if verdict.admitted else "bold red")
    if remark:
        print_line(remark, "dim")


def print_json(verdict: "Verdict", report: "FidelityReport | None", **more: object) -> None:
    """Print one JSON object: the verdict's entries, the report's figures and probe, and what else is given."""
    found = {"figures": report.figures, "probe": report.probe} if report else {"figures": None, "probe": None}
    print_object(dataclasses.asdict(verdict) | more | found)


def print_object(entries: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(entries, indent=2, ensure_ascii=False))


def size(number: int) -> str:
    """A number of bytes, for people."""
    return f"{number / 1e6:.1f} MB" if number >= 10**6 else f"{number / 1e3:.1f} kB"


def print_error(error: BaseException) -> None:
    """Print what went wrong on stderr, in one line whatever its message looks like."""
    message = " ".join([str(error) or repr(error), *getattr(error, "__notes__", ())])
    _console(stderr=True).print(f"Error: {' '.join(message.split())}", style="bold red", markup=False, soft_wrap=True)


def print_note(message: str) -> None:
    """Print a remark that is no result on stderr, in one line."""
    _console(stderr=True).print(message, style="yellow", markup=False, soft_wrap=True)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_PIPES
    return console
