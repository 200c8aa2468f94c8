"""Corrections of a layer map's outputs: folded into its weights they give what they gave before."""

import pytest
import torch

from hf_kvtransfer.fitting.output_correction import OutputCorrection, can_be_corrected
from hf_kvtransfer.geometry import KVGeometry, LayerGeometry
from hf_kvtransfer.maps import build_layer_map


SOURCE = KVGeometry((LayerGeometry(3, 4, 4), LayerGeometry(3, 4, 4)))
TARGET = LayerGeometry(2, 6, 5)
SPECS = [
    {"kind": "linear", "source_layers": [0, 1]},
    {"kind": "low_rank", "source_layers": [0, 1], "rank": 4},
    {"kind": "residual_mlp", "source_layers": [0, 1], "hidden_size": 7},
    {"kind": "head_matched", "source_layers": [0, 1], "source_heads": [[0, 2], [1, 1]]},
]


def random_map(spec):
    torch.manual_seed(0)
    layer_map = build_layer_map(spec, 0, SOURCE, KVGeometry((TARGET,)), token_features=3).requires_grad_(False)
    for parameter in layer_map.parameters():
        parameter.normal_()
    return layer_map


@pytest.mark.parametrize("spec", SPECS, ids=[spec["kind"] for spec in SPECS])
def test_folded_it_gives_what_was_corrected(spec):
    layer_map = random_map(spec)
    features = [torch.randn(2, 9, 24) for _ in range(2)], torch.randn(2, 7, 3), torch.randint(9, (2, 7))
    plain = layer_map(*features)
    correction = OutputCorrection(layer_map, TARGET, plain.mean((0, 1)), plain.std((0, 1)))
    torch.testing.assert_close(correction(*features), plain)
    with torch.no_grad():
        for parameter in (correction.gain, correction.shift, correction.mix_keys, correction.mix_values):
            parameter.normal_(std=0.3)
    corrected = correction(*features)
    assert (corrected - plain).abs().max() > 0.1
    assert correction.fold() is layer_map
    torch.testing.assert_close(layer_map(*features), corrected, atol=1e-4, rtol=1e-4)


def test_heads_and_keys_and_values_are_not_mixed():
    layer_map = random_map(SPECS[0])
    correction = OutputCorrection(layer_map, TARGET, torch.zeros(22), torch.ones(22))
    with torch.no_grad():
        correction.mix_keys[1] = 1.0  # of the second head only
    features = [torch.randn(1, 9, 24) for _ in range(2)], torch.randn(1, 9, 3)
    changed = (correction(*features) - layer_map(*features)).abs().amax((0, 1)) > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(6, 12))


def test_an_identity_cannot_be_corrected():
    spec = {"kind": "identity", "source_layers": [0], "rank": 2}
    identity = build_layer_map(spec, 0, SOURCE, KVGeometry(SOURCE.layers[:1]), token_features=0)
    assert not can_be_corrected(identity)
    with pytest.raises(NotImplementedError, match="IdentityMap"):
        identity.compose(torch.eye(24), torch.zeros(24))
