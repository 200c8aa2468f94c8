"""examples/agents.py, on tiny models in place of the demo's."""

import re
from pathlib import Path

from hf_kvtransfer import KVMapper, demo_models

from ..tiny_models import identity_mapper, tiny_model


def test_agents(run_example, monkeypatch, tokenizers):
    model = tiny_model("llama", max_position_embeddings=4096)
    mapper = identity_mapper(model)
    monkeypatch.setattr(demo_models, "load_demo_model", lambda name: (model, tokenizers["bpe"]))
    monkeypatch.setattr(KVMapper, "from_pretrained", lambda *args, **kwargs: mapper)
    story = "The keeper of the light wrote down each ship. " * 6
    monkeypatch.setattr(Path, "read_text", lambda self, encoding="utf-8": story)
    output = run_example("agents.py")
    counts = [
        tuple(map(int, found))
        for found in re.findall(r"(\d+) tokens, (\d+) in its cache, (\d+) translated, (\d+) read", output)
    ]
    assert len(counts) == 6
    assert all(sum(parts) == tokens for tokens, *parts in counts)
    (_, taken_over, again) = counts[:3]
    assert taken_over[2] > 100 and again[1] > 100
    assert all(translated == 0 for _, _, translated, _ in counts[3:])
    assert "score 1.000 translated, 1.000 native, difference +0.000" in output
