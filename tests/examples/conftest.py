import json
import runpy
import sys

import pytest
import torch

from ..documents import CONTEXT, ROOT
from ..tiny_models import identity_mapper, random_ids, tiny_model


EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def pair(tokenizers, tmp_path_factory):
    """A folder with a `model` that is source and target, its exact `mapper`, and text."""
    root = tmp_path_factory.mktemp("pair")
    model = tiny_model("llama", intermediate_size=128)  # whole blocks of 64, for bitsandbytes
    model.save_pretrained(root / "model")
    tokenizers["bpe"].save_pretrained(root / "model")
    identity_mapper(model).save_pretrained(root / "mapper")
    (root / "context.txt").write_text(CONTEXT[:400], encoding="utf-8")
    pieces = [piece[:400] for piece in CONTEXT.split("\n\n")]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces * 3))
    torch.manual_seed(0)
    ids = model.generate(random_ids(model, 4, 8), max_new_tokens=330, do_sample=True, top_k=0, pad_token_id=0)
    (root / "own.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
    return root


@pytest.fixture
def run_example(pair, tmp_path, monkeypatch, capsys, no_evidence_needed):
    """Runs a script in an empty folder, with paths in place of names in braces, and gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        names = {path.stem: str(path) for path in pair.iterdir()}
        monkeypatch.setattr(sys, "argv", [name, *(argument.format_map(names) for argument in arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run
