"""The fixtures of the matrix, and the option that writes it down."""

from pathlib import Path

import pytest

from .case import Case
from .families import FAMILIES, UNSUPPORTED, build
from .table import Cell, render


def pytest_addoption(parser):
    parser.addoption("--write-table", type=Path, help="write what the matrix has found to this file")


@pytest.fixture(params=FAMILIES)
def case(request):
    return Case.of(request.param)


@pytest.fixture(params=UNSUPPORTED)
def unsupported(request):
    return build(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or report.skipped:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        family = parameters.get("case", parameters.get("unsupported"))
        if family is not None:
            found = item.config.stash.setdefault(CELLS, {})
            note = dict(report.user_properties).get("cell", "")
            if report.skipped:
                note = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
            found[Cell(item.originalname, family)] = note if not report.failed else "failed"
    return report


CELLS = pytest.StashKey[dict]()


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("write_table", None)
    if path is None:
        return
    cells = session.config.stash.get(CELLS, {})
    if exitstatus or not cells:
        raise pytest.UsageError(f"{path} was not written: the matrix did not pass.")
    path.write_text(render(cells), encoding="utf-8")
