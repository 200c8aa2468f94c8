import copy

import pytest
import torch

from hf_kvtransfer import FidelityGate, KVMapper, TransferPolicy, UnknownModelError
from hf_kvtransfer.agents import FixedRoutes, TransformersBackend, compare, sample_trajectory
from hf_kvtransfer.tokenizer_identity import tokenizer_fingerprint

from ..policy.test_policy import COSTS
from ..tiny_models import fail_from_layer, identity_mapper, tiny_model
from .desk import SmallTalk


OPTIONS = {"gate": FidelityGate(strict=False), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(request, tokenizers):
    """Two copies of a model, so that the identity translates exactly; one family has windows."""
    model = tiny_model(request.param)
    return {"a": (model, tokenizers["bpe"]), "b": (copy.deepcopy(model), tokenizers["bpe"])}


def exact(pair):
    return identity_mapper(pair["a"][0])


def take_turns():
    return FixedRoutes(["a", "b"], cycle=True)


def test_second_model_takes_over_what_the_first_has_read(pair):
    backend = TransformersBackend(pair, {("a", "b"): exact(pair)}, **OPTIONS)
    trajectory = sample_trajectory(SmallTalk(), take_turns(), backend)
    first, second, third = (turn.cache for turn in trajectory.turns)
    assert (first.held_tokens, first.translated_tokens) == (0, 0)
    # All that the first has read and written, but for the first tokens and the last one.
    assert second.source == "a"
    read = len(trajectory.turns[0].input_ids)
    assert read - 8 < second.translated_tokens <= read + 6
    assert second.translated_tokens + second.read_tokens == len(trajectory.turns[1].input_ids)
    # Back to its own cache.
    assert third.held_tokens >= read
    assert third.translated_tokens == 0
    assert backend.handles["a"].is_native and not backend.handles["b"].is_native


def test_translated_and_native_play_the_same(pair):
    native = TransformersBackend(pair, **OPTIONS)
    translated = TransformersBackend(pair, {("a", "b"): exact(pair), ("b", "a"): exact(pair)}, **OPTIONS)
    comparison = compare([SmallTalk], take_turns(), native, translated)
    (outcome,) = comparison.outcomes
    assert outcome.is_same
    assert outcome.native.translated_tokens == 0 < outcome.translated.translated_tokens
    assert outcome.translated.read_tokens < outcome.native.read_tokens
    assert [turn.output_ids for turn in outcome.native.turns] == [turn.output_ids for turn in outcome.translated.turns]


def test_a_wrong_mapper_plays_otherwise(pair):
    mapper = exact(pair)
    with torch.no_grad():
        for weight in mapper.parameters():
            weight.mul_(-1)
    comparison = compare(
        [SmallTalk],
        take_turns(),
        TransformersBackend(pair, **OPTIONS),
        TransformersBackend(pair, {("a", "b"): mapper}, **OPTIONS),
    )
    assert not comparison.outcomes[0].is_same


def test_a_translation_is_not_translated_again(pair, tokenizers):
    models = {**pair, "c": (copy.deepcopy(pair["a"][0]), tokenizers["bpe"])}
    backend = TransformersBackend(models, {("a", "b"): exact(pair), ("b", "c"): exact(pair)}, **OPTIONS)
    trajectory = sample_trajectory(SmallTalk(), FixedRoutes(["a", "b", "c"]), backend)
    assert [turn.cache.source for turn in trajectory.turns] == [None, "a", None]
    assert trajectory.turns[2].cache.read_tokens == len(trajectory.turns[2].input_ids)
    assert backend.handles["c"].is_native


def test_other_tokenizer(tokenizers):
    model = tiny_model("llama")
    models = {"a": (model, tokenizers["bpe"]), "b": (model, tokenizers["unigram"])}
    mapper = identity_mapper(model)
    for side, name in (("source", "bpe"), ("target", "unigram")):
        described = getattr(mapper.config, side) | {"tokenizer": tokenizer_fingerprint(tokenizers[name])}
        setattr(mapper.config, side, described)
    backend = TransformersBackend(models, {("a", "b"): mapper}, **OPTIONS)
    trajectory = sample_trajectory(SmallTalk(), take_turns(), backend)
    assert trajectory.turns[1].cache.translated_tokens > 0
    assert trajectory.turns[1].input_ids[0] == tokenizers["unigram"].bos_token_id


def test_gate_and_policy_are_asked(pair, recwarn):
    mapper = exact(pair)
    backend = TransformersBackend(pair, {("a", "b"): mapper}, **OPTIONS | {"gate": None})
    turn = sample_trajectory(SmallTalk(), take_turns(), backend, max_turns=2).turns[1]
    assert turn.cache.source == "a" and "it has no evidence" in turn.cache.reasons[0]
    assert turn.cache.read_tokens == len(turn.input_ids)
    assert backend.handles["b"].is_native
    policies = {("a", "b"): TransferPolicy(COSTS)}
    backend = TransformersBackend(pair, {("a", "b"): mapper}, policies=policies, **OPTIONS)
    turn = sample_trajectory(SmallTalk(), take_turns(), backend, max_turns=2).turns[1]
    assert turn.cache.reasons[0].startswith("recompute: ")


def test_crash_between_translation_and_reply(pair, monkeypatch):
    expected = sample_trajectory(SmallTalk(), take_turns(), TransformersBackend(pair, **OPTIONS))
    backend = TransformersBackend(pair, {("a", "b"): exact(pair)}, **OPTIONS)
    environment = SmallTalk()
    trajectory = sample_trajectory(environment, take_turns(), backend, max_turns=1)
    with monkeypatch.context() as broken:
        broken.setattr(type(pair["b"][0]), "generate", None)
        with pytest.raises(TypeError):
            sample_trajectory(environment, take_turns(), backend, trajectory=trajectory)
    assert "b" not in backend.handles and backend.handles["a"].is_native
    sample_trajectory(environment, take_turns(), backend, trajectory=trajectory)
    assert [turn.text for turn in trajectory.turns] == [turn.text for turn in expected.turns]
    assert trajectory.turns[1].cache.translated_tokens > 0


def test_translation_that_fails(pair, monkeypatch, recwarn):
    expected = sample_trajectory(SmallTalk(), take_turns(), TransformersBackend(pair, **OPTIONS))
    fail_from_layer(monkeypatch, 0)
    backend = TransformersBackend(pair, {("a", "b"): exact(pair)}, **OPTIONS)
    trajectory = sample_trajectory(SmallTalk(), take_turns(), backend)
    assert [turn.text for turn in trajectory.turns] == [turn.text for turn in expected.turns]


def test_dialogue_that_was_edited_behind_its_back(pair):
    """What differs is read again."""
    native = TransformersBackend(pair, **OPTIONS)
    backend = TransformersBackend(pair, {("a", "b"): exact(pair)}, **OPTIONS)
    messages = SmallTalk().observe()
    for text in ("The farmers wait.", "The farmers wait for long.", "Zwölf Boxkämpfer jagen."):
        messages = [{"role": "user", "content": text}]
        replies = []
        for each in (native, backend):
            for model in ("a", "b"):
                ids = each.tokens(model, messages)
                each.transfer(model, ids)
                replies.append(each.generate(model, ids))
            if each is native:
                each.reset()
        assert replies[:2] == replies[2:]


def test_unknown_names(pair):
    with pytest.raises(UnknownModelError, match="no model 'c', there are a, b"):
        TransformersBackend(pair, {("a", "c"): exact(pair)})
    backend = TransformersBackend(pair, **OPTIONS)
    for call in (
        lambda: backend.tokens("c", []),
        lambda: backend.transfer("c", [1, 2]),
        lambda: backend.generate("c", [1, 2]),
        lambda: backend.text("c", [1]),
    ):
        with pytest.raises(UnknownModelError):
            call()
    assert backend.handles == {}


def test_mappers_are_loaded_once(pair, tmp_path):
    exact(pair).save_pretrained(tmp_path)
    backend = TransformersBackend(pair, {("a", "b"): tmp_path}, **OPTIONS)
    assert all(isinstance(mapper, KVMapper) for mapper in backend._mappers.values())
    trajectory = sample_trajectory(SmallTalk(), take_turns(), backend, max_turns=2)
    assert trajectory.turns[1].cache.translated_tokens > 0
