import pytest
import torch

from hf_kvtransfer import CalibrationError, SourceKV, TranslatedCache, fit_mapper

from ..tiny_models import FAMILIES, plant, random_ids, tiny_model


CONTEXT, GENERATED = 96, 64


def native_and_handoff(source_kv, mapper, target, prompt):
    options = {"max_new_tokens": GENERATED, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    native = target.generate(prompt, **options)
    cache = TranslatedCache(source_kv, mapper, target)
    translated = target.generate(prompt, **options, past_key_values=cache)
    return native, translated


def logit_error(native, translated):
    """Largest difference over generated positions that both continuations share."""
    same = (native.sequences == translated.sequences).all(0).long().cumprod(0).bool()
    steps = min(int(same.sum()) - CONTEXT + 1, GENERATED)
    return max((a - b).abs().max().item() for a, b in list(zip(native.logits, translated.logits, strict=True))[:steps])


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_a_planted_map(family):
    source = tiny_model(family)
    target = plant(source)
    texts = list(random_ids(source, 64, 80, seed=1))
    mapper = fit_mapper(source, target, texts, num_source_layers=2, moment_dtype=torch.float64, dtype=torch.float32)
    # Each target layer was planted in the source layer of the same number.
    assert all(i in spec["source_layers"] for i, spec in enumerate(mapper.config.layers))
    assert min(min(layer["explained_variance"]) for layer in mapper.config.fit["layers"]) > 0.99999

    prompt = random_ids(source, 1, CONTEXT, seed=2)
    source_kv = SourceKV.prefill(source, None, prompt)
    native, translated = native_and_handoff(source_kv, mapper, target, prompt)
    assert torch.equal(native.sequences, translated.sequences)
    assert logit_error(native, translated) < 1e-3

    other_document = SourceKV.prefill(source, None, random_ids(source, 1, CONTEXT, seed=3))
    assert logit_error(*native_and_handoff(other_document, mapper, target, prompt)) > 0.1
    cache_ids = prompt[:, :CONTEXT]
    source_kv = SourceKV.prefill(source, None, cache_ids)
    wrong_positions = SourceKV.from_cache(
        raw_cache(source, cache_ids), source, cache_ids, position_ids=torch.arange(7, 7 + CONTEXT)[None]
    )
    assert logit_error(*native_and_handoff(wrong_positions, mapper, target, prompt)) > 0.1


def raw_cache(model, ids):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


def test_too_little_text_is_refused():
    source = tiny_model("llama")
    with pytest.raises(CalibrationError, match="Give more text"):
        fit_mapper(source, plant(source), list(random_ids(source, 10, 12)))
