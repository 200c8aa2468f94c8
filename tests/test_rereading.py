"""Tokens that a target reads again in place, wherever they stand in a cache."""

import functools

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import UnsupportedModelError
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.rereading import reread

from .generation.families import build
from .tiny_models import random_ids, tiny_model


# Longer than the windows of the tiny Gemma.
LENGTH = 45


def read(model, ids):
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    read_into_cache(model, cache, ids)
    return cache


def blurred(cache, seed=0):
    """Other keys and values for all tokens."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        layer.keys, layer.values = (
            states + torch.randn(states.shape, generator=generator) for states in (layer.keys, layer.values)
        )
    return cache


def states_of(cache, positions=slice(None)):
    return [states[:, :, positions] for layer in cache.layers for states in (layer.keys, layer.values)]


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral", "gpt2"])
def model(request):
    return tiny_model(request.param) if request.param in ("llama", "gemma3") else build(request.param)


def test_all_tokens_are_a_prefill(model):
    ids = random_ids(model, 2, LENGTH)
    cache = blurred(read(model, ids))
    reread(model, cache, ids, torch.arange(LENGTH).expand(2, -1))
    torch.testing.assert_close(states_of(cache), states_of(read(model, ids)), rtol=0, atol=1e-4)


def test_what_was_right_stays_right(model):
    """Other tokens in each row, read in one pass, each behind all that precede it and no others."""
    ids = random_ids(model, 2, LENGTH)
    cache = read(model, ids)
    reread(model, cache, ids, torch.tensor([[0, 3, 17, LENGTH - 1], [5, 6, 7, 40]]))
    torch.testing.assert_close(states_of(cache), states_of(read(model, ids)), rtol=0, atol=1e-4)


def test_first_tokens_are_exact_and_the_others_left_alone(model):
    ids = random_ids(model, 1, LENGTH)
    native, before = states_of(read(model, ids), slice(3)), blurred(read(model, ids))
    given = states_of(before)
    kept = [states.clone() for states in given]
    reread(model, before, ids, torch.arange(3)[None])
    torch.testing.assert_close(states_of(before, slice(3)), native, rtol=0, atol=1e-4)
    for now, then in zip(states_of(before, slice(3, None)), kept, strict=True):
        assert torch.equal(now, then[:, :, 3:])
    # Nor are tensors written into that others may hold.
    assert all(torch.equal(states, then) for states, then in zip(given, kept, strict=True))


def test_none_is_none(model):
    ids = random_ids(model, 1, 8)
    cache = read(model, ids)
    keys = cache.layers[0].keys
    reread(model, cache, ids, torch.empty(1, 0, dtype=torch.long))
    assert cache.layers[0].keys is keys


def test_other_attention_is_refused():
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"'flash_attention_2'.*load it with `attn_implementation` eager"):
        reread(model, None, random_ids(model, 1, 8), torch.tensor([[1]]))
    chunked = build("llama4")
    with pytest.raises(UnsupportedModelError, match="`layer_types`"):
        reread(chunked, None, random_ids(chunked, 1, 8), torch.tensor([[1]]))


def test_a_model_that_looks_elsewhere_is_found_out(monkeypatch):
    model = tiny_model("llama")
    forward = model.model.forward

    @functools.wraps(forward)
    def careless(attention_mask=None, **arguments):
        return forward(attention_mask=None if attention_mask is None else 0 * attention_mask, **arguments)

    monkeypatch.setattr(model.model, "forward", careless)
    ids = random_ids(model, 1, 8)
    with pytest.raises(UnsupportedModelError, match="makes other keys and values of tokens that it reads again"):
        reread(model, read(model, ids), ids, torch.tensor([[1]]))
