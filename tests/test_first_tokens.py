"""What a target has made of a beginning is held, and never longer than it is what the target would make of it now."""

import copy
import gc
import weakref

import pytest
import torch

from benchmarks.operations import Operations
from hf_kvtransfer.first_tokens import HELD, read_first_tokens
from hf_kvtransfer.native_states import read_first_layers

from .tiny_models import FAMILIES, random_ids, tiny_model


def runs(model, ids):
    """Whether the model is run for these tokens; what is returned must be what it makes of them."""
    with Operations() as operations:
        found = read_first_tokens(model, ids)
    expected = read_first_layers(model, ids, num_layers=3).keys_and_values
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)
    return bool(operations.products)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_beginning_is_read_once(family):
    model = tiny_model(family)
    ids = random_ids(model, 2, 4)
    assert [runs(model, tokens) for tokens in (ids, ids.clone(), ids[:1], ids[:, :3], ids)] == [1, 0, 1, 1, 0]
    assert runs(copy.deepcopy(model), ids)


def in_place(model):
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)


def without_a_trace(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data += 0.1 * torch.randn(weight.shape)  # as peft merges an adapter


def exchanged(model):
    model.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.full((64,), 1.5))


def rotated(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("change", [in_place, without_a_trace, exchanged, rotated])
def test_a_changed_model_reads_again(change):
    model = tiny_model("llama")
    ids = random_ids(model, 1, 4)
    runs(model, ids)
    change(model)
    assert [runs(model, ids), runs(model, ids)] == [True, False]


def test_a_model_with_hooks_reads_each_time():
    model = tiny_model("llama")
    ids = random_ids(model, 1, 4)
    hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    assert [runs(model, ids), runs(model, ids)] == [True, True]
    hook.remove()
    assert [runs(model, ids), runs(model, ids)] == [True, False]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_with_an_adapter_reads_each_time():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["v_proj"], r=4)).eval()
    ids = random_ids(model, 1, 4)
    assert [runs(model, ids), runs(model, ids)] == [True, True]


def test_few_beginnings_are_held_and_none_of_a_model_that_is_gone():
    model = tiny_model("llama")
    ids = random_ids(model, 12, 4)
    for row in ids:
        read_first_tokens(model, row[None])
    assert len(HELD[model]) == 8
    assert not runs(model, ids[-1:]) and runs(model, ids[:1])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
