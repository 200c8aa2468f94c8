import copy

import pytest
import torch

from hf_kvtransfer import FidelityGate, TransferPolicy, UnknownModelError
from hf_kvtransfer.agents import FixedRoutes, TransformersBackend, compare, sample_trajectory

from ..policy.test_policy import COSTS
from ..tiny_models import identity_mapper, tiny_model
from ..tiny_tokenizers import byte_level_bpe
from .desk import SmallTalk


# More than a reply has: its tokens need not be those of its text, and then what was read is not quite the same.
MIN_TOKENS = 12
UNGATED = {"gate": FidelityGate(strict=False), "min_tokens": MIN_TOKENS}
TOKENIZER = byte_level_bpe()
NOT_ASCII = [token for token in range(len(TOKENIZER)) if not TOKENIZER.decode([token]).isascii()]
OPTIONS = {
    "conversation": UNGATED,
    "max_new_tokens": 6,
    "do_sample": False,
    "pad_token_id": 0,
    "suppress_tokens": NOT_ASCII,
}
SAID = ("The farmers wait for the flood by the river.", "What does the delta give to all of them?", "And who else?")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(request):
    """Two copies of a model, so that the identity translates exactly; one family has windows."""
    model = tiny_model(request.param)
    return {"a": (model, TOKENIZER), "b": (copy.deepcopy(model), TOKENIZER)}


def talk():
    return SmallTalk(SAID)


def both_ways(pair):
    mapper = identity_mapper(pair["a"][0])
    return {("a", "b"): mapper, ("b", "a"): mapper}


def take_turns():
    return FixedRoutes(["a", "b"], cycle=True)


def test_each_model_is_handed_what_the_other_has_read(pair):
    backend = TransformersBackend(pair, both_ways(pair), **OPTIONS)
    trajectory = sample_trajectory(talk(), take_turns(), backend)
    first, second, third = trajectory.turns
    assert (first.cache.held_tokens, first.cache.translated_tokens) == (0, {})
    assert second.cache.translated_tokens["a"] >= MIN_TOKENS
    assert third.cache.held_tokens >= len(first.input_ids)
    assert third.cache.translated_tokens["b"] > 0
    for turn in trajectory.turns:
        use = turn.cache
        assert use.held_tokens + sum(use.translated_tokens.values()) + use.read_tokens == len(turn.input_ids)
    readers = backend.handles["b"].readers
    assert len(readers) == len(second.input_ids) + len(second.output_ids)
    assert readers.count("a") == second.cache.translated_tokens["a"]


def test_translated_and_native_play_the_same(pair):
    native = TransformersBackend(pair, **OPTIONS)
    translated = TransformersBackend(pair, both_ways(pair), **OPTIONS)
    (outcome,) = compare([talk], take_turns(), native, translated).outcomes
    assert outcome.is_same
    assert outcome.native.translated_tokens == 0 < outcome.translated.translated_tokens
    assert outcome.translated.read_tokens < outcome.native.read_tokens
    for own, other in zip(outcome.native.turns, outcome.translated.turns, strict=True):
        assert (own.input_ids, own.output_ids) == (other.input_ids, other.output_ids)
        assert len(own.output_ids) == 6


def test_a_wrong_mapper_plays_otherwise(pair):
    mappers = both_ways(pair)
    with torch.no_grad():
        for weight in mappers["a", "b"].parameters():
            weight.mul_(-1)
    native, translated = TransformersBackend(pair, **OPTIONS), TransformersBackend(pair, mappers, **OPTIONS)
    assert not compare([talk], take_turns(), native, translated).outcomes[0].is_same


def test_gate_is_asked(pair, recwarn):
    backend = TransformersBackend(pair, both_ways(pair), **OPTIONS | {"conversation": {"min_tokens": MIN_TOKENS}})
    turn = sample_trajectory(talk(), take_turns(), backend, max_turns=2).turns[1]
    assert turn.cache.translated_tokens == {}
    assert any("it has no evidence" in reason for reason in turn.cache.reasons)


def test_policy_is_asked(pair):
    policies = {("a", "b"): TransferPolicy(COSTS)}
    backend = TransformersBackend(
        pair, both_ways(pair), **OPTIONS | {"conversation": UNGATED | {"policies": policies}}
    )
    second, third = sample_trajectory(talk(), take_turns(), backend).turns[1:]
    assert second.cache.translated_tokens == {}
    assert any("are not worth a handoff" in reason for reason in second.cache.reasons)
    assert third.cache.translated_tokens["b"] > 0  # of this direction nobody was asked


def test_crash_while_a_model_replies(pair, monkeypatch):
    expected = sample_trajectory(talk(), take_turns(), TransformersBackend(pair, **OPTIONS))
    backend, environment = TransformersBackend(pair, both_ways(pair), **OPTIONS), talk()
    trajectory = sample_trajectory(environment, take_turns(), backend, max_turns=1)
    before = backend.handles
    with monkeypatch.context() as broken:
        broken.setattr(type(pair["b"][0]), "generate", None)
        with pytest.raises(TypeError):
            sample_trajectory(environment, take_turns(), backend, trajectory=trajectory)
    assert backend.handles == before
    sample_trajectory(environment, take_turns(), backend, trajectory=trajectory)
    assert [turn.text for turn in trajectory.turns] == [turn.text for turn in expected.turns]
    assert trajectory.turns[1].cache.translated_tokens["a"] > 0


def test_dialogue_that_was_edited_behind_its_back(pair):
    native, translated = TransformersBackend(pair, **OPTIONS), TransformersBackend(pair, both_ways(pair), **OPTIONS)
    for text in (SAID[0], f"{SAID[0]} For long.", "Zwölf Boxkämpfer jagen."):
        messages = [{"role": "user", "content": text}]
        native.reset()
        for model in ("a", "b"):
            assert native.generate(model, messages).output_ids == translated.generate(model, messages).output_ids


def test_unknown_names(pair):
    mapper = identity_mapper(pair["a"][0])
    for options in ({"mappers": {("a", "c"): mapper}}, {"conversation": {"policies": {("c", "a"): None}}}):
        with pytest.raises(UnknownModelError, match="'c'"):
            TransformersBackend(pair, **options)
    backend = TransformersBackend(pair, **OPTIONS)
    for call in (backend.tokens, backend.generate):
        with pytest.raises(UnknownModelError, match="'c'"):
            call("c", talk().observe())
    assert backend.handles == {}


def test_mappers_are_loaded_once(pair, tmp_path):
    mapper = both_ways(pair)["a", "b"]
    mapper.save_pretrained(tmp_path)
    backend = TransformersBackend(pair, {("a", "b"): tmp_path}, **OPTIONS)
    (tmp_path / "config.json").unlink()
    trajectory = sample_trajectory(talk(), take_turns(), backend, max_turns=2)
    assert trajectory.turns[1].cache.translated_tokens["a"] > 0
