"""cos and sin of a model's first positions are computed once, and are always those of its module as it is now."""

import pytest
import torch

from hf_kvtransfer.probe.rotary_call import RotaryCall
from hf_kvtransfer.rotary import Rotary

from ..tiny_models import tiny_model


@pytest.fixture
def rotary():
    return Rotary.from_model(tiny_model("gemma3"))


@pytest.fixture
def computed(monkeypatch):
    """How many positions the module was asked for, call by call."""
    calls, call = [], RotaryCall.__call__
    monkeypatch.setattr(RotaryCall, "__call__", lambda self, ids: calls.append(ids.shape[1]) or call(self, ids))
    return calls


def rotate(rotary, positions, layer_idx=0):
    keys = torch.randn(1, 2, len(positions), 24, generator=torch.Generator().manual_seed(0))
    return rotary.at(torch.tensor([positions])).apply(keys, layer_idx)


def test_positions_are_computed_as_far_as_they_are_asked_for(rotary, computed):
    rotate(rotary, range(10))
    assert computed == [256]
    rotate(rotary, range(200, 256))
    assert computed == [256]
    rotate(rotary, range(500, 600))
    assert computed == [256] + 4 * [256]
    rotate(rotary, range(1024))
    assert sum(computed) == 256 + 1024


def test_others_are_computed_each_time(rotary, computed):
    for positions in ([3, 5], [4, 3], [5, 0], range(8190, 8200)):
        rotate(rotary, positions)
    assert computed == [2, 2, 2, 10]


def test_the_same_as_without(rotary):
    call, columns = rotary.calls[0], rotary.layers[0].columns
    positions = torch.arange(100, 700)[None]
    for own, made in zip(rotary.cos_and_sin(0, columns, positions), call(positions), strict=True):
        torch.testing.assert_close(own, made[..., : own.shape[-1]], rtol=0, atol=1e-6)


def test_a_changed_module_is_asked_again(rotary):
    layers = range(len(rotary.layers))
    before = [rotate(rotary, range(30), i) for i in layers]
    for call in rotary.calls:
        for buffer in call.module.buffers():
            buffer.data.mul_(0.5)
        break
    for i, keys in zip(layers, before, strict=True):
        assert not torch.allclose(rotate(rotary, range(30), i), keys)
