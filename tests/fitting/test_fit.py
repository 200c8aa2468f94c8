"""Planted maps: what is fitted is known, and what it does in the target is measured."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import CalibrationError, SourceKV, fit_mapper
from hf_kvtransfer.compat import cache_argument, read_into_cache

from ..tiny_models import FAMILIES, plant, random_ids, tiny_model, ungated_cache
from ..tiny_tokenizers import SENTENCES


CONTEXT, GENERATED = 96, 64


def generate(target, prompt, **cache):
    options = {"max_new_tokens": GENERATED, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = target.generate(prompt, **options, **cache)
    return output.sequences, torch.stack(output.logits)


def logit_error(native, source_kv, mapper, target, prompt):
    """Largest difference of the logits from native, over the steps at which both have generated the same so far."""
    cache = ungated_cache(source_kv, mapper, target)
    sequences, logits = generate(target, prompt, **{cache_argument(target): cache})
    same = (sequences == native[0])[0].long().cumprod(0).sum().item()
    steps = min(same - CONTEXT + 1, GENERATED)
    return (logits - native[1])[:steps].abs().max().item(), steps


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
    native = generate(target, prompt)
    cache = DynamicCache()
    read_into_cache(source, cache, prompt)
    error, steps = logit_error(native, SourceKV.from_cache(cache, source, prompt), mapper, target, prompt)
    assert steps == GENERATED
    assert error < 1e-3

    moved = SourceKV.from_cache(cache, source, prompt, position_ids=torch.arange(7, 7 + CONTEXT)[None])
    assert logit_error(native, moved, mapper, target, prompt)[0] > 0.1
    other_document = SourceKV.prefill(source, None, random_ids(source, 1, CONTEXT, seed=3))
    assert logit_error(native, other_document, mapper, target, prompt)[0] > 0.1


def test_two_tokenizers(tokenizers):
    """No exact map exists between other token streams; the fit must still tell its own text from another."""
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    words = [word for sentence in SENTENCES for word in sentence.split()]
    generator = torch.Generator().manual_seed(0)
    texts = [
        " ".join(words[i] for i in torch.randint(len(words), (40,), generator=generator).tolist()) for _ in range(40)
    ]
    names = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": tokenizers["unigram"]}
    mapper = fit_mapper(source, target, texts, **names, num_source_layers=1, dtype=torch.float32, max_length=90)
    assert mapper.config.source["tokenizer"] != mapper.config.target["tokenizer"]
    assert mapper.config.token_features == 64
    # Layer 0 depends on the token alone, and the token's embedding is a feature.
    assert min(mapper.config.fit["layers"][0]["explained_variance"]) > 0.9


def test_same_seed_same_mapper():
    source = tiny_model("llama")
    target = plant(source)
    texts = [ids.tolist() for ids in random_ids(source, 24, 60, seed=1)]
    first, second = (fit_mapper(source, target, iter(texts), num_source_layers=1, seed=3) for _ in range(2))
    assert first.config.to_dict() == second.config.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.dtype == torch.bfloat16


def test_bad_text_is_refused(tokenizers):
    source = tiny_model("llama")
    target = plant(source)
    with pytest.raises(CalibrationError, match="give more text"):
        fit_mapper(source, target, list(random_ids(source, 10, 12)))
    with pytest.raises(CalibrationError, match="give more text"):
        fit_mapper(source, target, [])
    with pytest.raises(CalibrationError, match="pass `source_tokenizer`"):
        fit_mapper(source, target, ["text"])
    with pytest.raises(CalibrationError, match="item of type list"):
        fit_mapper(source, target, [[1, 2]], source_tokenizer=tokenizers["bpe"])


def test_states_that_are_not_finite_are_refused():
    source = tiny_model("llama")
    target = plant(source)
    # One token that overflows, as some do in float16: no error shows before it turns up in the text.
    target.model.embed_tokens.weight.data[399] = torch.inf
    texts = random_ids(source, 24, 60)
    texts[20, 30] = 399
    for num_source_layers in (1, 4):  # with and without choosing layers first
        with pytest.raises(CalibrationError, match="target layer 0 hold NaN or Inf"):
            fit_mapper(source, target, list(texts), num_source_layers=num_source_layers)


def test_too_few_texts_to_choose_layers_on_are_refused():
    source = tiny_model("llama")
    with pytest.raises(CalibrationError, match="9 texts gave .* and 0 held out"):
        fit_mapper(source, plant(source), list(random_ids(source, 9, 60)), num_source_layers=1)
