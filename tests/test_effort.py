"""How much of a translated context the target reads again."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_kvtransfer import BatchMismatchError, FidelityGate, Segment, SourceKV, TranslatedCache
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.layers import PendingLayer

from .test_cache import assert_native, run
from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache, with_native_layers


# Longer than the windows of the tiny Gemma.
LENGTH = 60
# Translated tokens: behind the four that the target reads, up to the one that is held back.
TRANSLATED = LENGTH - 4 - 1
UNGATED = {"gate": FidelityGate(strict=False), "on_refusal": "raise"}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return tiny_model(request.param)


def spoilt(model, ids, *ranges):
    """What a source has read, wrong for a range of tokens in each row."""
    source_kv = SourceKV.prefill(model, None, ids)
    generator = torch.Generator().manual_seed(0)
    for states in source_kv.features:
        for row, (start, stop) in enumerate(ranges):
            part = states[row, start:stop]
            part += torch.randn(part.shape, generator=generator)
    return source_kv


def assert_wrong(model, ids, cache):
    logits, native = run(model, ids, cache)[0], run(model, ids)[0]
    assert (logits[0] - native[0]).abs().max() > 1e-2


@pytest.mark.parametrize(("native_layers", "question"), [(None, 0), (None, 9), (1, 0)])
def test_the_tokens_that_are_wrong_are_read_again(model, native_layers, question):
    ids, wrong = random_ids(model, 2, LENGTH + question), [(11, 21), (38, 48)]
    source_kv, mapper = spoilt(model, ids[:, :LENGTH], *wrong), identity_mapper(model)
    mapper = mapper if native_layers is None else with_native_layers(mapper, native_layers)
    assert_wrong(model, ids, ungated_cache(source_kv, mapper, model, input_ids=ids))
    assert_wrong(model, ids, ungated_cache(source_kv, mapper, model, input_ids=ids, effort=5 / TRANSLATED))
    cache = ungated_cache(source_kv, mapper, model, input_ids=ids, effort=10 / TRANSLATED)
    expected = torch.ones(2, LENGTH - 1, dtype=torch.bool)
    expected[:, :4] = False
    for row, (start, stop) in enumerate(wrong):
        expected[row, start:stop] = False
    assert torch.equal(cache.translated_mask, expected)
    report = cache.report
    assert (report.translated_tokens, report.native_tokens) == (2 * (TRANSLATED - 10), 2 * 14)
    assert_native(model, ids, cache)


def test_what_a_question_attends_to_is_read_again(model):
    """All is wrong, and one token is much attended to, since its keys are long."""
    ids = random_ids(model, 1, LENGTH + 9)
    source_kv, attended = spoilt(model, ids[:, :LENGTH], (4, LENGTH)), 56
    for states in source_kv.features:
        states[:, attended] *= 30
    caches = [
        ungated_cache(source_kv, identity_mapper(model), model, input_ids=prompt, effort=2 / TRANSLATED)
        for prompt in (ids, ids[:, : LENGTH + 2], ids[:, :LENGTH])
    ]
    asked, *others = [(~cache.translated_mask[0, 4:]).nonzero().flatten() + 4 for cache in caches]
    # With what stands before it, of which it is made.
    assert asked.tolist() == [attended - 1, attended]
    # Three tokens are no question: what is furthest off is read, wherever it stands.
    assert torch.equal(*others) and attended in others[0] and not torch.equal(others[0], asked)


def test_a_question_on_few_tokens(llama):
    ids = random_ids(llama, 1, 20)
    source_kv = spoilt(llama, ids[:, :8], (4, 8))
    cache = ungated_cache(source_kv, identity_mapper(llama), llama, input_ids=ids, effort=0.5)
    assert cache.report.translated_tokens == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_both_ends(family, monkeypatch):
    model = tiny_model(family)
    ids = random_ids(model, 1, LENGTH)
    source_kv, mapper = spoilt(model, ids, (4, LENGTH)), identity_mapper(model)
    untouched = ungated_cache(source_kv, mapper, model, effort=0.0)
    assert all(isinstance(layer, PendingLayer) for layer in untouched.layers)
    assert_wrong(model, ids, untouched)
    cache = ungated_cache(source_kv, mapper, model, effort=1.0)
    assert not cache.is_translation
    assert (cache.report.outcome, cache.report.translated_tokens) == ("translated", 0)
    assert_native(model, ids, cache)
    # All but one of the tokens, one by one, are not far from that.
    almost = ungated_cache(source_kv, mapper, model, effort=(TRANSLATED - 1) / TRANSLATED)
    assert almost.report.translated_tokens == 1


def moved(model, ids, effort, **options):
    """Two chunks that were read alone, one behind the other, and between them what the target reads."""
    mapper = identity_mapper(model)
    first, second = (SourceKV.prefill(model, None, ids[:, some]) for some in (slice(0, 25), slice(30, 55)))
    segments = [Segment(0, 25, first, mapper), Segment(25, 30), Segment(30, 55, second, mapper)]
    return TranslatedCache.from_segments(segments, model, ids, effort=effort, **UNGATED | options)


def distance(model, ids, cache):
    """Of all keys and values from those of a prefill."""
    cache.activate_past_recording()
    native = DynamicCache(config=model.config)
    native.activate_past_recording()
    read_into_cache(model, native, ids[:, : cache.get_seq_length()])
    layers = zip(cache.layers, native.layers, strict=True)
    return sum(
        float((getattr(layer, states) - getattr(own, states)).square().sum())
        for layer, own in layers
        for states in ("keys", "values")
    )


def test_chunks_at_new_positions_come_nearer(model):
    ids = random_ids(model, 1, LENGTH)
    none, some, most, all_of_them = (distance(model, ids, moved(model, ids, x)) for x in (0.0, 0.3, 0.7, 1.0))
    assert none > 1.2 * some > 1.2 * most > all_of_them
    assert all_of_them < 1e-4
    # What the target has read between the chunks, on top of what was translated, may be read again, too.
    cache = moved(model, ids, 0.7)
    assert cache.report.translated_tokens == cache.translated_mask.sum() < 0.35 * 51
    assert_native(model, ids, moved(model, ids, 1.0))


def test_a_prefix_is_left_as_it_is(model):
    ids = random_ids(model, 1, LENGTH)
    prefix = DynamicCache(config=model.config)
    prefix.activate_past_recording()
    read_into_cache(model, prefix, ids[:, :20])
    before = [layer.keys.clone() for layer in prefix.layers]
    source_kv = spoilt(model, ids, (40, 45))[20:55]
    segments = [Segment(20, 55, source_kv, identity_mapper(model))]
    cache = TranslatedCache.from_segments(segments, model, ids, prefix=prefix, effort=5 / 35, **UNGATED)
    assert cache.translated_mask[0].nonzero().flatten().tolist() == [*range(20, 40), *range(45, 55)]
    assert_native(model, ids, cache)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(prefix.layers, before, strict=True))


def test_other_storage(llama):
    ids = random_ids(llama, 1, LENGTH)
    storage = StaticCache(config=llama.config, max_cache_len=80)
    cache = ungated_cache(
        spoilt(llama, ids, (11, 21)), identity_mapper(llama), llama, effort=10 / TRANSLATED, storage=storage
    )
    assert_native(llama, ids, cache)


def test_what_it_cannot_do(llama):
    ids = random_ids(llama, 2, 20)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    source_kv = SourceKV.prefill(llama, None, ids, attention_mask=mask)
    given = {"input_ids": ids, "attention_mask": mask, "effort": 0.5}
    with pytest.raises(BatchMismatchError, match="With `effort`, rows must be without padding"):
        ungated_cache(source_kv, identity_mapper(llama), llama, **given)
    gate = FidelityGate(strict=False)
    cache = TranslatedCache(source_kv, identity_mapper(llama), llama, gate=gate, **given)
    assert cache.report.outcome == "recomputed" and cache.get_seq_length() == 0
    for effort in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"`effort` must be between 0, .* got {effort}"):
            ungated_cache(source_kv, identity_mapper(llama), llama, effort=effort)
