import dataclasses
import hashlib
import json
import os
import stat

import pytest

from hf_kvtransfer.errors import EvidenceError
from hf_kvtransfer.fidelity.report import FidelityReport
from hf_kvtransfer.fidelity.statistics import figures

from .evidence import evaluation, make_report, passage


@pytest.fixture(scope="module")
def report():
    return make_report()


@pytest.fixture
def folder(report, tmp_path):
    report.save(tmp_path)
    return tmp_path


def test_round_trip(report, tmp_path):
    file = report.save(tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "fidelity.json"
    assert os.listdir(file.parent) == ["fidelity.json"]
    assert FidelityReport.load(file) == FidelityReport.load(file.parent) == report


def test_a_file_of_another_name(tmp_path):
    report = make_report(probe=None)
    assert report.save(tmp_path / "mine.json") == tmp_path / "mine.json"
    assert FidelityReport.load(tmp_path / "mine.json") == report


def test_figures_are_those_of_the_rounded_results(folder):
    report = FidelityReport.load(folder)
    assert figures(report.results) == report.figures
    assert report.results == [row.rounded() for row in evaluation()]


def test_figures_of_some_capabilities(tmp_path):
    report = make_report()
    selected = report.figures_of(["dialogue", "code"])
    assert selected == figures([row for row in report.results if row.capability in ("code", "dialogue")])
    assert selected["capabilities"].keys() == {"code", "dialogue"}
    assert report.figures_of(["knowledge"]) == figures([r for r in report.results if r.capability == "knowledge"])
    # Asked for again they are there already, and they are no part of the file.
    assert report.figures_of(("code", "dialogue")) is selected
    loaded = FidelityReport.load(report.save(tmp_path))
    assert loaded == report == make_report(created=report.created)
    assert loaded.figures_of(["code", "dialogue"]) == selected


def test_the_same_report_is_the_same_file(folder):
    text = (folder / "fidelity.json").read_text()
    FidelityReport.load(folder).save(folder)
    assert (folder / "fidelity.json").read_text() == text


def test_the_file_can_be_read_by_people(folder):
    lines = (folder / "fidelity.json").read_text().splitlines()
    assert sum(line.startswith('    {"document": ') for line in lines) == len(evaluation())
    assert '  "mapper": {"name": "org/small--large", "digest": "12ab"},' in lines
    assert max(len(line) for line in lines if "document" not in line) < 200
    digest = hashlib.sha256("".join(line + "\n" for line in lines[:-2]).encode()).hexdigest()
    assert lines[-2:] == [f'  "digest": "{digest}"', "}"]


def test_others_may_read_the_file(folder):
    (folder / "plain").touch()
    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in ("plain", "fidelity.json")]
    assert modes[0] == modes[1]


def test_a_file_with_other_line_ends(report, folder):
    file = folder / "fidelity.json"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert FidelityReport.load(folder) == report


def test_an_interrupted_save_leaves_the_old_file(folder, monkeypatch):
    text = (folder / "fidelity.json").read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make_report(results=evaluation(seed=1)).save(folder)
    assert os.listdir(folder) == ["fidelity.json"]
    assert (folder / "fidelity.json").read_text() == text


def edited(text: str, **changes) -> str:
    return json.dumps(json.loads(text) | changes)


def test_a_text_edit_is_refused(folder):
    """Whatever is changed: a figure, a result, or only a space."""
    file = folder / "fidelity.json"
    text = file.read_text()
    loss = str(json.loads(text)["figures"]["arms"]["translated"]["loss"])
    row_loss = str(json.loads(text)["results"][0]["arms"]["translated"]["loss"])
    digest = json.loads(text)["digest"]
    for edit in (
        text.replace(loss, "0.1"),
        text.replace(row_loss, "0.1"),
        text.replace("34cd", "34ce"),
        text.replace('{"torch"', '{ "torch"'),
        text.replace(digest, digest[::-1]),
        text.replace('"\n}\n', '", "figures": {}\n}\n'),
        text + "\n",
        edited(text, created="2020-01-01"),
        edited(text, digest=None),
        edited(text, digest=1),
    ):
        assert edit != text
        file.write_text(edit)
        with pytest.raises(EvidenceError, match=r"fidelity\.json .* digest does not match.*`hf-kvtransfer evaluate"):
            FidelityReport.load(folder)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("256", "NaN", "it holds NaN"),
        ("256", "-Infinity", "it holds -Infinity"),
        ("}\n", "", "cut short"),
        ("{", "[", "cut short"),
        ("256", "\udce4", "not text"),
        ("256", "9" * 5000, "cut short"),
    ],
)
def test_a_damaged_file(folder, old, new, reason):
    file = folder / "fidelity.json"
    file.write_text(file.read_text().replace(old, new), errors="surrogateescape")
    with pytest.raises(EvidenceError, match=rf"fidelity\.json .*{reason}.*`hf-kvtransfer evaluate"):
        FidelityReport.load(folder)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_a_truncated_file(folder, share):
    file = folder / "fidelity.json"
    text = file.read_text()
    file.write_text(text[: int(share * len(text))])
    with pytest.raises(EvidenceError, match="cut short"):
        FidelityReport.load(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"report"', "[" * 100_000])
def test_a_file_that_holds_something_else(folder, text):
    (folder / "fidelity.json").write_text(text)
    with pytest.raises(EvidenceError, match="does not hold a report|not JSON"):
        FidelityReport.load(folder)


def test_no_file(tmp_path):
    with pytest.raises(EvidenceError, match=r"no evidence at .*fidelity\.json\. Run the evaluation again"):
        FidelityReport.load(tmp_path)


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "fidelity.json").mkdir()
    with pytest.raises(EvidenceError, match="cannot be read"):
        FidelityReport.load(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_format(folder, version):
    file = folder / "fidelity.json"
    file.write_text(edited(file.read_text(), format_version=version))
    with pytest.raises(EvidenceError, match=rf"`format_version` is {version!r}, .* Update hf-kvtransfer"):
        FidelityReport.load(folder)


def test_results_that_are_not_numbers():
    rows = evaluation()
    rows[0].arms["translated"].kl = float("nan")
    with pytest.raises(EvidenceError, match="`kl` is nan"):
        make_report(rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"rate": float("nan")}}, "not written to .*JSON compliant"),
        ({"results": evaluation(seed=1)}, r"not written to .*`figures\.positions`"),
        ({"results": [passage(native=2.0)], "figures": None}, "not written to .*'translated' is missing"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(report, tmp_path, changes, reason):
    with pytest.raises(EvidenceError, match=reason):
        dataclasses.replace(report, **changes).save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_report_in_memory_can_be_checked(report):
    report.check()
    with pytest.raises(EvidenceError, match=r"`figures\.positions`"):
        dataclasses.replace(report, results=evaluation(seed=1)).check()
    with pytest.raises(EvidenceError, match="`mapper` has no `digest` that is a str"):
        dataclasses.replace(report, mapper={"name": "a"}).check()
