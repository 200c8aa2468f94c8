"""Caches of several segments: from several sources, at other positions, and read by the target between them."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_kvtransfer import (
    AlignmentError,
    BatchMismatchError,
    FidelityGate,
    PrefixMismatchError,
    RefusedError,
    Segment,
    SourceCacheError,
    SourceKV,
    TranslatedCache,
)
from hf_kvtransfer.admission import Admission
from hf_kvtransfer.alignment.spans import character_spans
from hf_kvtransfer.compat import read_into_cache, token_losses
from hf_kvtransfer.fidelity.tail_reading import read_tail
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint
from hf_kvtransfer.layers import PendingLayer
from hf_kvtransfer.segments.binding import SegmentBinding

from ..test_cache import assert_native, calls, run  # noqa: F401
from ..tiny_models import (
    fail_from_layer,
    identity_mapper,
    plant,
    planted_mapper,
    random_ids,
    random_mapper,
    tiny_model,
    with_native_layers,
)
from ..tiny_tokenizers import SENTENCES


# Longer than the windows of the tiny Gemma.
LENGTH = 60
# Translated ranges, and between them what the target reads itself.
MAPPED = ((0, 20), (27, 45), (45, 48), (50, LENGTH))
UNGATED = {"gate": FidelityGate(strict=False), "on_refusal": "raise"}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def planted(llama):
    return plant(llama, seed=1), plant(llama, seed=2)


def segments_of(source_kv, mapper, mapped=MAPPED, first=0):
    """Segments for these ranges, from a source that has read all of the prompt, and native ones between them."""
    segments, done = [], first
    for start, stop in mapped:
        if start > done:
            segments.append(Segment(done, start))
        segments.append(Segment(start, stop, source_kv[start:stop], mapper))
        done = stop
    return segments


def segmented(model, ids, mapper=None, mapped=MAPPED, **options):
    source_kv = SourceKV.prefill(model, None, ids)
    segments = segments_of(source_kv, mapper or identity_mapper(model), mapped)
    return TranslatedCache.from_segments(segments, model, ids, **UNGATED | options)


def native_cache(model, ids, **options):
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    read_into_cache(model, cache, ids, **options)
    return cache


def test_translated_and_native_segments_are_as_a_prefill(model, calls):  # noqa: F811
    ids = random_ids(model, 1, LENGTH)
    cache = segmented(model, ids)
    report = cache.report
    # The last token is held back, the first four are the target's, as are those between.
    assert (report.translated_tokens, report.native_tokens, report.held_back_tokens) == (46, 4 + 7 + 2, 1)
    assert report.source_tokens == sum(stop - start for start, stop in MAPPED)
    assert cache.translated_mask.sum() == 46
    assert cache.get_seq_length() == LENGTH - 1
    bound = len(calls)
    assert_native(model, ids, cache)
    # What stands below native tokens is translated at once, what follows them when it is asked for.
    assert calls[bound:] == [0, 1, 2, 3]


def test_rows_beams_edits_and_copies(model):
    ids = random_ids(model, 2, LENGTH)
    assert_native(model, ids, segmented(model, ids), num_beams=2)
    cache = segmented(model, ids)
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.crop(-12)  # into a native segment
    twin = copy.deepcopy(cache)
    assert all(isinstance(layer, PendingLayer) for layer in twin.layers)
    for edited in (cache, twin):
        assert_native(model, ids[[1, 0]], edited)
    cache = segmented(model, ids)
    prepared = cache.prepare({"input_ids": ids[:, :30]})
    # Tokens 4 to 20 and 27 to 28 are translated ones, the last is to be read.
    assert (cache.get_seq_length(), cache.report.translated_tokens) == (29, 2 * (16 + 2))
    output = model.generate(**prepared, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, model.generate(ids[:, :30], max_new_tokens=4, do_sample=False))


def test_other_storage(llama):
    ids = random_ids(llama, 1, LENGTH)
    storage = StaticCache(config=llama.config, max_cache_len=80)
    assert_native(llama, ids, segmented(llama, ids, storage=storage))


def test_native_layers(model):
    ids = random_ids(model, 1, LENGTH)
    mapper = with_native_layers(identity_mapper(model), 1)
    cache = segmented(model, ids, mapper)
    assert cache.report.native_layers == 1
    assert_native(model, ids, cache)


def test_segments_of_several_sources(llama, planted):
    """Each through its own mapper. `translated` of the other source's is not near."""
    ids = random_ids(llama, 1, LENGTH)
    mappers = [planted_mapper(source, llama) for source in planted]
    sources = [SourceKV.prefill(source, None, ids) for source in planted]
    segments = [
        Segment(0, 25, sources[0][:25], mappers[0]),
        Segment(25, 30),
        Segment(30, 50, sources[1][30:50], mappers[1]),
    ]
    cache = TranslatedCache.from_segments(segments, llama, ids, **UNGATED)
    assert cache.report.mapper == "source -> target"
    logits, _ = run(llama, ids, cache)
    native, _ = run(llama, ids)
    torch.testing.assert_close(logits, native, rtol=0, atol=1e-3)
    segments[0] = Segment(0, 25, sources[1][:25], mappers[0])
    logits, _ = run(llama, ids, TranslatedCache.from_segments(segments, llama, ids, **UNGATED))
    assert (logits[0] - native[0]).abs().max() > 0.01


def test_a_chunk_lands_on_other_positions_than_it_was_read_at(model):
    chunk, other = random_ids(model, 1, 30, seed=1), random_ids(model, 1, 20, seed=2)
    ids = torch.cat([other, chunk, random_ids(model, 1, 3)], 1)
    mapper = identity_mapper(model)
    segments = [Segment(0, 20), Segment(20, 50, SourceKV.prefill(model, None, chunk), mapper)]
    cache = TranslatedCache.from_segments(segments, model, ids, **UNGATED)
    cache.activate_past_recording()
    alone = native_cache(model, chunk, position_ids=torch.arange(20, 50)[None])
    before = native_cache(model, other)
    for layer, moved, first in zip(cache.layers, alone.layers, before.layers, strict=True):
        for states in ("keys", "values"):
            expected = torch.cat([getattr(first, states), getattr(moved, states)], 2)
            torch.testing.assert_close(getattr(layer, states), expected, rtol=0, atol=1e-4)


def test_a_prefix_that_the_target_holds_already(model):
    ids = random_ids(model, 1, LENGTH)
    prefix = native_cache(model, ids[:, :30])
    before = [layer.keys for layer in prefix.layers]
    source_kv = SourceKV.prefill(model, None, ids)
    for first, mapped in ((30, [(30, 40), (43, 55)]), (25, [(25, 40)]), (30, [])):
        segments = segments_of(source_kv, identity_mapper(model), mapped, first)
        cache = TranslatedCache.from_segments(segments, model, ids, prefix=prefix, **UNGATED)
        translated = sum(stop - start for start, stop in mapped)
        assert cache.report.translated_tokens == translated == int(cache.translated_mask.sum())
        assert cache.get_seq_length() == (mapped[-1][1] if mapped else first)
        assert cache.report.outcome == ("translated" if mapped else "recomputed")
        assert_native(model, ids, cache)
        assert cache.get_seq_length() > LENGTH
    assert prefix.get_seq_length() == 30
    assert all(layer.keys is keys for layer, keys in zip(prefix.layers, before, strict=True))


def test_what_is_translated_in_a_prefix_is_no_source(model):
    ids = random_ids(model, 1, LENGTH)
    mapper, source_kv = identity_mapper(model), SourceKV.prefill(model, None, ids)
    first = TranslatedCache.from_segments([Segment(0, 20, source_kv[:20], mapper)], model, ids, **UNGATED)
    first.activate_past_recording()
    _, sequences = run(model, ids[:, :30], first, max_new_tokens=4)
    sequences = sequences[:, :-1]
    # What the model has read itself, on top of the translation, is what it would have read without.
    read = SourceKV.from_cache(first, model, sequences, tokens=slice(20, 33))
    expected = SourceKV.prefill(model, None, sequences)[20:33]
    assert torch.equal(read.input_ids, expected.input_ids)
    assert torch.equal(read.position_ids, expected.position_ids)
    for states, other in zip(read.features, expected.features, strict=True):
        torch.testing.assert_close(states, other, rtol=0, atol=1e-4)
    for tokens in (None, slice(10, 30)):
        with pytest.raises(SourceCacheError, match="tokens 4 to 20 are translated"):
            SourceKV.from_cache(first, model, sequences, tokens=tokens)
    second = TranslatedCache.from_segments([], model, ids, prefix=first, **UNGATED)
    assert second.translated_mask.any(0).nonzero().flatten().tolist() == list(range(4, 20))


def test_refused_segments_are_read_by_the_target(model, tmp_path):
    ids = random_ids(model, 1, LENGTH)
    source_kv = SourceKV.prefill(model, None, ids)
    segments = segments_of(source_kv, identity_mapper(model))
    wrong = segments_of(source_kv, identity_mapper(tiny_model("qwen3")))
    gate = {"gate": FidelityGate(strict=False)}
    cache = TranslatedCache.from_segments([*segments[:2], wrong[2], *segments[3:]], model, ids, **gate)
    assert cache.report.translated_tokens == 16 + 3 + 9
    assert "tokens 27:45 are the target's to read: Mapper tiny -> tiny was fitted for" in str(cache.report)
    assert_native(model, ids, cache)
    with pytest.raises(RefusedError, match="has no evidence"):
        TranslatedCache.from_segments(segments, model, ids, on_refusal="raise")
    # Without evidence none is admitted, and what the target holds already is all there is.
    missing = segments_of(source_kv, tmp_path, [(30, 50)], 30)  # no mapper there
    for prefix, refused in ((None, segments), (native_cache(model, ids[:, :30]), missing)):
        cache = TranslatedCache.from_segments(refused, model, ids, prefix=prefix)
        assert cache.report.outcome == "recomputed"
        assert cache.get_seq_length() == (0 if prefix is None else 30)
        assert not cache.is_translation
        assert_native(model, ids, cache)


def test_a_translation_that_fails_is_read_by_the_target(model, monkeypatch):
    ids = random_ids(model, 1, LENGTH)
    options = {"gate": FidelityGate(strict=False), "on_refusal": "recompute"}
    cache = segmented(model, ids, **options)
    with monkeypatch.context() as patch:
        fail_from_layer(patch, 0)
        assert_native(model, ids, cache)
    assert cache.report.outcome == "recomputed"
    assert not cache.is_translation
    cache = segmented(model, ids, **options)
    with monkeypatch.context() as patch:
        fail_from_layer(patch, 2)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(model, ids, cache)
    assert_native(model, ids, cache)


def test_a_probe_reads_the_end_of_the_last_segment_on_top_of_the_others(model):
    ids = random_ids(model, 1, 90)
    segments = segments_of(SourceKV.prefill(model, None, ids), identity_mapper(model), [(0, 20), (27, 80)])
    admission = Admission(FidelityGate(strict=False), model, None, None, None, None)
    translation = SegmentBinding(model, None, ids, None, 89, None, 0).bind(segments, admission, None, raises=True)
    (reading,), cache = read_tail(translation.segments[-1], 16, translation)
    logits = read_into_cache(model, DynamicCache(config=model.config), ids[:, :80], num_logits=17)
    expected = token_losses(logits[:, :-1], ids[:, 64:80])[0]
    # The loss of each token but the first, which is predicted before the tail.
    assert reading.losses == pytest.approx(expected[1:].tolist(), abs=1e-3)
    assert reading.source_losses == pytest.approx(expected[1:].tolist(), abs=1e-3)
    assert max(map(max, reading.state_errors)) < -15
    assert cache.get_seq_length() == 80


@pytest.mark.parametrize("ends", [(0, 400), (60, 300)])
def test_between_tokenizers(tokenizers, ends):
    """A segment's tokens listen to the source tokens that they listen to when all is translated."""
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    names = [tokenizer_fingerprint(tokenizers[name]) for name in ("bpe", "unigram")]
    mapper = random_mapper(source, target, names)
    for layer_map in mapper.layers:
        torch.nn.init.normal_(layer_map.weight)
    text = " ".join(SENTENCES[:3]) * 2
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], text)
    options = {"target_tokenizer": tokenizers["unigram"]}
    whole = TranslatedCache(source_kv, mapper, target, **UNGATED, **options)
    whole.activate_past_recording()
    ids = whole.input_ids
    # Cut at the same characters, as far as the tokens let it.
    ranges = []
    for kv_spans in (source_kv.row_spans(0), character_spans(tokenizers["unigram"], ids[0].tolist())[1]):
        inside = [i for i, (first, behind) in enumerate(kv_spans) if ends[0] <= first < behind <= ends[1]]
        ranges.append((inside[0], inside[-1] + 1))
    (first, last), (start, stop) = ranges
    segments = [Segment(0, start)] if start else []
    segments.append(Segment(start, stop, source_kv[first:last], mapper))
    cache = TranslatedCache.from_segments(segments, target, ids, tail_tokens=0, **UNGATED, **options)
    cache.activate_past_recording()
    columns = cache.translated_mask[0].nonzero().flatten()
    assert len(columns) > 0.8 * (stop - start)
    for layer, expected in zip(cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, columns], expected.keys[:, :, columns], rtol=0, atol=1e-4)
        torch.testing.assert_close(layer.values[:, :, columns], expected.values[:, :, columns], rtol=0, atol=1e-4)


def test_a_segment_of_another_text(llama, tokenizers):
    name = tokenizer_fingerprint(tokenizers["bpe"])
    ids = tokenizers["bpe"](SENTENCES[0], return_tensors="pt").input_ids
    options = UNGATED | {"target_tokenizer": tokenizers["bpe"]}
    other = SourceKV.prefill(llama, tokenizers["bpe"], SENTENCES[2])
    mapper = planted_mapper(llama, llama, name)
    with pytest.raises(AlignmentError, match="have no text in common"):
        TranslatedCache.from_segments([Segment(0, 20, other, mapper)], llama, ids, **options)
    # Of the same text, but cut into tokens otherwise.
    pieces = [token for word in SENTENCES[0].split(" ") for token in tokenizers["bpe"](word + " ").input_ids]
    same = SourceKV.prefill(llama, tokenizers["bpe"], torch.tensor([pieces]))
    cache = TranslatedCache.from_segments([Segment(0, 20, same, mapper)], llama, ids, **options)
    assert cache.report.translated_tokens == 16
    other = SourceKV.prefill(llama, None, random_ids(llama, 1, 30, seed=5))
    with pytest.raises(PrefixMismatchError, match="Cut `source_kv` to this range"):
        TranslatedCache.from_segments([Segment(0, 20, other, identity_mapper(llama))], llama, ids, **UNGATED)


def test_wrong_arguments(llama):
    ids = random_ids(llama, 2, LENGTH)
    source_kv, mapper = SourceKV.prefill(llama, None, ids), identity_mapper(llama)

    def segment(start, stop):
        return Segment(start, stop, source_kv[start:stop], mapper)

    for segments, message in (
        ([segment(0, 20), segment(15, 30)], "The segment 15:30 overlaps with what ends at token 20"),
        ([segment(0, 20), segment(25, 30)], "The segment 25:30 leaves a gap"),
        ([segment(5, 30)], "The segment 5:30 leaves a gap behind token 0"),
        ([Segment(0, 70, source_kv, mapper)], "end at 70, but the prompt .* has 60 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            TranslatedCache.from_segments(segments, llama, ids)
    long = random_ids(llama, 1, 600)
    with pytest.raises(ValueError, match="end at 600, but LlamaForCausalLM has 512 positions"):
        TranslatedCache.from_segments([Segment(0, 600)], llama, long)
    with pytest.raises(ValueError, match="at least one token, got `start` 7 and `stop` 7"):
        Segment(7, 7)
    with pytest.raises(ValueError, match="The segment 0:5 has a `mapper`, but no `source_kv`"):
        Segment(0, 5, mapper=mapper)
    with pytest.raises(ValueError, match="`on_refusal` must be"):
        TranslatedCache.from_segments([segment(0, 20)], llama, ids, on_refusal="ignore")
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(BatchMismatchError, match="must be without padding"):
        TranslatedCache.from_segments([segment(0, 20)], llama, ids, attention_mask=mask)
    with pytest.raises(BatchMismatchError, match="has 2 rows, the prompt 1"):
        TranslatedCache.from_segments([segment(0, 20)], llama, ids[:1], **UNGATED)


def test_a_prefix_that_has_dropped_tokens(gemma):
    ids = random_ids(gemma, 1, LENGTH)
    prefix = DynamicCache(config=gemma.config)
    read_into_cache(gemma, prefix, ids[:, :50])
    with pytest.raises(SourceCacheError, match="holds 31 of 50 tokens"):
        TranslatedCache.from_segments([], gemma, ids, prefix=prefix)
