import shutil

import pytest

from hf_kvtransfer import FidelityReport
from hf_kvtransfer.commands import report_page

from .conftest import SHORT, message


def test_a_page_of_what_was_evaluated(mapper, models, files, run, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    result = run("evaluate", mapper, *models, "--data", files / "own.jsonl", *SHORT, "--report", page)
    assert result.exit_code == 1, result.output
    source = page.read_text(encoding="utf-8")
    assert f"{FidelityReport.load(mapper).figures['arms']['translated']['loss']:.3f}" in source
    assert "Refused" in source
    assert "The mapper takes" in source


def test_a_page_of_evidence_that_is_there(evaluated, run, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert run("gate", evaluated[0], "--capability", "text", "--report", page).exit_code == 0
    assert "Admitted</strong> by the gate, asked about text" in page.read_text(encoding="utf-8")


def test_no_page_without_evidence(mapper, run, tmp_path):
    pytest.importorskip("matplotlib")  # without it a page is refused before evidence is looked for
    result = run("gate", mapper, "--report", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "it has no evidence" in result.stdout
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_refused_at_once(evaluated, run, tmp_path, monkeypatch):
    folder = shutil.copytree(evaluated[0], tmp_path / "mapper")
    assert "--report: there is no folder" in message(run("gate", folder, "--report", tmp_path / "a" / "b.html"))
    assert "is a directory" in message(run("gate", folder, "--report", tmp_path))
    monkeypatch.setattr(report_page, "find_spec", lambda name: None)
    result = run("gate", folder, "--report", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "pip install matplotlib" in message(result)
