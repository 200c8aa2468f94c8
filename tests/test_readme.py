"""The README's Python is run as it stands, on tiny models in place of the Hub's."""

import torch

from hf_kvtransfer import FidelityReport, KVMapper
from hf_kvtransfer.fidelity.tables import tables
from hf_kvtransfer.home import HOME_VARIABLE

from .documents import CONTEXT, ROOT, blocks


README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_the_three_lines():
    """Names that the README's first example leaves, without and with the added lines."""
    (diff,) = blocks(README, "diff")
    names = {"context": CONTEXT[:300], "question": CONTEXT[300:330]}
    native, translated = (
        "".join(line[2:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
    )
    exec(native, expected := dict(names))
    exec(translated, got := dict(names))
    return expected, got


def test_the_three_lines(in_hub_folders, recwarn, no_evidence_needed):
    expected, got = run_the_three_lines()
    assert got["cache"].report.translated_tokens > 100
    assert got["output"].shape == expected["output"].shape
    prompt = got["inputs"]["input_ids"]
    assert torch.equal(got["output"][:, : prompt.shape[1]], prompt)


def test_the_three_lines_without_evidence(in_hub_folders, recwarn):
    expected, got = run_the_three_lines()
    assert got["cache"].report.outcome == "recomputed"
    assert torch.equal(got["output"], expected["output"])


def test_python(in_hub_folders, monkeypatch, recwarn, no_evidence_needed, tmp_path):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    pushed = []
    monkeypatch.setattr(KVMapper, "push_to_hub", lambda self, name: pushed.append(name))
    _, names = run_the_three_lines()
    for block in blocks(README, "python"):
        exec(block, names)
    assert names["cache"].report.outcome == "translated"
    assert isinstance(KVMapper.from_pretrained("my-mapper"), KVMapper)
    assert pushed == ["me/source-to-target"]


def test_its_tables_are_those_of_the_evidence():
    evidence = FidelityReport.load(ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m")
    for table in tables(evidence):
        assert table.to_markdown() in README
