"""The option `--report` of commands that show evidence: a page for those who did not run them."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from ..fidelity.gate import FidelityGate
    from ..mapper import KVMapper

ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        dir_okay=False,
        help="Write the evidence as one HTML page with plots, too. It needs matplotlib.",
    ),
]


def check(file: Path | None) -> None:
    """Refuse, before anything that takes long, a page that could not be written."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(file.parent)!r}.", param_hint="--report")
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("its plots need matplotlib: pip install matplotlib.", param_hint="--report")


def write(file: Path, mapper: "KVMapper", gate: "FidelityGate") -> None:
    """Write the page of a mapper that has evidence."""
    from ..fidelity.html import report_html

    file.write_text(report_html(mapper.evidence, mapper, gate), encoding="utf-8")
