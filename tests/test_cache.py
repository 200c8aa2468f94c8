"""`TranslatedCache` in `generate`, with the identity mapper: everything must be as native."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvtransfer import (
    BatchMismatchError,
    KVMapper,
    PairMismatchError,
    PrefixMismatchError,
    SourceCacheError,
    SourceKV,
)
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.layers import PendingLayer, TranslatedLayer, TranslatedSlidingWindowLayer
from hf_kvtransfer.translation import Translation

from .generation.families import build
from .tiny_models import FAMILIES, fail_from_layer, identity_mapper, random_ids, tiny_model, ungated_cache


# Longer than the windows of the tiny Gemma.
LENGTH = 45


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def mapper(model):
    return identity_mapper(model)


def translated(model, ids, mapper=None, mask=None, **options):
    source_kv = SourceKV.prefill(model, None, ids, attention_mask=mask)
    return ungated_cache(source_kv, mapper or identity_mapper(model), model, **options)


def run(model, ids, cache=None, **options):
    """Logits of every step, `[steps, batch, vocab_size]`, and the sequences."""
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True} | options
    if cache is not None:
        options[cache_argument(model)] = cache
    output = model.generate(ids, return_dict_in_generate=True, **options)
    return torch.stack(output.logits), output.sequences


def assert_native(model, ids, cache, **options):
    logits, sequences = run(model, ids, cache, **options)
    native_logits, native_sequences = run(model, ids, **options)
    assert torch.equal(sequences, native_sequences)
    torch.testing.assert_close(logits, native_logits, rtol=0, atol=2e-5)


@pytest.fixture
def calls(monkeypatch):
    """Layers asked of any translation, in order."""
    asked = []
    layer = Translation.layer

    def counted(self, layer_idx, *args):
        asked.append(layer_idx)
        return layer(self, layer_idx, *args)

    monkeypatch.setattr(Translation, "layer", counted)
    return asked


def test_generates_as_native_and_translates_each_layer_once(model, mapper, calls):
    ids = random_ids(model, 1, LENGTH)
    cache = translated(model, ids, mapper)
    assert cache.get_seq_length() == LENGTH - 1
    assert calls == []
    assert_native(model, ids, cache)
    assert calls == list(range(model.config.num_hidden_layers))
    # Nothing of the translation is left in the decoding loop.
    assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


# NVIDIA/kvpress#134, transformers#37906
@pytest.mark.parametrize("length", [1, 2, 5, 6, 32, 33])
def test_short_contexts(gemma, length):
    ids = random_ids(gemma, 1, length)
    assert_native(gemma, ids, translated(gemma, ids))


# transformers#29419, transformers#3095, transformers#3021
def test_the_prompt_may_be_given_with_rows_that_go_on_at_different_places(gemma):
    """Rows of a left-padded prompt whose contexts end in different columns."""
    contexts, questions = (20, 31), (9, 3)
    rows = [random_ids(gemma, c + q, seed=c) for c, q in zip(contexts, questions, strict=True)]
    width = max(map(len, rows))
    prompt, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    source_ids, source_mask = torch.zeros(2, 31, dtype=torch.long), torch.zeros(2, 31, dtype=torch.long)
    for i, row in enumerate(rows):
        prompt[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
        source_ids[i, 31 - contexts[i] :], source_mask[i, 31 - contexts[i] :] = row[: contexts[i]], 1
    cache = translated(gemma, source_ids, mask=source_mask, input_ids=prompt, attention_mask=mask)
    # As far as the shortest context reaches in the batch: column 5 + 20, and the tail.
    assert cache.get_seq_length() == 24
    assert cache.report.held_back_tokens == (31 - 24) + (25 - 24)
    assert_native(gemma, prompt, cache, attention_mask=mask)


# transformers#39711, transformers#40039
def test_lengths_masks_and_edits_need_no_translation(gemma, calls):
    ids = random_ids(gemma, 2, LENGTH)
    stock = DynamicCache(config=gemma.config)
    with torch.no_grad():
        gemma(ids[:, :-1], use_cache=True, **{cache_argument(gemma): stock})
    cache = translated(gemma, ids)
    kinds = {type(layer) for layer in cache.layers}
    assert kinds == {TranslatedLayer, TranslatedSlidingWindowLayer}
    for layer_idx in range(len(stock)):
        assert cache.get_seq_length(layer_idx) == stock.get_seq_length(layer_idx)
        assert cache.get_mask_sizes(3, layer_idx) == stock.get_mask_sizes(3, layer_idx)
    assert cache.is_initialized
    assert cache.is_sliding == stock.is_sliding
    assert not cache.is_compileable
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.crop(-5)
    twin = copy.deepcopy(cache)
    assert calls == []
    assert_native(gemma, ids[[1, 0]], cache)
    assert_native(gemma, ids[[1, 0]], twin)


# transformers#32159, transformers#24841
def test_copies_are_independent_and_share_the_mapper(gemma, calls):
    ids = random_ids(gemma, 1, LENGTH)
    mapper = identity_mapper(gemma)
    cache = translated(gemma, ids, mapper)
    twin = copy.deepcopy(cache)
    assert twin.layers[0].pending.translator.mapper is mapper
    for question in (3, 4):
        prompt = torch.cat([ids, random_ids(gemma, 1, question, seed=question)], 1)
        assert_native(gemma, prompt, copy.deepcopy(cache))
    assert calls == [0, 1, 2, 3] * 2
    assert cache.get_seq_length() == twin.get_seq_length() == LENGTH - 1


# transformers#48809
def test_reset_leaves_the_source_as_it_was(gemma):
    ids = random_ids(gemma, 1, LENGTH)
    cache = translated(gemma, ids)
    source = cache.layers[0].pending.translator.source_kv
    before = source.key_states(0).clone()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized
    assert torch.equal(source.key_states(0), before)
    cache = translated(gemma, ids)
    cache.crop(-LENGTH)
    assert cache.get_seq_length() == 0
    assert not cache.is_translation
    assert_native(gemma, ids, cache)


# transformers#46629
def test_layers_that_share_keys_and_values_are_left_to_their_owners(calls):
    model = build("gemma3n")
    ids = random_ids(model, 1, 30)
    cache = translated(model, ids)
    assert [isinstance(layer, PendingLayer) for layer in cache.layers][:2] == [True, True]
    assert not any(isinstance(layer, PendingLayer) for layer in cache.layers[2:])
    assert_native(model, ids, cache)
    assert calls == [0, 1]


# transformers#38156
def test_a_window_holds_what_it_can_still_see(gemma):
    ids = random_ids(gemma, 1, LENGTH)
    cache = translated(gemma, ids)
    keys = [layer.keys for layer in cache.layers]
    window = gemma.config.sliding_window
    assert [k.shape[2] for k in keys] == [window - 1 if sliding else LENGTH - 1 for sliding in cache.is_sliding]
    assert cache.layers[0].cumulative_length == LENGTH - 1
    assert_native(gemma, ids, cache)


def test_past_recording_keeps_every_token_for_rollbacks(gemma):
    ids = random_ids(gemma, 1, LENGTH)
    cache = translated(gemma, ids)
    cache.activate_past_recording()
    run(gemma, ids, cache, max_new_tokens=1)
    cache.crop(-10)
    assert_native(gemma, ids, cache)


# transformers#25420, transformers#30019, TransformerLens#1260, transformers#26836
def test_dtype_comes_from_the_target(model, mapper):
    half = copy.deepcopy(model).to(torch.bfloat16)
    ids = random_ids(model, 1, LENGTH)
    cache = ungated_cache(SourceKV.prefill(model, None, ids), mapper, half)
    logits, _ = run(half, ids, cache, max_new_tokens=2)
    assert {layer.keys.dtype for layer in cache.layers} == {layer.values.dtype for layer in cache.layers}
    assert cache.layers[0].keys.dtype == torch.bfloat16
    native, _ = run(half, ids, max_new_tokens=2)
    assert (logits - native).abs().max() < 0.1 * native.abs().max()


def test_a_failing_layer_leaves_a_cache_that_can_be_asked_again(gemma, monkeypatch):
    ids = random_ids(gemma, 1, LENGTH)
    cache = translated(gemma, ids)
    assert cache.layers[1].keys is not None  # translated already, and about to be appended to
    with monkeypatch.context() as patch:
        fail_from_layer(patch, 2)
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            run(gemma, ids, cache)
    (note,) = raised.value.__notes__
    model = "Gemma3ForCausalLM (3 layers of 2 KV heads x 24, window 32, 1 layer of 2 KV heads x 24)"
    assert note == (
        f"While layer 2 was translated, {LENGTH - 1} tokens: mapper tiny -> tiny, from {model} to {model}."
    )
    assert [cache.get_seq_length(i) for i in range(4)] == [LENGTH - 1] * 4
    assert_native(gemma, ids, cache)


def test_a_cache_given_to_another_model_says_whose_it_is(gemma):
    llama = tiny_model("llama")
    ids = random_ids(llama, 1, LENGTH)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match") as raised:
        run(gemma, ids, translated(llama, ids))
    model = "LlamaForCausalLM (4 layers of 2 KV heads x 16)"
    assert f"While layer 0 was translated, {LENGTH - 1} tokens" in raised.value.__notes__[0]
    assert f"mapper tiny -> tiny, from {model} to {model}" in raised.value.__notes__[0]


def test_a_batch_that_the_cache_cannot_serve(gemma):
    ids = random_ids(gemma, 2, LENGTH)
    cache = translated(gemma, ids)
    with pytest.raises(BatchMismatchError, match="holds 2 rows, the target runs 3") as raised:
        run(gemma, ids[[0, 1, 1]], cache)
    assert "While layer 0 was translated" in raised.value.__notes__[0]
    assert_native(gemma, ids, cache)
    with pytest.raises(BatchMismatchError, match="3 rows"):
        translated(gemma, ids).prepare({"input_ids": ids[[0, 1, 1]]})
    with pytest.raises(BatchMismatchError, match="3 rows"):
        translated(gemma, ids, input_ids=ids[[0, 1, 1]])


def test_a_prompt_that_is_another_text(gemma):
    ids = random_ids(gemma, 2, LENGTH)
    with pytest.raises(PrefixMismatchError, match="Start the prompt with"):
        translated(gemma, ids, input_ids=random_ids(gemma, 2, LENGTH, seed=11))


# Mesh-LLM#1652
def test_a_translation_is_no_source(gemma):
    ids = random_ids(gemma, 1, LENGTH)
    cache = translated(gemma, ids)
    with pytest.raises(SourceCacheError, match="translation of a translation"):
        SourceKV.from_cache(cache, gemma, ids[:, :-1])


# MemTensor/MemOS#2301
def test_a_plain_cache_with_its_model_and_ids_is_a_source(model, mapper):
    ids = random_ids(model, 1, 25)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_argument(model): cache})
    options = {"source_model": model, "source_input_ids": ids}
    assert_native(model, ids, ungated_cache(cache, mapper, model, **options))
    # The source cache is left as it was, and may be used again.
    assert cache.get_seq_length() == 25
    assert_native(model, ids, ungated_cache(cache, mapper, model, **options))
    with pytest.raises(ValueError, match="source_model"):
        ungated_cache(cache, mapper, model)


def test_mapper_from_a_folder(gemma, tmp_path):
    identity_mapper(gemma).save_pretrained(tmp_path)
    ids = random_ids(gemma, 1, LENGTH)
    assert_native(gemma, ids, ungated_cache(SourceKV.prefill(gemma, None, ids), tmp_path, gemma))
    assert isinstance(KVMapper.from_pretrained(tmp_path), KVMapper)


def test_a_wrong_pair_is_refused(gemma):
    llama = tiny_model("llama")
    ids = random_ids(gemma, 1, LENGTH)
    with pytest.raises(
        PairMismatchError, match=r"for a source of 3 layers of 2 KV heads x 24.*caches 4 layers of 2 KV heads x 16"
    ):
        ungated_cache(SourceKV.prefill(llama, None, ids), identity_mapper(gemma), gemma)
    with pytest.raises(PairMismatchError, match="for a target of"):
        ungated_cache(SourceKV.prefill(gemma, None, ids), identity_mapper(gemma), llama)
