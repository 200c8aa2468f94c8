import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hf_kvtransfer import FidelityGate
from hf_kvtransfer.fidelity.html import report_html
from hf_kvtransfer.fidelity.tables import tables
from hf_kvtransfer.layer_table import layer_table

from ..tiny_models import identity_mapper, tiny_model
from .evidence import WITH_EFFORTS, evaluation, make_report, passage


pytest.importorskip("matplotlib")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# No end tag, by the HTML standard.
_VOID = {"meta", "link", "br"}
_SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """A page's elements and text. Fails on tags that do not match."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def report():
    return make_report()


@pytest.fixture(scope="module")
def source(report):
    return report_html(report)


def pictures(source):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)]


def test_every_table_is_there_with_its_picture(report, source):
    page = Page(source)
    for table in tables(report):
        for row in [table.header, *table.rows]:
            assert " ".join(row) in page.text
        assert " ".join(table.note.split()) in page.text
    assert len(pictures(source)) == len(tables(report)) + 1  # the layers' cosines are a table of the page alone
    gap = report.figures["arms"]["translated"]["gap_recovered"]
    assert f"{gap['value']:.2f} of the gap recovered, all text" in page.text
    for found in ("org/small", "org/large", "talk.jsonl: 24 documents", "context tokens 256", "torch 2.13.0"):
        assert found in page.text


def test_efforts_are_drawn():
    report = make_report(evaluation(excess=WITH_EFFORTS))
    source = report_html(report, gate=FidelityGate(min_gap_recovered=0.84, min_agreement=0.0))
    drawn = ["".join(picture.itertext()) for picture in pictures(source)]
    for number in (0, 1, 2, 3, 5):  # all but the probe's
        assert "the same, effort 0.05" in drawn[number] and "the same, effort 0.5" in drawn[number]
    assert "With `effort=0.05`, which" in Page(source).text


def test_pictures_hold_the_names(report, source):
    drawn = ["".join(picture.itertext()) for picture in pictures(source)]
    assert all(name in drawn[1] for name in report.figures["capabilities"])
    assert "other document" in drawn[4]


def test_it_is_self_contained(source):
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    (policy,) = (attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    assert "default-src 'none'" in policy


def test_ids_are_unique_and_references_resolve(source):
    elements = [element for picture in pictures(source) for element in picture.iter()]
    ids = [element.get("id") for element in elements if element.get("id")]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(|href=")#([\w-]+)', source)
    assert used
    assert set(used) <= set(ids)


def test_names_from_strangers_are_text():
    hostile = "<script>alert('$x')</script>\x00\ud800\x1b & $\\frac{1}$"
    rows = [passage(f"{i}{hostile}", hostile, native=2.0, translated=2.1, no_context=3.0) for i in range(10)]
    report = make_report(
        rows,
        mapper={"name": hostile, "digest": hostile},
        source={"identity": {"name": hostile}, "cache_policy": {hostile: hostile}},
        data=[{"name": hostile, "skipped": hostile}, {"skipped": {hostile: 1}}],
        settings={hostile: hostile},
        created=hostile,
    )
    source = report_html(report)
    source.encode("utf-8")
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.elements}
    shown = "<script>alert('$x')</script>��� & $\\frac{1}$"
    assert f"mapper {shown}" in page.text
    assert any("<script>alert('$x')" in "".join(picture.itertext()) for picture in pictures(source))
    assert html.escape(shown, quote=False).split("alert")[0] in source


def test_the_verdict(report, source):
    reasons = FidelityGate().judge(report)
    assert reasons
    assert all(reason in Page(source).text for reason in reasons)
    assert "Refused by the gate" in Page(source).text
    lenient = FidelityGate(("code",), min_gap_recovered=0, min_agreement=0, max_control=1, min_positions=1)
    assert lenient.judge(report) == []
    page = Page(report_html(report, gate=lenient))
    assert "Admitted by the gate, asked about code" in page.text


def test_a_small_evaluation_has_fewer_sections():
    report = make_report([passage(str(i), native=2.0, translated=2.1) for i in range(3)], probe=None)
    source = report_html(report)
    assert len(pictures(source)) == 3
    assert "too few to admit anything" in Page(source).text
    assert "not to be told from what was measured" in Page(source).text


def test_many_capabilities_are_in_the_table_alone():
    names = [f"capability {number:03}" for number in range(42)]
    report = make_report([passage(name, name, native=2.0, translated=2.1) for name in names], probe=None)
    source = report_html(report)
    assert "capability 041" in Page(source).text
    drawn = "".join(pictures(source)[1].itertext())
    assert "capability 039" in drawn
    assert "capability 040" not in drawn


@pytest.mark.parametrize("is_fitted", [True, False])
def test_a_mapper_shows_what_it_reads(is_fitted):
    """Its picture needs what a fit writes down."""
    mapper = identity_mapper(tiny_model("llama"))
    if is_fitted:
        mapper.config.source = mapper.config.source | {"name": "<b>$\x00\ud800"}
        mapper.config.fit = {"layers": [{"explained_variance": [0.9, 0.8], "bytes": 1_000_000}] * 4}
    mapper.evidence = report = make_report([passage(native=2.0, translated=2.1)], probe=None)
    source = report_html(report, mapper)
    page = Page(source)
    assert f"The mapper takes {mapper.num_bytes() / 1e6:.1f} MB" in page.text
    assert all(" ".join(" ".join(row).split()) in page.text for row in layer_table(mapper).rows)
    assert len(pictures(source)) == 3 + is_fitted
    assert not is_fitted or "<b>$�� to tiny" in "".join(pictures(source)[-1].itertext())
    assert "its evidence is about another mapper" in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_it_without_a_complaint(source, tmp_path):
    file, screenshot = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(source, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}", "--window-size=1000,3000", f"--screenshot={screenshot}", file.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr
    assert screenshot.stat().st_size > 50_000
