"""examples/agents.py, on tiny models in place of the demo's."""

import re
import runpy
from pathlib import Path

import hf_kvtransfer
from hf_kvtransfer import FidelityGate, KVMapper, demo_models

from ..tiny_models import identity_mapper, tiny_model


def test_agents(monkeypatch, tokenizers, capsys):
    model = tiny_model("llama", max_position_embeddings=4096)
    mapper = identity_mapper(model)
    monkeypatch.setattr(demo_models, "load_demo_model", lambda name: (model, tokenizers["bpe"]))
    monkeypatch.setattr(KVMapper, "from_pretrained", lambda *args, **kwargs: mapper)
    story = "The keeper of the light wrote down each ship. " * 6
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: story)
    monkeypatch.setattr(hf_kvtransfer, "FidelityGate", lambda **options: FidelityGate(strict=False))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "agents.py"), run_name="__main__")
    output = capsys.readouterr().out
    counts = [
        tuple(map(int, found))
        for found in re.findall(r"(\d+) tokens, (\d+) in its cache, (\d+) translated, (\d+) read", output)
    ]
    assert len(counts) == 6
    assert all(sum(parts) == tokens for tokens, *parts in counts)
    (_, taken_over, again) = counts[:3]
    assert taken_over[2] > 100 and again[1] > 100
    assert all(translated == 0 for _, _, translated, _ in counts[3:])
    # The identity is exact.
    assert "1 are the same word for word" in output
