"""Rows of features, and of what the target itself knows of a token."""

import pytest
import torch

from hf_kvtransfer.fitting.states import TOKENS, PairedStates

from ..tiny_models import random_ids, tiny_model


SINKS = 4


@torch.no_grad()
def attention_input(model, input_ids, layer_idx):
    heard = []
    hook = model.model.layers[layer_idx].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: heard.append(kwargs["hidden_states"]), with_kwargs=True
    )
    model(input_ids)
    hook.remove()
    return heard[0]


# PrefixQuant#3
@pytest.mark.parametrize("native_layers", [None, 0, 2])
def test_token_features(native_layers):
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    texts = [random_ids(target, length, seed=length) for length in (40, 25)]  # padded to one batch
    reader = PairedStates(source, target, None, None, True, SINKS, 64, native_layers)
    reader.read(texts)  # both models are probed, once in their lives
    runs = []
    hook = target.model.register_forward_hook(lambda *_: runs.append(None))
    blocks = reader.read(texts)
    hook.remove()
    assert len(runs) == 1
    if native_layers is None:
        expected = [target.get_input_embeddings()(text) for text in texts]
    else:
        expected = [attention_input(target, text[None], native_layers)[0] for text in texts]
    expected = torch.cat([states[SINKS:] for states in expected])
    torch.testing.assert_close(blocks[TOKENS], expected, rtol=1e-4, atol=1e-5)
    assert not blocks[TOKENS].requires_grad
    assert all(len(rows) == len(expected) for rows in blocks.values())


def test_each_batch_has_its_own_and_without_token_features_none():
    model = tiny_model("llama")
    reader = PairedStates(model, model, None, None, True, SINKS, 64, 1)
    for seed in range(2):
        text = random_ids(model, 30, seed=seed)
        torch.testing.assert_close(reader.read([text])[TOKENS], attention_input(model, text[None], 1)[0, SINKS:])
    assert TOKENS not in PairedStates(model, model, None, None, False, SINKS, 64, 1).read([text])


@pytest.mark.parametrize("native_layers", [None, 2])
def test_tokens_before(native_layers):
    """Of rows of a padded batch, up to the first token of each."""
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    texts = [random_ids(target, length, seed=length) for length in (40, 25)]
    blocks = PairedStates(source, target, None, None, True, 1, 64, native_layers, 3).read(texts)
    for distance in (1, 2, 3):
        expected = []
        for text in texts:
            states = target.get_input_embeddings()(text)
            if native_layers is not None:
                states = attention_input(target, text[None], native_layers)[0]
            expected.append(states[[max(place - distance, 0) for place in range(1, len(text))]])
        torch.testing.assert_close(blocks[TOKENS, distance], torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_native_layers_that_do_not_exist():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no layer 4 that caches keys and values of its own, only layers"):
        PairedStates(model, model, None, None, True, SINKS, 64, 4)
