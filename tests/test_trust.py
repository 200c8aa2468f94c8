"""A translation that cannot be trusted is not used, and the request is answered as without it."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import StaticCache
from transformers.cache_utils import Cache

from hf_kvtransfer import (
    EvidenceError,
    FidelityGate,
    KVMapper,
    RefusedError,
    SourceKV,
    TranslatedCache,
    evaluate_mapper,
    fit_mapper,
)
from hf_kvtransfer import cache as cache_module
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.fidelity.tail_reading import read_tail
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint
from hf_kvtransfer.layers import FilledTranslator

from .test_cache_policy import Rounds
from .tiny_models import fail_from_layer, identity_mapper, own_texts, plant, random_ids, tiny_model, ungated_cache


CONTEXT = 150


@pytest.fixture(scope="module")
def source():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def target(source):
    return plant(source)


@pytest.fixture(scope="module")
def texts(source):
    return own_texts(source, 100, 200, 0.4)


@pytest.fixture(scope="module")
def folder(source, target, texts, tmp_path_factory):
    """A mapper with its evidence, as it would be shared."""
    folder = tmp_path_factory.mktemp("mapper")
    mapper = fit_mapper(source, target, texts[:60], dtype=torch.float32, num_source_layers=4)
    mapper.evidence = evaluate_mapper(
        mapper,
        source,
        target,
        texts[60:].tolist(),
        context_tokens=CONTEXT,
        continuation_tokens=32,
        corrupted_documents=10,
    )
    mapper.save_pretrained(folder)
    return folder


@pytest.fixture
def mapper(folder):
    return KVMapper.from_pretrained(folder)


@pytest.fixture
def context(texts):
    return texts[7:8, :CONTEXT]


def read(source, ids):
    return SourceKV.prefill(source, None, ids)


def generate(target, ids, cache=None):
    options = {} if cache is None else {cache_argument(target): cache}
    output = target.generate(
        ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return output.sequences, torch.stack(output.logits)


def assert_answered_natively(target, ids, cache, reason):
    """Bit for bit."""
    assert cache.report.outcome == "recomputed"
    assert reason in " ".join(cache.report.reasons)
    assert cache.report.translated_tokens == 0
    assert not cache.is_translation
    for found, expected in zip(generate(target, ids, cache), generate(target, ids), strict=True):
        assert torch.equal(found, expected)


def test_the_exact_mapper_is_admitted_and_used(source, target, mapper, context):
    cache = TranslatedCache(read(source, context), mapper, target)
    report = cache.report
    assert report.outcome == "translated"
    assert report.verdict.admitted
    assert report.verdict.strict
    assert report.reasons == report.verdict.reasons == ()
    assert report.probe.passed
    assert report.native_tokens == 4 + report.probe.tokens
    assert report.translated_tokens == CONTEXT - 1 - report.native_tokens
    assert sorted(report.layer_seconds) == [0, 1, 2, 3]
    sequences, logits = generate(target, context, cache)
    native_sequences, native_logits = generate(target, context)
    assert torch.equal(sequences, native_sequences)
    torch.testing.assert_close(logits, native_logits, rtol=0, atol=1e-2)
    assert "tokens translated" in str(report)


def with_features(source_kv, change):
    return SourceKV(
        [change(states) for states in source_kv.features],
        source_kv.geometry,
        source_kv.input_ids,
        source_kv.attention_mask,
        source_kv.position_ids,
        source_kv.identity,
        token_losses=source_kv.token_losses,
        cache_policy=source_kv.cache_policy,
    )


@pytest.fixture
def of_another_document(source, context, texts):
    """What the source has read of another document, under this one's tokens."""
    features = iter(read(source, texts[9:10, :CONTEXT]).features)
    return with_features(read(source, context), lambda states: next(features))


def test_a_cache_of_another_document(target, mapper, context, of_another_document):
    wrong = of_another_document
    assert_answered_natively(
        target, context, TranslatedCache(wrong, mapper, target), "does not stand for this context"
    )


def test_shuffled_tokens(source, target, mapper, context):
    order = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(0))
    wrong = with_features(read(source, context), lambda states: states[:, order])
    assert_answered_natively(
        target, context, TranslatedCache(wrong, mapper, target), "does not stand for this context"
    )


def test_wrong_positions(source, target, mapper, context):
    cache = source.generate(context, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, use_cache=True)
    positions = torch.arange(CONTEXT)[None] * 2
    wrong = SourceKV.from_cache(
        cache[cache_argument(source)],
        source,
        context,
        position_ids=positions,
        token_losses=read(source, context).token_losses,
    )
    assert_answered_natively(
        target, context, TranslatedCache(wrong, mapper, target), "does not stand for this context"
    )


def test_a_noisy_layer(source, target, mapper, context):
    with torch.no_grad():
        mapper.layers[2].weight += 0.1 * torch.randn_like(mapper.layers[2].weight)
    cache = TranslatedCache(read(source, context), mapper, target)
    assert_answered_natively(target, context, cache, "evidence is about another mapper")


def test_swapped_layers(source, target, mapper, context):
    mapper.layers[1], mapper.layers[2] = mapper.layers[2], mapper.layers[1]
    cache = TranslatedCache(read(source, context), mapper, target)
    assert_answered_natively(target, context, cache, "evidence is about another mapper")


@pytest.mark.parametrize("side", ["source", "target"])
def test_weights_that_have_changed_since(source, target, mapper, context, side):
    models = {"source": source, "target": target}
    models[side] = changed = copy.deepcopy(models[side])
    changed.model.layers[1].mlp.up_proj.weight.data *= 1.01  # a checkpoint updated in place
    cache = TranslatedCache(read(models["source"], context), mapper, models["target"])
    assert_answered_natively(models["target"], context, cache, f"the {side} is not the one that was measured: weights")
    assert "model.layers.1.mlp.up_proj.weight" in cache.report.reasons[0]


def test_a_mapper_for_other_weights(mapper, context):
    source = tiny_model("llama", seed=5)
    target = plant(source, seed=6)
    cache = TranslatedCache(read(source, context), mapper, target)
    assert_answered_natively(target, context, cache, "the source is not the one that was measured: weights")


def damaged(folder, tmp_path, change):
    KVMapper.from_pretrained(folder).save_pretrained(tmp_path)
    change(tmp_path / "model.safetensors")
    return tmp_path


# LMCache#3388, LMCache#4991, LMCache#4600
def test_a_truncated_file(source, target, folder, context, tmp_path):
    path = damaged(folder, tmp_path, lambda file: file.write_bytes(file.read_bytes()[:-1000]))
    cache = TranslatedCache(read(source, context), path, target)
    assert_answered_natively(target, context, cache, "MapperFormatError")


# LMCache#3388, LMCache#4991, LMCache#4600
def test_one_nan(source, target, folder, context, tmp_path):
    def change(file):
        tensors = load_file(file)
        tensors["layers.1.weight"][3, 5] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})

    cache = TranslatedCache(read(source, context), damaged(folder, tmp_path, change), target)
    assert_answered_natively(target, context, cache, "NaN")


# LMCache#3388, LMCache#4991, LMCache#4600
def test_a_shape_off_by_one(source, target, folder, context, tmp_path):
    def change(file):
        tensors = load_file(file)
        tensors["layers.3.bias"] = tensors["layers.3.bias"][:-1].clone()
        save_file(tensors, file, metadata={"format": "pt"})

    cache = TranslatedCache(read(source, context), damaged(folder, tmp_path, change), target)
    assert_answered_natively(target, context, cache, "another shape")


def test_edited_evidence(source, target, folder, context, tmp_path):
    KVMapper.from_pretrained(folder).save_pretrained(tmp_path)
    file = tmp_path / "fidelity.json"
    report = json.loads(file.read_text())
    report["figures"]["arms"]["translated"]["agreement"] = 0.99
    file.write_text(json.dumps(report))
    cache = TranslatedCache(read(source, context), tmp_path, target)
    assert_answered_natively(target, context, cache, "fidelity.json")


def test_no_evidence(source, target, mapper, context):
    mapper.evidence = None
    cache = TranslatedCache(read(source, context), mapper, target)
    assert_answered_natively(target, context, cache, "no evidence")
    with pytest.raises(RefusedError, match="no evidence"):
        TranslatedCache(read(source, context), mapper, target, on_refusal="raise")


def test_a_gate_that_is_not_strict_is_visible(source, target, mapper, context):
    mapper.evidence = None
    cache = TranslatedCache(read(source, context), mapper, target, gate=FidelityGate(strict=False))
    assert cache.report.outcome == "translated"
    assert cache.report.verdict.admitted
    assert not cache.report.verdict.strict
    assert "no evidence" in cache.report.verdict.reasons[0]
    assert "not strict" in str(cache.report)
    with pytest.raises(EvidenceError, match="`probe_tokens` is 32"):
        TranslatedCache(
            read(source, context), mapper, target, gate=FidelityGate(strict=False), probe_tokens=32, on_refusal="raise"
        )


def test_a_probe_that_raises(target, mapper, of_another_document):
    wrong = of_another_document
    with pytest.raises(RefusedError, match="does not stand for this context"):
        TranslatedCache(wrong, mapper, target, on_refusal="raise")
    assert TranslatedCache(wrong, mapper, target, probe_tokens=0).report.outcome == "translated"


@pytest.mark.parametrize("beams", [1, 3])
def test_an_error_before_the_first_layer_is_used(source, target, mapper, context, monkeypatch, beams):
    cache = TranslatedCache(read(source, context), mapper, target, probe_tokens=0)
    assert cache.report.outcome == "translated"

    fail_from_layer(monkeypatch, 0)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    output = target.generate(context, **options, **{cache_argument(target): cache})
    assert torch.equal(output, target.generate(context, **options))
    assert cache.report.outcome == "recomputed"
    (reason,) = cache.report.reasons
    assert reason.startswith("RuntimeError: out of memory. While layer 0 was translated")
    assert f"mapper {mapper.name}, from" in reason
    assert cache.report.translated_tokens == 0
    assert cache.report.native_tokens == CONTEXT - 1


def test_an_error_after_the_first_layer_is_used(source, target, mapper, context, monkeypatch):
    cache = TranslatedCache(read(source, context), mapper, target, probe_tokens=0)
    with monkeypatch.context() as patch:
        fail_from_layer(patch, 2)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(target, context, cache)
    assert cache.report.outcome == "translated"
    assert [cache.get_seq_length(i) for i in range(4)] == [CONTEXT - 1] * 4


def test_beams_and_copies_after_a_probe(source, target, mapper, context, texts):
    both = texts[[7, 9], :CONTEXT]
    cache = TranslatedCache(read(source, both), mapper, target)
    assert cache.report.probe.passed
    twin = copy.deepcopy(cache)
    twin.crop(-3)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    expected = target.generate(both, **options)
    for translated in (cache, twin):
        assert torch.equal(target.generate(both, **options, **{cache_argument(target): translated}), expected)


def test_effort_behind_a_probe(source, target, mapper, context):
    """What the probe has read stood on tokens that are other ones now: it is read again, too."""
    cache = TranslatedCache(read(source, context), mapper, target, effort=0.5)
    tokens = cache.report.probe.tokens
    assert cache.report.probe.passed and 2 * tokens < CONTEXT - 5
    assert cache.report.native_tokens == 4 + math.ceil((CONTEXT - 5) / 2)
    assert not cache.translated_mask[:, -tokens:].any()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = target.generate(context, **options)
    assert torch.equal(target.generate(context, **options, **{cache_argument(target): cache}), expected)


def test_other_storages_behind_gate_and_probe(source, target, mapper, context):
    """What they hold counts: the same numbers pass, rounded ones were not measured."""
    storage = StaticCache(config=target.config, max_cache_len=CONTEXT + 8)
    cache = TranslatedCache(read(source, context), mapper, target, storage=storage)
    assert cache.report.outcome == "translated"
    assert cache.report.probe.passed
    sequences, logits = generate(target, context, cache)
    expected = generate(target, context, TranslatedCache(read(source, context), mapper, target))
    assert torch.equal(sequences, expected[0])
    torch.testing.assert_close(logits, expected[1], rtol=0, atol=5e-4)

    storage = Cache(layers=[Rounds() for _ in storage.layers])
    cache = TranslatedCache(read(source, context), mapper, target, storage=storage)
    assert "the target's cache is quantized, the measured one was not quantized" in cache.report.reasons
    assert {type(layer) for layer in cache.layers} == {Rounds}


def test_short_contexts_are_not_probed(source, target, mapper, context):
    cache = TranslatedCache(read(source, context[:, :16]), mapper, target)
    assert cache.report.outcome == "translated"
    assert cache.report.probe is None


def test_bad_arguments(source, target, mapper, context):
    for options in ({"probe_tokens": -1}, {"tail_tokens": -1}, {"on_refusal": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TranslatedCache(read(source, context), mapper, target, **options)


def test_a_tokenizer_that_was_extended(tokenizers):
    tokenizer = tokenizers["bpe"]
    model = tiny_model("llama")
    mapper = identity_mapper(model)
    fingerprint = tokenizer_fingerprint(tokenizer)
    mapper.config.source = mapper.config.target = mapper.config.source | {"tokenizer": fingerprint}
    text = "The farmers wait for the flood. " * 4
    source_kv = SourceKV.prefill(model, tokenizer, text)
    gate = FidelityGate(strict=False)
    assert TranslatedCache(source_kv, mapper, model, target_tokenizer=tokenizer, gate=gate).is_translation
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(["flood"])
    cache = TranslatedCache(source_kv, mapper, model, target_tokenizer=extended, gate=gate)
    ids = extended(text, return_tensors="pt").input_ids
    assert_answered_natively(model, ids[:, ids[0] < model.config.vocab_size], cache, "TokenizerMismatchError")


def test_a_config_of_the_wrong_types(source, target, folder, context, tmp_path):
    KVMapper.from_pretrained(folder).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    right = json.loads(file.read_text())
    damages = (
        {"layers": [5] * 4},
        {"token_features": "64"},
        {"source": {"geometry": right["source"]["geometry"], "name": "x"}},
        {"dtype": "float99"},
    )
    for damage in damages:
        file.write_text(json.dumps(right | damage))
        cache = TranslatedCache(read(source, context), tmp_path, target)
        assert_answered_natively(target, context, cache, "MapperFormatError")
    file.write_text("[]")
    cache = TranslatedCache(read(source, context), tmp_path, target)
    assert_answered_natively(target, context, cache, "MapperFormatError")


def test_evidence_holds_in_every_dtype(source, target, folder, context):
    for dtype in (torch.bfloat16, torch.float16):
        half = KVMapper.from_pretrained(folder, dtype=dtype)
        assert half.dtype == torch.bfloat16
        assert half.digest() == KVMapper.from_pretrained(folder).digest()


def test_a_second_turn(source, target, mapper, context):
    question = random_ids(target, 1, 5, seed=3)
    for gate in (FidelityGate(), FidelityGate(min_agreement=1, max_control=-1)):
        cache = TranslatedCache(read(source, context), mapper, target, gate=gate)
        prompt, output = context, None
        for _ in range(2):
            prompt = torch.cat([prompt, question], 1)
            inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            output = target.generate(**cache.prepare(inputs, sequences=output), max_new_tokens=4, do_sample=False)
            assert torch.equal(output, target.generate(**inputs, max_new_tokens=4, do_sample=False))
            prompt = output


def test_a_cache_that_was_reset_is_a_source(source, target, mapper, context):
    cache = TranslatedCache(read(source, context), mapper, target)
    assert cache.is_translation
    cache.reset()
    assert not cache.is_translation
    generate(target, context, cache)
    assert cache.get_seq_length() > CONTEXT


def test_fewer_sinks_than_were_measured(source, target, mapper, context):
    cache = TranslatedCache(read(source, context), mapper, target, sink_tokens=1)
    assert_answered_natively(target, context, cache, "is to read 1 first tokens itself, it read 4 when measured")


def test_a_shorter_tail_than_was_measured(source, target, mapper, context):
    mapper.evidence = dataclasses.replace(mapper.evidence, settings=mapper.evidence.settings | {"tail_tokens": 3})
    cache = TranslatedCache(read(source, context), mapper, target, tail_tokens=2)
    assert_answered_natively(target, context, cache, "is to read 2 last tokens itself, it read 3 when measured")
    assert TranslatedCache(read(source, context), mapper, target, tail_tokens=3).is_translation


def test_a_crop_after_a_probe_in_sliding_windows(monkeypatch):
    """What a window has dropped is translated again."""
    model = tiny_model("gemma3")
    ids = random_ids(model, 1, 80)
    reading = []

    def probe(translation, wanted):
        readings, cache = read_tail(translation, 8)
        reading.extend(readings)
        return FilledTranslator(translation, cache), None

    monkeypatch.setattr(cache_module, "probe_tail", probe)
    for crop in (3, 33, 60):
        cache = ungated_cache(read(model, ids), identity_mapper(model), model)
        cache.crop(-crop)
        _, logits = generate(model, ids, cache)
        torch.testing.assert_close(logits, generate(model, ids)[1], rtol=0, atol=1e-4)
    assert len(reading) == 3


def test_push_to_hub_while_saving_would_lose_the_evidence(mapper, tmp_path):
    with pytest.raises(ValueError, match="mapper.push_to_hub"):
        mapper.save_pretrained(tmp_path, push_to_hub=True)
