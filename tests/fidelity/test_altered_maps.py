"""What controls are made of: maps of every kind, with each output's weights in random order."""

import copy

import pytest
import torch

from hf_kvtransfer import KVMapper, KVMapperConfig
from hf_kvtransfer.fidelity.altered_maps import random_map, raw_source
from hf_kvtransfer.geometry import KVGeometry, LayerGeometry
from hf_kvtransfer.maps.native import NativeLayer


# A native layer, one for each kind, and one that caches nothing.
GEOMETRY = KVGeometry((*[LayerGeometry(2, 6, 5)] * 7, None))
TOKEN_FEATURES = 4
LAYERS = [
    {"kind": "native"},
    {"kind": "linear", "source_layers": [1, 0]},
    {"kind": "head_matched", "source_layers": [2], "source_heads": [[1, 0]]},
    {"kind": "low_rank", "source_layers": [0], "rank": 3},
    {"kind": "residual_mlp", "source_layers": [2], "hidden_size": 5},
    {"kind": "identity", "source_layers": [1], "rank": 2},
    {"kind": "identity", "source_layers": [2], "rank": 0},
    None,
]
MAPPED = range(1, 7)


@pytest.fixture(params=[None, 8, 4])
def mapper(request):
    side = {"name": "a", "geometry": GEOMETRY.to_dict(), "tokenizer": None}
    mapper = KVMapper(KVMapperConfig(source=side, target=side, layers=LAYERS, token_features=TOKEN_FEATURES))
    torch.manual_seed(0)
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter)
    return mapper if request.param is None else mapper.quantize(request.param, group_size=4)


def outputs(mapper):
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(1, 9, 22, generator=generator) for _ in range(7)]
    tokens = torch.randn(1, 7, TOKEN_FEATURES, generator=generator)
    index = torch.tensor([[0, 2, 2, 3, 5, 8, 8]])
    maps = [mapper.layers[i] for i in MAPPED]
    return [layer_map([states[j] for j in layer_map.source_layers], tokens, index) for layer_map in maps]


def test_every_mapped_layer_says_something_else(mapper):
    before = copy.deepcopy(mapper.state_dict())
    right = outputs(mapper)
    first, same, second = (random_map(mapper, seed) for seed in (0, 0, 1))
    for found, again, other, expected in zip(*map(outputs, (first, same, second)), right, strict=True):
        assert torch.equal(found, again)
        for a, b in ((found, expected), (found, other)):
            assert a.shape == b.shape
            assert (a - b).norm() > 0.3 * b.norm()
    assert all(torch.equal(before[name], tensor) for name, tensor in mapper.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(outputs(mapper), right, strict=True))


def test_weights_are_in_another_order_and_biases_stay(mapper):
    plain, shuffled = mapper.dequantize(), random_map(mapper, 0)
    for i in (1, 2, 3, 4):
        found = dict(shuffled.layers[i].named_parameters())
        for name, parameter in plain.layers[i].named_parameters():
            if parameter.dim() > 1 and name != "bias":
                assert not torch.equal(found[name], parameter)
                assert torch.equal(found[name].sort(-1).values, parameter.sort(-1).values)
            else:
                assert torch.equal(found[name], parameter)


def test_an_identity_gives_features_of_other_places(mapper):
    states = torch.randn(1, 9, 22)
    found = random_map(mapper, 0).layers[6]([states])
    places = [(states[0, 0] == value).nonzero().item() for value in found[0, 0]]
    assert torch.equal(found, states[..., places])
    assert sum(place != i for i, place in enumerate(places)) > 11


def test_raw_source_leaves_native_layers_and_reads_the_others_as_they_are(mapper):
    raw = raw_source(mapper)
    assert isinstance(raw.layers[0], NativeLayer)
    assert isinstance(random_map(mapper, 0).layers[0], NativeLayer)
    states = torch.randn(1, 9, 22)
    for i in MAPPED:
        assert raw.layers[i].source_layers == (i,)
        assert raw.layers[i]([states]) is states
