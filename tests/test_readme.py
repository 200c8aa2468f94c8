"""The README's Python is run as it stands, on tiny models in place of the Hub's."""

import re
from pathlib import Path

import pytest
import torch

from hf_kvtransfer import KVMapper, fit_mapper

from .tiny_models import tiny_model


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CONTEXT = (Path(__file__).parents[1] / "examples" / "harbour.txt").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def hub(tokenizers, tmp_path_factory):
    """Folders under the names that the README gives to models, mappers and data."""
    root = tmp_path_factory.mktemp("hub")
    models = {"org/source": (tiny_model("llama"), "bpe"), "org/target": (tiny_model("gemma3", seed=1), "unigram")}
    for name, (model, tokenizer) in models.items():
        model.save_pretrained(root / name)
        tokenizers[tokenizer].save_pretrained(root / name)
    (root / "calibration.txt").write_text("\n\n".join(CONTEXT.split("\n\n") * 20), encoding="utf-8")
    mapper = fit_mapper(
        models["org/source"][0],
        models["org/target"][0],
        CONTEXT.split("\n\n") * 2,
        source_tokenizer=tokenizers["bpe"],
        target_tokenizer=tokenizers["unigram"],
        num_source_layers=1,
    )
    mapper.save_pretrained(root / "org/source--target")
    return root


def test_the_three_lines(hub, monkeypatch, recwarn):
    monkeypatch.chdir(hub)
    (diff,) = blocks("diff")
    names = {"context": CONTEXT[:300], "question": CONTEXT[300:330]}
    native, translated = (
        "".join(line[2:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
    )
    exec(native, expected := dict(names))
    exec(translated, got := dict(names))
    assert got["cache"].report.translated_tokens > 100
    assert got["output"].shape == expected["output"].shape
    prompt = got["inputs"]["input_ids"]
    assert torch.equal(got["output"][:, : prompt.shape[1]], prompt)


def test_fit_your_own(hub, monkeypatch):
    monkeypatch.chdir(hub)
    pushed = []
    monkeypatch.setattr(KVMapper, "push_to_hub", lambda self, name: pushed.append(name))
    names: dict = {}
    for block in blocks("python"):
        exec(block, names)
    assert isinstance(KVMapper.from_pretrained("my-mapper"), KVMapper)
    assert pushed == ["me/source--target"]


def test_its_commands_name_files_that_exist():
    root = Path(__file__).parents[1]
    paths = re.findall(r"\b(?:benchmarks|examples|mappers|docs)/[\w./-]+", README)
    assert paths
    assert [path for path in paths if not (root / path).exists()] == []
