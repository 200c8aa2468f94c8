"""The job itself, on the two demo models and the shipped mapper."""

import runpy
from pathlib import Path

import pytest
import torch

from hf_kvtransfer import FidelityGate, KVMapper, SourceKV, TranslatedCache, demo_models, evaluate_mapper
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.demo_models import load_demo_model

from .tiny_models import identity_mapper, ungated_cache


ROOT = Path(__file__).parents[1]
STORY = (ROOT / "examples" / "harbour.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def smollm2():
    return load_demo_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def gemma():
    return load_demo_model("gemma-3-270m")


@pytest.fixture(scope="module")
def mapper():
    return KVMapper.from_pretrained(ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m", dtype=torch.float32)


def test_most_of_the_gap_is_recovered(smollm2, gemma, mapper):
    (source, source_tokenizer), (target, target_tokenizer) = smollm2, gemma
    # In turns: the wrong document is the next one.
    texts = [
        (ROOT / name).read_text(encoding="utf-8")[i : i + 1000]
        for i in range(0, 3600, 900)
        for name in ("examples/harbour.txt", "LICENSE")
    ]
    report = evaluate_mapper(
        mapper,
        source,
        target,
        texts,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        context_tokens=128,
        continuation_tokens=32,
        probe_documents=0,
    )
    arms = report.figures["arms"]
    assert arms["translated"]["gap_recovered"]["value"] > 0.7
    assert arms["translated"]["agreement"] > arms["no_context"]["agreement"] + 0.1
    assert arms["other_document"]["gap_recovered"]["high"] < arms["translated"]["gap_recovered"]["low"]
    assert arms["random_map"]["gap_recovered"]["value"] < 0.1


def test_the_default_gate_admits_the_shipped_mapper(smollm2, gemma, mapper):
    (source, source_tokenizer), (target, target_tokenizer) = smollm2, gemma
    models = (mapper, source, target)
    tokenizers = {"source_tokenizer": source_tokenizer, "target_tokenizer": target_tokenizer}
    verdict = FidelityGate().admit(*models, **tokenizers)
    assert verdict.admitted, verdict.reasons
    # What the mean of all text would hide.
    verdict = FidelityGate(min_gap_recovered=0.9).admit(*models, **tokenizers)
    assert not verdict.admitted
    assert "in its worst capability (dialogue)" in verdict.reasons[0]
    assert mapper.evidence.figures["sufficient"]
    point = next(
        point
        for point in mapper.evidence.probe["curve"]
        if point["tokens"] == mapper.evidence.probe["tokens"] and point["false_alarm_rate"] == 0.05
    )
    assert point["caught"]["other_document"] >= 0.9


def test_gemma_continues_a_padded_batch_with_beams(smollm2, gemma, mapper):
    (source, source_tokenizer), (target, target_tokenizer) = smollm2, gemma
    contexts = [STORY[:700], STORY[:300]]
    source_kv = SourceKV.prefill(source, source_tokenizer, contexts)
    prompts = target_tokenizer(
        [context + " It was" for context in contexts], return_tensors="pt", padding=True, padding_side="left"
    )
    cache = TranslatedCache(
        source_kv,
        mapper,
        target,
        target_tokenizer=target_tokenizer,
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
    )
    assert cache.report.outcome == "translated", cache.report
    assert cache.report.coverage == 1
    assert cache.report.boundary_share > 0.9
    # The contexts end at one column, and all but their last token is covered.
    assert cache.report.held_back_tokens == 2
    output = target.generate(**cache.prepare(prompts), max_new_tokens=6, num_beams=2, do_sample=False)
    assert output.shape == (2, prompts.input_ids.shape[1] + 6)


def test_gemma_on_its_own_cache_beyond_its_window(gemma):
    """Keys of a real model, un-rotated and rotated again, in sliding and full layers."""
    model, tokenizer = gemma
    ids = tokenizer(STORY, return_tensors="pt").input_ids[:, :600]
    assert ids.shape[1] == 600 > model.config.sliding_window
    source_kv = SourceKV.prefill(model, None, ids)
    cache = ungated_cache(source_kv, identity_mapper(model), model)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    native = model.generate(ids, **options)
    translated = model.generate(ids, **options, **{cache_argument(model): cache})
    assert torch.equal(native.sequences, translated.sequences)
    torch.testing.assert_close(torch.stack(translated.logits), torch.stack(native.logits), rtol=0, atol=2e-3)


def test_quickstart(smollm2, gemma, monkeypatch, capsys):
    loaded = {"smollm2-135m-instruct": smollm2, "gemma-3-270m": gemma}
    monkeypatch.setattr(demo_models, "load_demo_model", loaded.get)
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("nats/token") == 3
