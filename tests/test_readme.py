"""The README's Python is run as it stands, on tiny models in place of the Hub's."""

import functools
import re
from pathlib import Path

import pytest
import torch

import hf_kvtransfer
from hf_kvtransfer import FidelityGate, FidelityReport, KVMapper, admission, fit_mapper
from hf_kvtransfer.fidelity.tables import tables

from .tiny_models import tiny_model
from .tiny_tokenizers import unigram


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CONTEXT = (Path(__file__).parents[1] / "examples" / "harbour.txt").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def hub(tokenizers, tmp_path_factory):
    """Folders under the names that the README gives to models, mappers and data."""
    root = tmp_path_factory.mktemp("hub")
    models = {
        "org/source": (tiny_model("llama"), tokenizers["bpe"]),
        "org/target": (tiny_model("gemma3", seed=1), unigram(CONTEXT)),  # it must know all characters
    }
    for name, (model, tokenizer) in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "calibration.txt").write_text("\n\n".join(CONTEXT.split("\n\n") * 20), encoding="utf-8")
    mapper = fit_mapper(
        models["org/source"][0],
        models["org/target"][0],
        CONTEXT.split("\n\n") * 2,
        source_tokenizer=models["org/source"][1],
        target_tokenizer=models["org/target"][1],
        num_source_layers=1,
    )
    mapper.save_pretrained(root / "org/source-to-target")
    return root


def run_the_three_lines():
    """Names that the README's first example leaves, without and with the added lines."""
    (diff,) = blocks("diff")
    names = {"context": CONTEXT[:300], "question": CONTEXT[300:330]}
    native, translated = (
        "".join(line[2:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
    )
    exec(native, expected := dict(names))
    exec(translated, got := dict(names))
    return expected, got


@pytest.fixture
def no_evidence_needed(monkeypatch):
    """Random models give none."""
    gate = functools.partial(FidelityGate, strict=False)
    monkeypatch.setattr(hf_kvtransfer, "FidelityGate", gate)
    monkeypatch.setattr(admission, "FidelityGate", gate)


def test_the_three_lines(hub, monkeypatch, recwarn, no_evidence_needed):
    monkeypatch.chdir(hub)
    expected, got = run_the_three_lines()
    assert got["cache"].report.translated_tokens > 100
    assert got["output"].shape == expected["output"].shape
    prompt = got["inputs"]["input_ids"]
    assert torch.equal(got["output"][:, : prompt.shape[1]], prompt)


def test_the_three_lines_without_evidence(hub, monkeypatch, recwarn):
    monkeypatch.chdir(hub)
    expected, got = run_the_three_lines()
    assert got["cache"].report.outcome == "recomputed"
    assert torch.equal(got["output"], expected["output"])


def test_python(hub, monkeypatch, recwarn, no_evidence_needed):
    monkeypatch.chdir(hub)
    pushed = []
    monkeypatch.setattr(KVMapper, "push_to_hub", lambda self, name: pushed.append(name))
    _, names = run_the_three_lines()
    for block in blocks("python"):
        exec(block, names)
    assert names["cache"].report.outcome == "translated"
    assert isinstance(KVMapper.from_pretrained("my-mapper"), KVMapper)
    assert pushed == ["me/source-to-target"]


def test_its_tables_are_those_of_the_evidence():
    evidence = FidelityReport.load(Path(__file__).parents[1] / "mappers" / "smollm2-135m-instruct--gemma-3-270m")
    for table in tables(evidence):
        assert table.to_markdown() in README


def test_its_commands_name_files_that_exist():
    root = Path(__file__).parents[1]
    paths = re.findall(r"\b(?:benchmarks|examples|mappers|docs)/[\w./-]+", README)
    assert paths
    assert [path for path in paths if not (root / path).exists()] == []
