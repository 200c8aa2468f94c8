import functools
import json
import os


# Tests run offline, whatever the machine has; what comes from PyPI is fetched by pip. Read when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

import hf_kvtransfer
from hf_kvtransfer import FidelityGate, admission, fit_mapper

from .documents import CONTEXT
from .tiny_models import tiny_model
from .tiny_tokenizers import byte_level_bpe, unigram, wordpiece


def pytest_collection_modifyitems(items):
    """The real models first: they take longest, and another process runs the rest meanwhile."""
    items.sort(key=lambda item: item.path.name != "test_real_models.py")


@pytest.fixture(scope="session")
def tokenizers():
    """Tokenizers that cut text differently; `unigram` adds a BOS."""
    return {"bpe": byte_level_bpe(), "unigram": unigram(), "wordpiece": wordpiece()}


@pytest.fixture(scope="module")
def gemma():
    """A tiny model with sliding windows; tests of one module share it."""
    return tiny_model("gemma3")


@pytest.fixture(scope="module")
def llama():
    """A tiny model without; tests of one module share it."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def hub_folders(tokenizers, tmp_path_factory):
    """Folders and files under the names that README and docs give to models, mappers and data."""
    root = tmp_path_factory.mktemp("hub")
    models = {
        "org/source": (tiny_model("llama"), tokenizers["bpe"]),
        "org/target": (tiny_model("gemma3", seed=1), unigram(CONTEXT)),  # it must know all characters
    }
    for name, (model, tokenizer) in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    pieces = [piece[:400] for piece in CONTEXT.split("\n\n")]
    reply = {"role": "assistant", "content": "The harbour waits for the boats."}
    rows = {
        "held_out.jsonl": [{"text": piece} for piece in pieces[:3]],
        "dialogues.jsonl": [{"messages": [{"role": "user", "content": piece}, reply]} for piece in pieces[:3]],
    }
    for name, lines in rows.items():
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    # Texts are cut from it 2,000 characters at a time, and every tenth is held out.
    (root / "calibration.txt").write_text("\n\n".join(pieces * 8), encoding="utf-8")
    (root / "story.txt").write_text(CONTEXT[:300], encoding="utf-8")
    mapper = fit_mapper(
        models["org/source"][0],
        models["org/target"][0],
        pieces * 2,
        source_tokenizer=models["org/source"][1],
        target_tokenizer=models["org/target"][1],
        num_source_layers=1,
    )
    mapper.save_pretrained(root / "org/source-to-target")
    return root


@pytest.fixture
def in_hub_folders(hub_folders, tmp_path, monkeypatch):
    """A folder of this test's own in which these names are there."""
    for path in hub_folders.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_evidence_needed(monkeypatch):
    """Random models give none."""
    gate = functools.partial(FidelityGate, strict=False)
    monkeypatch.setattr(hf_kvtransfer, "FidelityGate", gate)
    monkeypatch.setattr(admission, "FidelityGate", gate)
