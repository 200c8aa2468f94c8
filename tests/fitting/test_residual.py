"""MLPs learn what linear maps cannot say, or are dropped."""

import pytest
import torch

from hf_kvtransfer import CalibrationError, KVMapper, fit_mapper, train_residuals
from hf_kvtransfer.fitting.states import PairedStates
from hf_kvtransfer.maps.linear import LinearMap
from hf_kvtransfer.maps.residual_mlp import ResidualMLPMap

from ..tiny_models import plant, random_ids, tiny_model


OPTIONS = {"batch_size": 8, "held_out_every": 5}


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    return source, plant(source), list(random_ids(source, 80, 64, seed=1))


@pytest.fixture(scope="module")
def fitted(pair):
    return fit_mapper(*pair, kind="residual_mlp", hidden_size=64, num_source_layers=2, dtype=torch.float32)


def test_an_mlp_that_adds_nothing_is_dropped(pair, fitted):
    # The maps are planted, so nothing is left over.
    mapper = train_residuals(fitted, *pair, **OPTIONS)
    assert [spec["kind"] for spec in mapper.config.layers] == ["native", "linear", "linear", "linear"]
    assert all(type(layer) is LinearMap for layer in mapper.layers[1:])
    for layer, before in zip(mapper.layers[1:], fitted.layers[1:], strict=True):
        assert torch.equal(layer.weight, before.weight) and torch.equal(layer.bias, before.bias)
    assert [spec["kind"] for spec in fitted.config.layers] == ["native"] + ["residual_mlp"] * 3
    assert all(left[0] == left[1] for left in mapper.config.fit["residual_mlp"]["layers"][1:])


def test_maps_that_read_tokens_before(pair, tmp_path):
    options = {"kind": "residual_mlp", "hidden_size": 8, "num_source_layers": 1, "dtype": torch.float32}
    mapper = train_residuals(fit_mapper(*pair, previous_tokens=1, **options), *pair, **OPTIONS)
    assert {spec["kind"]: spec.get("previous_tokens") for spec in mapper.config.layers} == {
        "native": None,
        "linear": 1,
    }
    mapper.save_pretrained(tmp_path)
    assert KVMapper.from_pretrained(tmp_path).digest() == mapper.digest()


def test_an_mlp_learns_what_no_linear_map_can(pair, fitted, monkeypatch, tmp_path):
    read = PairedStates.read

    def bent(self, batch):
        rows = read(self, batch)
        features = rows["source", 0].float()
        rows["target", 2] = rows["target", 2] + 5 * (features / features.std(0))[:, :2].abs().sum(1, keepdim=True)
        return rows

    monkeypatch.setattr(PairedStates, "read", bent)
    linear = fit_mapper(*pair, kind="residual_mlp", hidden_size=64, num_source_layers=4, dtype=torch.float32)
    mapper = train_residuals(linear, *pair, passes=20, learning_rate=3e-3, **OPTIONS)
    before, after = mapper.config.fit["residual_mlp"]["layers"][2]
    assert before > 0.1 and after < 0.8 * before
    assert isinstance(mapper.layers[2], ResidualMLPMap)
    # It is what was measured, and comes back from disk.
    rows = PairedStates(pair[0], pair[1], None, None, True, 4, 1024, 0).read(pair[2][:8])
    features = [rows["source", j].float()[None] for j in mapper.layers[2].source_layers]
    errors = [
        (rows["target", 2] - part.layers[2](features, rows["tokens"][None])[0]).square().mean()
        for part in (linear, mapper)
    ]
    assert errors[1] < 0.8 * errors[0]
    mapper.save_pretrained(tmp_path)
    assert KVMapper.from_pretrained(tmp_path).digest() == mapper.digest()


def test_refuses_what_it_cannot_train(pair, fitted):
    with pytest.raises(ValueError, match="`passes` must be positive, got 0"):
        train_residuals(fitted, *pair, passes=0)
    with pytest.raises(ValueError, match="is quantised"):
        train_residuals(fitted.quantize(8), *pair)
    with pytest.raises(ValueError, match="no map of kind 'residual_mlp'"):
        train_residuals(fit_mapper(*pair, num_source_layers=1), *pair)
    with pytest.raises(CalibrationError, match="`held_out_every=10`.*give more"):
        train_residuals(fitted, *pair[:2], pair[2][:5])
