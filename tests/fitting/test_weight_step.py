"""Training weights in steps: the same step does the same, whatever the scale of features and outputs."""

import pytest
import torch

from hf_kvtransfer.fitting.weight_step import take_steps, train_in_steps
from hf_kvtransfer.maps.linear import LinearMap
from hf_kvtransfer.maps.low_rank import LowRankMap


def apply(layer_map, features):
    return layer_map([features[None]])[0]


@pytest.mark.parametrize(("kind", "trained"), [("linear", 0), ("low_rank", 0), ("low_rank", 1)])
def test_a_step_does_the_same_at_any_scale(kind, trained):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 12, generator=generator)
    shares = []
    for feature_scale, waist_scale, output_scale in ((1, 1, 1), (100, 1, 1), (1, 0.01, 1), (1, 1, 0.01)):
        layer_map = LinearMap([0], 12, 5) if kind == "linear" else LowRankMap([0], 12, 5, 4)
        with torch.no_grad():
            for number, weight in enumerate(w for w in layer_map.parameters() if w.dim() > 1):
                weight.normal_(generator=torch.Generator().manual_seed(number))
            if kind == "linear":
                layer_map.weight.mul_(output_scale / feature_scale)
            else:
                layer_map.down.mul_(waist_scale / feature_scale)
                layer_map.up.mul_(output_scale / waist_scale)
        scaled = features * feature_scale
        before = apply(layer_map, scaled).detach()
        waist = None if kind == "linear" else (scaled @ layer_map.down.T).std(0).detach()
        steps = train_in_steps(layer_map, scaled.std(0), before.std(0), waist)
        torch.testing.assert_close(apply(layer_map, scaled), before)
        with torch.no_grad():
            steps[trained].normal_(generator=torch.Generator().manual_seed(2))
        shares.append((apply(layer_map, scaled).detach() - before).std(0) / before.std(0))
    for share in shares[1:]:
        torch.testing.assert_close(share, shares[0], atol=1e-3, rtol=1e-3)
    assert 0.01 < shares[0].mean() < 2


def test_weights_are_plain_again_afterwards():
    layer_map = LowRankMap([0], 12, 5, 4)  # begins with nothing: `up` is zero
    names = list(layer_map.state_dict())
    features = torch.randn(20, 12)
    steps = train_in_steps(layer_map, torch.ones(12), torch.ones(5), torch.ones(4))
    assert len(steps) == 2
    apply(layer_map, features).sum().backward()
    assert steps[1].grad.abs().min() > 0
    with torch.no_grad():
        for step in steps:
            step += 0.5
    trained = apply(layer_map, features).detach()
    take_steps(layer_map)
    assert sorted(layer_map.state_dict()) == sorted(names)
    torch.testing.assert_close(apply(layer_map, features).detach(), trained)
    assert trained.abs().max() > 1e-3
