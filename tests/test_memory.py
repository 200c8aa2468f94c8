"""What a handoff keeps alive, and for how long."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from benchmarks.memory import LiveTensors, temporary_memory
from hf_kvtransfer import FidelityGate, SourceKV
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint

from .tiny_models import (
    identity_mapper,
    random_ids,
    random_mapper,
    tiny_model,
    ungated_cache,
    with_native_layers,
)


UNGATED = {"gate": FidelityGate(strict=False)}


@pytest.fixture(scope="module")
def pair():
    room = {"max_position_embeddings": 4096}
    return tiny_model("llama", **room), tiny_model("gemma3", seed=1, sliding_window=4096, **room)


def test_live_tensors_are_counted():
    with LiveTensors() as live:
        one = torch.zeros(100)
        view = one[10:].add_(1)
        two = one + 1
        assert (live.bytes, live.peak) == (800, 800)
        del one
        assert live.bytes == 800  # the view keeps it
        del view, two
        three = torch.zeros(50)
        assert (live.bytes, live.peak) == (200, 800)
        del three
        assert live.bytes == 0


@pytest.mark.parametrize("previous_tokens", [0, 3])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [128, 512, 2048])
def test_no_more_than_two_layers_beside_the_cache(pair, length, source_dtype, previous_tokens):
    """Through wide maps with token features, also where the source's states are of another dtype than the target's."""
    source, target = pair
    if source_dtype != torch.float32:
        source = copy.deepcopy(source).to(source_dtype)
    mapper = random_mapper(source, target, token_features=64, previous_tokens=previous_tokens)
    source_kv = SourceKV.prefill(source, None, random_ids(source, 1, length))
    temporary_memory(source_kv, mapper, target, **UNGATED)  # what is kept of a model stays: cos and sin of positions
    temporary, layer, cache = temporary_memory(source_kv, mapper, target, **UNGATED)
    features = mapper.target_geometry.num_features(0)
    assert (layer, cache) == (length * features * 4, 4 * length * features * 4)
    assert temporary <= 2 * layer


def test_no_more_than_two_layers_between_tokenizers(pair, tokenizers):
    """What a map makes of the source's tokens is gathered at the target's."""
    source, target = pair
    fingerprints = tokenizer_fingerprint(tokenizers["bpe"]), tokenizer_fingerprint(tokenizers["unigram"])
    mapper = random_mapper(source, target, fingerprints, token_features=64)
    text = ["The harbour lies where the river meets the sea, and forty boats work from it. " * n for n in (9, 7)]
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], text)
    options = UNGATED | {"target_tokenizer": tokenizers["unigram"]}
    temporary_memory(source_kv, mapper, target, **options)  # as above
    temporary, layer, _ = temporary_memory(source_kv, mapper, target, **options)
    assert temporary <= 2 * layer


@pytest.mark.parametrize("distinct", [20, 100])
@pytest.mark.parametrize("length", [128, 512])
def test_no_more_than_two_layers_behind_a_native_one(length, distinct):
    """What is held of the first layer are hidden states of the distinct tokens, and no keys and values."""
    room = {"max_position_embeddings": 4096}
    source, target = tiny_model("llama", **room), tiny_model("gemma3", seed=1, sliding_window=4096, **room)
    mapper = with_native_layers(random_mapper(source, target), 0, 64)
    source_kv = SourceKV.prefill(source, None, random_ids(source, 1, length) % distinct)
    temporary_memory(source_kv, mapper, target, **UNGATED)  # what is found out about a model stays
    temporary, layer, _ = temporary_memory(source_kv, mapper, target, **UNGATED)
    assert temporary <= 2 * layer


@pytest.mark.parametrize("keep", [True, False])
def test_weights_in_8_bits_are_made_dense_once(pair, keep):
    """Later requests take no memory for them; without `keep_dense` every request does, and the mapper none."""
    source, target = pair
    mapper = random_mapper(source, target, token_features=64).quantize(8)
    mapper.keep_dense = keep
    before = mapper.digest(), mapper.num_bytes()
    source_kv = SourceKV.prefill(source, None, random_ids(source, 1, 128))
    first = temporary_memory(source_kv, mapper, target, **UNGATED)[0]
    temporary, layer, _ = temporary_memory(source_kv, mapper, target, **UNGATED)
    dense = 4 * mapper.target_geometry.num_features(0) * (7 * mapper.source_geometry.num_features(0) + 4 * 64)
    if keep:
        assert temporary <= 2 * layer and first - temporary >= dense
    else:
        assert temporary == first
    assert (mapper.digest(), mapper.num_bytes()) == before


def update(cache, layer_idx):
    states = torch.zeros(1, 2, 1, 24)
    cache.update(states, states, layer_idx)


def test_source_layers_are_let_go_of_by_their_last_reader(pair):
    source, target = pair
    mapper = random_mapper(source, target)
    ids = random_ids(source, 1, 20)
    source_cache = DynamicCache(config=source.config)
    read_into_cache(source, source_cache, ids)
    before = [layer.keys.clone() for layer in source_cache.layers]
    source_kv = SourceKV.from_cache(source_cache, source, ids)
    features = [weakref.ref(states) for states in source_kv.features]

    def alive():
        gc.collect()
        return [i for i, states in enumerate(features) if states() is not None]

    cache = ungated_cache(source_kv, mapper, target)
    twin = copy.deepcopy(cache)
    assert alive() == [0, 1, 2, 3]
    del source_kv
    assert alive() == [0, 1, 3]  # nobody reads layer 2
    for layer_idx in range(4):
        update(twin, layer_idx)
    assert alive() == [0, 1, 3]  # the cache that it was copied from still needs them
    held = []
    for layer_idx in range(4):
        update(cache, layer_idx)
        held.append(alive())
    assert held == [[0, 1, 3], [0, 1, 3], [3], []]
    # What the user holds is the user's.
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(source_cache.layers, before, strict=True))


def test_a_source_that_is_held_stays(pair):
    source, target = pair
    source_kv = SourceKV.prefill(source, None, random_ids(source, 1, 20))
    expected = [states.clone() for states in source_kv.features]
    cache = ungated_cache(source_kv, random_mapper(source, target), target)
    for layer_idx in range(4):
        update(cache, layer_idx)
    assert all(torch.equal(own, other) for own, other in zip(source_kv.features, expected, strict=True))


@pytest.mark.parametrize("window", [16, 4096])
def test_a_pass_is_taken_back_without_the_source(window, monkeypatch):
    """Also where the window has slid since, and where the source is gone."""
    target = tiny_model("gemma3", sliding_window=window)
    ids = random_ids(target, 1, 40)
    cache = ungated_cache(SourceKV.prefill(target, None, ids), identity_mapper(target), target)
    expected = [(layer.keys, layer.values) for layer in copy.deepcopy(cache).layers]
    update(cache, 0)
    update(cache, 1)
    update(cache, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(cache.layers[3].pending.translator), "layer", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            update(cache, 3)
    assert [cache.get_seq_length(i) for i in range(4)] == [39] * 4
    for layer, (keys, values) in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
