"""Conversations that are saved, loaded and damaged."""

import json

import pytest
import torch

from hf_kvtransfer import Conversation, ConversationError

from ..tiny_models import tiny_model
from .replies import QUESTIONS, UNGATED, assert_native, reply


def test_save_and_load(conversation, models, mappers, tmp_path):
    for turn, name in enumerate("abab"):
        reply(conversation, name, QUESTIONS[turn])
        conversation.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    loaded = Conversation.load(tmp_path, models, mappers, **UNGATED)
    assert loaded.messages == conversation.messages
    for name in "abc":
        assert loaded.readers(name) == conversation.readers(name)
        expected, answer = (reply(c, name, QUESTIONS[4]) for c in (conversation, loaded))
        assert torch.equal(answer.output.sequences, expected.output.sequences)
        assert answer.report.kept_tokens == expected.report.kept_tokens
        assert answer.report.translated_tokens == expected.report.translated_tokens
        assert_native(loaded, name, answer)
    # Another model under the same name, also of another shape.
    other = models | {"a": (tiny_model("qwen3", max_position_embeddings=2048), models["a"][1])}
    loaded = Conversation.load(tmp_path, other, **UNGATED)
    answer = reply(loaded, "a", QUESTIONS[4])
    assert answer.report.kept_tokens == 0
    assert_native(loaded, "a", answer)


def test_damaged_files(conversation, models, tmp_path):
    reply(conversation, "a", QUESTIONS[0])
    conversation.save(tmp_path)
    with pytest.raises(ConversationError, match=r"was saved with models \['a'\].*\['b'\]"):
        Conversation.load(tmp_path, {"b": models["b"]})
    (file,) = tmp_path.glob("*.safetensors")
    state = json.loads((tmp_path / "conversation.json").read_text())
    for change in ({"format": "another"}, {"messages": None}, {"num_turns": "x"}, {"models": {"a": {}}}):
        (tmp_path / "conversation.json").write_text(json.dumps(state | change))
        with pytest.raises(ConversationError, match="cannot be read as a saved conversation"):
            Conversation.load(tmp_path, models)
    for key, value in (("ids", [1, 2]), ("file", "../elsewhere.safetensors"), ("identity", {}), ("spans", [[1]])):
        changed = state | {"models": {"a": state["models"]["a"] | {key: value}}}
        (tmp_path / "conversation.json").write_text(json.dumps(changed))
        with pytest.raises(ConversationError, match="cannot be read as a saved conversation"):
            Conversation.load(tmp_path, models)
    (tmp_path / "conversation.json").write_text(json.dumps(state))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConversationError, match="cannot be read as a saved conversation"):
        Conversation.load(tmp_path, models)
    with pytest.raises(ConversationError, match="cannot be read as a saved conversation"):
        Conversation.load(tmp_path / "nowhere", models)
