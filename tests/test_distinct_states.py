"""The first layer's states of distinct tokens stand for those of all tokens, or are not used."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_kvtransfer.distinct_states import read_distinct
from hf_kvtransfer.native_states import read_first_layers

from .tiny_models import FAMILIES, random_ids, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_what_the_model_makes_of_all_tokens(family):
    model = tiny_model(family)
    ids = random_ids(model, 2, 60) % 20 + 3
    distinct, whole = read_distinct(model, ids), read_first_layers(model, ids, num_layers=0)
    torch.testing.assert_close(distinct.hidden_states[distinct.index], whole.hidden_states)
    for start, stop in ((0, 60), (7, 31)):
        found = distinct.keys_and_values(start, stop, model, ids, torch.arange(60)[None])
        for own, other in zip(found, whole.keys_and_values[0], strict=True):
            torch.testing.assert_close(own, other[:, :, start:stop])


def test_tokens_that_hardly_repeat_are_read_as_they_stand():
    model = tiny_model("llama")
    assert read_distinct(model, torch.arange(3, 63)[None]) is None
    assert read_distinct(model, torch.tensor([[5, 6, 6]])) is None


def test_in_bfloat16_the_keys_are_the_models_own():
    model = tiny_model("llama").to(torch.bfloat16)
    assert read_distinct(model, random_ids(model, 1, 60) % 20 + 3) is None


def test_states_that_do_not_follow_from_the_id_are_noticed():
    torch.manual_seed(0)
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=128)).eval()
    assert read_distinct(learned, random_ids(learned, 1, 60) % 20 + 3) is None
    model = tiny_model("llama")
    ids = random_ids(model, 1, 60) % 20 + 3
    assert read_distinct(model, ids) is not None
    # As in models with a convolution in front of the keys: a neighbour is in them.
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, keys: keys + keys.roll(1, 1))
    assert read_distinct(model, ids) is None


def test_keys_and_values_are_let_go_of():
    """Whoever asks a second time is given what the model makes of the range alone."""
    model = tiny_model("gemma3")
    ids = random_ids(model, 2, 60) % 20 + 3
    positions = torch.arange(60).expand_as(ids)
    states = read_distinct(model, ids)
    first = states.keys_and_values(0, 60, model, ids, positions)
    assert states.key_states is None and states.value_states is None
    for own, other in zip(states.keys_and_values(7, 31, model, ids, positions), first, strict=True):
        torch.testing.assert_close(own, other[:, :, 7:31])


def test_rows_are_in_the_order_of_last_places():
    """So that what the end of a context holds is the first rows, however far back it begins."""
    ids = random_ids(tiny_model("llama"), 2, 60) % 20 + 3
    index = read_distinct(tiny_model("llama"), ids).index
    for start in (0, 20, 40, 55):
        assert index[:, start:].unique().tolist() == list(range(len(ids[:, start:].unique())))
