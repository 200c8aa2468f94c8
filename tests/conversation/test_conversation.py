"""Conversations that move between models: planted ones, so that every turn must be as native."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvtransfer import (
    Conversation,
    ConversationError,
    EvaluationDataError,
    FidelityGate,
    TranslatedCache,
    UnknownModelError,
)
from hf_kvtransfer.compat import read_into_cache, token_losses
from hf_kvtransfer.conversation import conversation as conversation_module
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint

from ..tiny_models import random_mapper, tiny_model
from ..tiny_tokenizers import SENTENCES
from .replies import ANSWERS, QUESTIONS, UNGATED, assert_native, reply


@given(order=st.lists(st.sampled_from("abc"), min_size=12, max_size=12))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_twelve_turns_in_any_order_are_as_native(models, mappers, order):
    conversation = Conversation(models, mappers, **UNGATED)
    translated = {}
    for turn, name in enumerate(order):
        answer = reply(conversation, name, QUESTIONS[turn % len(QUESTIONS)])
        assert_native(conversation, name, answer)
        assert answer.report.reasons == ()
        for source, tokens in answer.report.translated_tokens.items():
            translated[source, name] = translated.get((source, name), 0) + tokens
    for name in set(order):
        readers = conversation.readers(name)
        assert readers[:4] == [name] * 4
        # Tokens are translated once, and are the only ones that the model has not read itself.
        assert {source: readers.count(source) for source in set(readers) - {name}} == {
            source: tokens for (source, target), tokens in translated.items() if target == name and tokens
        }
    if len(set(order)) > 1:
        assert sum(translated.values()) > 0


def test_each_model_finds_its_own_cache(templates, mappers):
    conversation = Conversation(templates, mappers, **UNGATED)
    first = reply(conversation, "a", QUESTIONS[0])
    assert (first.report.kept_tokens, first.report.translated_tokens) == (0, {})
    assert first.report.transfer is None
    assert_native(conversation, "a", first)
    held = len(conversation.readers("a"))
    second = reply(conversation, "b", QUESTIONS[2])
    assert second.report.kept_tokens == 0
    # What `a` has read and said; but what `b` reads first it reads itself.
    assert second.report.translated_tokens["a"] > 20
    assert second.report.transfer.outcome == "translated"
    third = reply(conversation, "a", QUESTIONS[2])
    # All of it, up to where its template goes on behind the reply.
    assert third.report.kept_tokens == held
    # The last question of the user and the reply to it are all that `a` lacks and `b` has read.
    tokens = sum(len(templates["a"][1](text).input_ids) for text in (QUESTIONS[2], second.text))
    assert third.report.translated_tokens["b"] == tokens
    assert str(third.report).startswith(f"a: {held} tokens kept, {tokens} translated from b, ")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3
    assert conversation.messages[3]["content"] == second.text == str(second) == ANSWERS[1]
    assert conversation.turns == [first.report, second.report, third.report]


def test_a_translation_is_not_translated_again(models, mappers):
    """`c` can have from `b` only what `b` has read, and has no mapper for the rest."""
    conversation = Conversation(models, {pair: m for pair, m in mappers.items() if pair != ("a", "c")}, **UNGATED)
    reply(conversation, "a", QUESTIONS[0])
    reply(conversation, "b", QUESTIONS[1])
    third = reply(conversation, "c", QUESTIONS[2])
    assert set(third.report.translated_tokens) == {"b"}
    assert third.report.reasons == ("there is no mapper from a to c",)
    assert_native(conversation, "c", third)
    readers, of_b = conversation.readers("c"), conversation.readers("b")
    assert {of_b[i] for i, reader in enumerate(readers[: len(of_b)]) if reader == "b"} == {"b"}
    assert {readers[i] for i, reader in enumerate(of_b) if reader == "a"} == {"c"}


def test_templates_that_differ_are_read(models, templates, mappers):
    """And nothing is read again between messages where two models have the same one."""
    for members, shared in ((models, True), (templates, False)):
        conversation = Conversation(members, mappers, **UNGATED)
        reply(conversation, "a", QUESTIONS[0])
        reply(conversation, "a", QUESTIONS[1])
        reply(conversation, "b", QUESTIONS[2])
        readers = conversation.readers("b")
        first, last = readers.index("a"), len(readers) - readers[::-1].index("a")
        assert (set(readers[first:last]) == {"a"}) is shared


def test_short_runs_are_read(models, mappers):
    conversation = Conversation(models, mappers, gate=FidelityGate(strict=False), min_tokens=200)
    reply(conversation, "a", "Fish?")
    assert reply(conversation, "b", "And silt?").report.translated_tokens == {}


def test_what_the_gate_refuses_is_read(models, mappers):
    conversation = Conversation(models, mappers, min_tokens=1)
    reply(conversation, "a", QUESTIONS[0])
    answer = reply(conversation, "b", QUESTIONS[1])
    assert answer.report.translated_tokens == {}
    assert "it has no evidence" in answer.report.reasons[0]
    assert answer.report.transfer.outcome == "recomputed"
    assert_native(conversation, "b", answer)
    # What is its own stays.
    assert_native(conversation, "b", again := reply(conversation, "b", QUESTIONS[2]))
    assert again.report.kept_tokens > 20


def test_what_is_read_again_is_the_models_own(models, mappers):
    conversations = [Conversation(models, mappers, **UNGATED, effort=effort) for effort in (0.0, 0.4)]
    for turn, name in enumerate("abab"):
        plain, again = (reply(conversation, name, QUESTIONS[turn]) for conversation in conversations)
        assert_native(conversations[1], name, again)
        counts = [sum(answer.report.translated_tokens.values()) for answer in (plain, again)]
        assert counts[0] > counts[1] > 0 if turn else counts == [0, 0]
        if turn:
            assert again.report.transfer.effort == 0.4
    with pytest.raises(ValueError, match="`effort`"):
        Conversation(models, effort=2)


@pytest.mark.parametrize(("effort", "counted"), [(0.4, 0.4), ("auto", 0.0)])
def test_a_policy_is_told_the_effort_and_what_follows(models, mappers, effort, counted):
    asked = []

    def decide(*request):
        asked.append(request)
        return SimpleNamespace(choice="recompute", reason="for once")

    policies = {("a", "b"): SimpleNamespace(decide=decide)}
    conversation = Conversation(models, mappers, **UNGATED, effort=effort, policies=policies)
    reply(conversation, "a", QUESTIONS[0])
    report = reply(conversation, "b", QUESTIONS[1]).report
    assert report.translated_tokens == {}
    assert "not worth a handoff: for once" in report.reasons[0]
    tokens, batch_size, known, question = asked[0]
    assert (batch_size, known) == (1, counted)
    assert question > 0
    assert 0 < tokens < report.native_tokens - question  # the first tokens stand before them


def test_between_tokenizers(tokenizers):
    """Whatever the mapper is worth, texts are found and counts add up."""
    source, target = (tiny_model(name, max_position_embeddings=2048) for name in ("llama", "gemma3"))
    names = [tokenizer_fingerprint(tokenizers[name]) for name in ("bpe", "unigram")]
    models = {"a": (source, tokenizers["bpe"]), "b": (target, tokenizers["unigram"])}
    mappers = {("a", "b"): random_mapper(source, target, names)}
    conversation = Conversation(models, mappers, **UNGATED)
    for turn, name in enumerate("abab"):
        report = conversation.reply(name, QUESTIONS[turn % 2], max_new_tokens=5, do_sample=False).report
        prompt = len(conversation.readers(name)) - report.reply_tokens
        assert report.kept_tokens + sum(report.translated_tokens.values()) + report.native_tokens == prompt
    assert report.translated_tokens["a"] > 20
    assert report.kept_tokens > 40


def test_messages_that_were_changed(conversation):
    reply(conversation, "a", QUESTIONS[0])
    reply(conversation, "a", QUESTIONS[1])
    conversation.messages[2]["content"] = QUESTIONS[5]
    answer = reply(conversation, "b", QUESTIONS[2])
    assert_native(conversation, "b", answer)
    readers = conversation.readers("b")
    text = conversation.models["b"][1].decode(answer.output.sequences[0][: readers.index("a") + readers.count("a")])
    assert QUESTIONS[5] not in text
    # A reply that is taken back, and given by another.
    conversation.messages.pop()
    answer = reply(conversation, "a")
    assert answer.report.kept_tokens > 20
    assert_native(conversation, "a", answer)
    assert len(conversation.messages) == 6


def test_a_model_with_other_weights_begins_anew(models, mappers):
    changed = {name: (copy.deepcopy(model), tokenizer) for name, (model, tokenizer) in models.items()}
    conversation = Conversation(changed, mappers, **UNGATED)
    reply(conversation, "a", QUESTIONS[0])
    reply(conversation, "b", QUESTIONS[1])
    for name in ("a", "b"):
        with torch.no_grad():
            changed[name][0].model.layers[1].mlp.up_proj.weight.mul_(1.5)
    answer = reply(conversation, "a", QUESTIONS[2])
    assert (answer.report.kept_tokens, answer.report.translated_tokens) == (0, {})
    assert [reason[:18] for reason in answer.report.reasons] == ["a is another model", "b is another model"]
    assert "weights changed (model.layers.1.mlp.up_proj.weight differs)" in answer.report.reasons[0]
    assert_native(conversation, "a", answer)
    assert conversation.readers("b") == []


@pytest.mark.parametrize("where", ["generate", "from_segments", "hold_all"])
def test_a_failure_leaves_everything_as_it_was(conversation, monkeypatch, where):
    reply(conversation, "a", QUESTIONS[0])
    reply(conversation, "b", QUESTIONS[1])
    before = json.dumps([conversation.messages, conversation.readers("a"), conversation.readers("b")])

    def broken(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "from_segments":
            patch.setattr(TranslatedCache, where, broken)
        else:
            patch.setattr(conversation_module, where, broken)
        with pytest.raises(KeyboardInterrupt):
            reply(conversation, "a", QUESTIONS[2])
    assert json.dumps([conversation.messages, conversation.readers("a"), conversation.readers("b")]) == before
    answer = reply(conversation, "a", QUESTIONS[2])
    assert answer.report.translated_tokens["b"] > 10
    assert_native(conversation, "a", answer)


def test_a_generation_that_is_interrupted(conversation):
    """With its layers filled already."""
    reply(conversation, "a", QUESTIONS[0])

    class Stop:
        def put(self, value):
            raise KeyboardInterrupt if len(value.flatten()) == 1 else None

        def end(self):
            """Never reached."""

    for name in ("a", "b"):
        with pytest.raises((KeyboardInterrupt, TypeError)):
            reply(conversation, name, QUESTIONS[1], streamer=Stop())
        assert_native(conversation, name, reply(conversation, name, QUESTIONS[1]))


def test_the_ceiling_of_memory(conversation):
    for turn, name in enumerate("abc"):
        reply(conversation, name, QUESTIONS[turn])
    whole = int(1.2 * conversation.num_bytes())
    conversation.max_bytes = whole
    answer = reply(conversation, "b", QUESTIONS[3])
    assert answer.report.evicted == ("a",)
    assert conversation.readers("a") == []
    assert conversation.num_bytes() <= whole
    assert "the cache of a was given up" in str(answer.report)
    # Anew, from what others have read.
    answer = reply(conversation, "a", QUESTIONS[4])
    assert answer.report.kept_tokens == 0
    assert set(answer.report.translated_tokens) == {"b", "c"}
    assert_native(conversation, "a", answer)
    conversation.max_bytes = 0
    assert set(reply(conversation, "a", QUESTIONS[5]).report.evicted) >= {"a"}
    assert conversation.num_bytes() == 0
    conversation.max_bytes = None
    assert_native(conversation, "b", reply(conversation, "b", QUESTIONS[3]))


def test_beams_and_assisted_decoding(models, mappers):
    for options, dropped in (({"num_beams": 3}, False), ({"prompt_lookup_num_tokens": 2}, True)):
        conversation = Conversation(models, mappers, **UNGATED)
        reply(conversation, "a", QUESTIONS[0])
        answer = conversation.reply("b", QUESTIONS[1], max_new_tokens=6, do_sample=False, **options)
        assert bool(answer.report.reasons) is dropped
        assert len(conversation.readers("b")) == (0 if dropped else answer.output.shape[1])
        # What it has said is no text, and is read by whoever comes next.
        for name in "ba":
            assert_native(conversation, name, reply(conversation, name, QUESTIONS[2]))


def test_a_reply_that_is_given(conversation):
    reply(conversation, "a", QUESTIONS[0])
    answer = conversation.read_reply("b", QUESTIONS[1], SENTENCES[0])
    assert answer.text == conversation.messages[-1]["content"] == SENTENCES[0]
    assert answer.report.translated_tokens["a"] > 20
    model, tokenizer = conversation.models["b"]
    ids = torch.tensor([conversation._logs["b"].read.ids])
    n = len(answer.losses)
    assert tokenizer.decode(ids[0, -n:]) == SENTENCES[0]
    logits = read_into_cache(model, TranslatedCache.from_segments([], model, ids), ids, num_logits=n + 1)
    expected = token_losses(logits[:, :-1], ids[:, -n:])[0].tolist()
    assert answer.losses == pytest.approx(expected, abs=1e-3)
    assert_native(conversation, "a", reply(conversation, "a", QUESTIONS[2]))


def test_a_model_without_a_template_does_not_speak_for_others(templates, monkeypatch):
    """It goes on with the next message, which is not part of its reply."""
    conversation = Conversation(templates)
    said = " The silt.\n\nUser: And the fish?\n\nAssistant: Fish"
    tokenizer = templates["c"][1]
    new = tokenizer(said, return_tensors="pt").input_ids

    def generated(model, inputs, cache, **options):
        sequences = torch.cat([inputs["input_ids"], new], 1)
        read_into_cache(model, cache, sequences[:, :-1])
        return sequences

    with monkeypatch.context() as patch:
        patch.setattr(conversation_module, "generate", generated)
        answer = conversation.reply("c", QUESTIONS[0])
    assert answer.text == conversation.messages[1]["content"] == "The silt."
    answer = reply(conversation, "c", QUESTIONS[2])
    prompt = tokenizer.decode(answer.output.sequences[0, : -answer.report.reply_tokens])
    assert prompt == f"User: {QUESTIONS[0]}\n\nAssistant: The silt.\n\nUser: {QUESTIONS[2]}\n\nAssistant:"
    assert_native(conversation, "c", answer)


def test_wrong_arguments(models, mappers, conversation):
    with pytest.raises(UnknownModelError, match=r"no model 'd' in the conversation, only \['a', 'b', 'c'\]"):
        conversation.reply("d", "Hello")
    with pytest.raises(UnknownModelError, match="no model 'c'"):
        Conversation({"a": models["a"]}, {("a", "c"): mappers["a", "c"]})
    with pytest.raises(ConversationError, match="nothing to reply to"):
        conversation.reply("a")
    with pytest.raises(EvaluationDataError, match="unknown role 'judge'"):
        conversation.reply("a", {"role": "judge", "content": "Hello"})
    with pytest.raises(ConversationError, match="gave 2 replies"):
        conversation.reply("a", "Hello", do_sample=True, num_return_sequences=2, max_new_tokens=2)
    with pytest.raises(ConversationError, match="has no tokens"):
        conversation.read_reply("a", "Hello", " ")
    assert conversation.messages == []
    assert_native(conversation, "a", reply(conversation, "a", "Hello"))
    with pytest.raises(ConversationError, match="nothing to reply to"):
        conversation.reply("b")
