"""What the end of a prompt attends to in a cache."""

import pytest
import torch

from hf_kvtransfer.compat import filled_cache
from hf_kvtransfer.layers import PendingLayer
from hf_kvtransfer.question_attention import MAX_QUESTION, MIN_QUESTION, question_attention

from .generation.families import build
from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache


# Longer than the windows of the tiny Gemma.
LENGTH = 45


def given_to(model, ids, length):
    """What a prefill with attention written out gives the first tokens from the last one."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return torch.stack([weights[:, :, -1, :length].amax(1) for weights in attentions]).mean(0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
def test_as_a_prefill_has_it(family, attention):
    model = tiny_model(family) if family in ("llama", "gemma3") else build(family)
    model.set_attn_implementation(attention)
    ids = random_ids(model, 2, LENGTH + 7)
    cache = filled_cache(model, ids[:, :LENGTH])
    before = [(layer.keys, layer.keys.clone()) for layer in cache.layers]
    torch.testing.assert_close(question_attention(model, cache, ids), given_to(model, ids, LENGTH), rtol=0, atol=1e-5)
    assert cache.get_seq_length() == LENGTH
    for layer, (keys, then) in zip(cache.layers, before, strict=True):
        assert layer.keys is keys and torch.equal(keys, then)


def test_a_score_that_reads_nothing_is_none_of_the_tokens():
    model = build("gpt-oss")
    model.set_attn_implementation("eager")
    ids = random_ids(model, 1, LENGTH + 7)
    weights = question_attention(model, filled_cache(model, ids[:, :LENGTH]), ids)
    assert weights.shape == (1, LENGTH) and 0 < weights.max() < 1


def test_pending_layers(llama):
    ids = random_ids(llama, 1, LENGTH + 7)
    source_kv = filled_cache(llama, ids[:, :LENGTH])
    given = {"source_model": llama, "source_input_ids": ids[:, :LENGTH]}
    cache = ungated_cache(source_kv, identity_mapper(llama), llama, tail_tokens=0, **given)
    weights = question_attention(llama, cache, ids)
    torch.testing.assert_close(weights, given_to(llama, ids, LENGTH), rtol=0, atol=1e-5)
    assert not any(isinstance(layer, PendingLayer) for layer in cache.layers)


def test_too_little_is_no_question_and_of_much_the_end_is(llama):
    ids = random_ids(llama, 1, LENGTH + MAX_QUESTION + 20)
    cache = filled_cache(llama, ids[:, :LENGTH])
    assert question_attention(llama, cache, ids[:, : LENGTH + MIN_QUESTION - 1]) is None
    assert question_attention(llama, cache, ids[:, : LENGTH + MIN_QUESTION]) is not None
    # What stands between is not read: it may say anything.
    other = ids.clone()
    other[:, LENGTH : LENGTH + 20] = 5
    assert torch.equal(question_attention(llama, cache, ids), question_attention(llama, cache, other))


def test_attention_that_cannot_be_heard(llama, monkeypatch):
    monkeypatch.setattr("hf_kvtransfer.question_attention.scaled_dot_product_attention", None)
    ids = random_ids(llama, 1, LENGTH + 7)
    assert question_attention(llama, filled_cache(llama, ids[:, :LENGTH]), ids) is None
