import json

import pytest

from .conftest import EXAMPLES, ROOT
from .tiny_demo import install, lay_out


NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_cells_run_one_after_another(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(lay_out(tmp_path, pair))
    install(monkeypatch.setattr, pair / "model")
    names = {}
    for cell in code_cells():
        exec(cell, names)
    assert names["cache"].report.outcome == "translated"
    assert "tokens translated" in capsys.readouterr().out


def test_a_kernel_runs_it(pair, tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    prelude = f"from tests.examples.tiny_demo import install\ninstall(setattr, {str(pair / 'model')!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(prelude))
    folder = lay_out(tmp_path, pair)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    printed = [output.get("text", "") for cell in notebook.cells[1:] for output in cell.get("outputs", [])]
    assert any("tokens translated" in text for text in printed)


def test_it_is_kept_without_outputs():
    """They would be of one machine, and grow the repository with each run."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
