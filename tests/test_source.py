import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, cache_utils

from hf_kvtransfer import BatchMismatchError, SourceCacheError, SourceKV, UnsupportedModelError
from hf_kvtransfer.compat import cache_argument, read_into_cache

from .tiny_models import FAMILIES, random_ids, tiny_model


LENGTH = 45


def filled(model, ids, cache=None, **arguments):
    cache = DynamicCache() if cache is None else cache
    read_into_cache(model, cache, ids, **arguments)
    return cache


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_keeps_every_token_without_position(family):
    model = tiny_model(family)
    ids = random_ids(model, 2, LENGTH)
    source_kv = SourceKV.prefill(model, None, ids)
    assert (len(source_kv), source_kv.batch_size) == (LENGTH, 2)
    # The same token at two positions of layer 0, which has seen nothing but the token: equal once position is removed.
    ids[:, 7] = ids[:, 30]
    source_kv = SourceKV.prefill(model, None, ids)
    keys = source_kv.key_states(0)
    torch.testing.assert_close(keys[:, :, 7], keys[:, :, 30], rtol=0, atol=1e-5)
    raw = filled(model, ids).layers[0]
    assert (raw.keys[:, :, 7] - raw.keys[:, :, 30]).abs().max() > 0.1
    torch.testing.assert_close(source_kv.value_states(0), raw.values, rtol=0, atol=0)


def test_padding_does_not_matter(llama):
    ids = random_ids(llama, 1, 20)
    alone = SourceKV.prefill(llama, None, ids)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], 1)
    mask = (torch.arange(26) >= 6).long()[None]
    batch = SourceKV.prefill(llama, None, padded, attention_mask=mask)
    assert batch.position_ids[0].tolist() == [0] * 6 + list(range(20))
    for layer_idx in range(4):
        torch.testing.assert_close(batch.key_states(layer_idx)[:, :, 6:], alone.key_states(layer_idx))


# transformers#32681
def test_the_cache_is_copied_and_detached(llama):
    ids = random_ids(llama, 1, 10)
    cache = DynamicCache()
    llama(ids, use_cache=True, **{cache_argument(llama): cache})  # with gradients
    source_kv = SourceKV.from_cache(cache, llama, ids)
    before = source_kv.value_states(1).clone()
    cache.layers[1].values.data.zero_()
    assert torch.equal(source_kv.value_states(1), before)
    assert not source_kv.key_states(1).requires_grad


def test_static_cache_as_a_source(llama):
    ids = random_ids(llama, 1, 10)
    static = SourceKV.from_cache(filled(llama, ids, StaticCache(llama.config, max_cache_len=32)), llama, ids)
    dynamic = SourceKV.from_cache(filled(llama, ids), llama, ids)
    torch.testing.assert_close(static.key_states(2), dynamic.key_states(2))


# transformers#35168, NVIDIA/kvpress#16
def test_lost_tokens_are_refused(gemma, llama):
    ids = random_ids(gemma, 1, LENGTH)
    with pytest.raises(SourceCacheError, match=r"Layer 0 .* holds 31 of 45 tokens.*SourceKV.prefill"):
        SourceKV.from_cache(filled(gemma, ids, DynamicCache(config=gemma.config)), gemma, ids)
    recorded = DynamicCache(config=gemma.config)
    recorded.activate_past_recording()
    assert len(SourceKV.from_cache(filled(gemma, ids, recorded), gemma, ids)) == LENGTH

    cropped = filled(llama, ids)
    cropped.crop(-3)
    with pytest.raises(SourceCacheError, match="stands for 42 tokens, `input_ids` has 45"):
        SourceKV.from_cache(cropped, llama, ids)
    compressed = filled(llama, ids)
    compressed.layers[2].keys = compressed.layers[2].keys[:, :, ::2]
    with pytest.raises(SourceCacheError, match=r"Layer 2 .* holds 23 of 45 tokens"):
        SourceKV.from_cache(compressed, llama, ids)


def test_a_cache_of_another_model_or_batch_is_refused(gemma, llama):
    ids = random_ids(llama, 1, 10)
    with pytest.raises(SourceCacheError, match=r"Layer 0 .* shape \[1, 2, 10, 16\], expected \[1, 2, 10, 24\]"):
        SourceKV.from_cache(filled(llama, ids), gemma, ids)
    with pytest.raises(SourceCacheError, match="3 layers, its model 4"):
        SourceKV.from_cache(filled(tiny_model("llama", num_hidden_layers=3), ids), llama, ids)
    with pytest.raises(SourceCacheError, match=r"expected \[2, 2, 10, 16\]"):
        SourceKV.from_cache(filled(llama, ids), llama, ids.repeat(2, 1))
    with pytest.raises(BatchMismatchError, match="`attention_mask` has shape"):
        SourceKV.prefill(llama, None, ids, attention_mask=torch.ones(1, 9))
    with pytest.raises(BatchMismatchError, match="Row 1 of `attention_mask` has padding behind a token"):
        SourceKV.prefill(llama, None, ids.repeat(2, 1), attention_mask=(torch.arange(20) < 19).long().view(2, 10))
    with pytest.raises(SourceCacheError, match="no tokens"):
        SourceKV.prefill(llama, None, ids[:, :0])


# NVIDIA/kvpress#27
@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="fp8 caches came with transformers 5.22")
def test_quantised_cache_is_refused(llama):
    ids = random_ids(llama, 1, 10)
    with pytest.raises(SourceCacheError, match="quantised"):
        SourceKV.from_cache(filled(llama, ids, QuantizedCache("fp8", llama.config)), llama, ids)


# transformers#25104
def test_length_dependent_rotary_is_refused_beyond_its_original_length():
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = tiny_model("llama", max_position_embeddings=32, rope_parameters=rope)
    assert len(SourceKV.prefill(model, None, random_ids(model, 1, 32))) == 32
    with pytest.raises(UnsupportedModelError, match="33 positions"):
        SourceKV.prefill(model, None, random_ids(model, 1, 33))


def test_slices_are_views(llama):
    ids = random_ids(llama, 2, 20)
    source_kv = SourceKV.prefill(llama, None, ids)
    part = source_kv[5:12]
    assert torch.equal(part.input_ids, ids[:, 5:12])
    assert torch.equal(part.key_states(1), source_kv.key_states(1)[:, :, 5:12])
    assert part.key_states(1).data_ptr() == source_kv.key_states(1)[:, :, 5:].data_ptr()
    with pytest.raises(TypeError, match="range of tokens"):
        source_kv[3]


def test_text_and_spans(llama, tokenizers):
    tokenizer = tokenizers["bpe"]
    texts = ["The harbour lies where the river meets the sea.", "Naïve café 🎉 日本語."]
    source_kv = SourceKV.prefill(llama, tokenizer, texts)
    assert source_kv.text == texts
    for row, text in enumerate(texts):
        spans = source_kv.row_spans(row)
        assert spans[-1][1] == len(text)
        assert all(a[1] <= b[1] for a, b in zip(spans, spans[1:], strict=False))
    # From the ids alone.
    known = SourceKV.from_cache(
        filled(
            llama, source_kv.input_ids, attention_mask=source_kv.attention_mask, position_ids=source_kv.position_ids
        ),
        llama,
        source_kv.input_ids,
        attention_mask=source_kv.attention_mask,
        tokenizer=tokenizer,
    )
    assert known.text == texts
    assert torch.equal(known.spans, source_kv.spans)
    assert known.identity == source_kv.identity
    part = source_kv[-6:-2]
    for row in range(2):
        assert part.text[row] in texts[row]
        assert part.row_spans(row)[0][0] == 0


def test_prefill_without_losses(llama):
    ids = torch.tensor([[5, 6, 7]])
    plain, without = SourceKV.prefill(llama, None, ids), SourceKV.prefill(llama, None, ids, token_losses=False)
    assert plain.token_losses is not None
    assert without.token_losses is None
    for ours, theirs in zip(without.features, plain.features, strict=True):
        assert torch.equal(ours, theirs)


def test_text_without_its_spans_is_refused(llama):
    ids = torch.tensor([[5, 6, 7]])
    cache = llama(ids).past_key_values
    for given, missing, value in (("text", "spans", ["abc"]), ("spans", "text", torch.zeros(1, 3, 2).long())):
        with pytest.raises(ValueError, match=f"`{given}` is given without `{missing}`"):
            SourceKV.from_cache(cache, llama, ids, **{given: value})


def test_save_and_load(gemma, tokenizers, tmp_path):
    source_kv = SourceKV.prefill(gemma, tokenizers["bpe"], ["One text.", "Another, longer text."])
    source_kv.save(tmp_path / "source.safetensors")
    loaded = SourceKV.load(tmp_path / "source.safetensors")
    assert loaded.geometry == source_kv.geometry
    assert (loaded.text, loaded.identity) == (source_kv.text, source_kv.identity)
    for name in ("input_ids", "attention_mask", "position_ids", "spans"):
        assert torch.equal(getattr(loaded, name), getattr(source_kv, name))
    assert all(torch.equal(a, b) for a, b in zip(loaded.features, source_kv.features, strict=True))


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_damaged_files_are_refused(llama, tmp_path, damage):
    path = tmp_path / "source.safetensors"
    SourceKV.prefill(llama, None, random_ids(llama, 1, 5)).save(path)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, path)
    with pytest.raises(SourceCacheError, match="source.safetensors"):
        SourceKV.load(path)
