"""Distillation: what it computes is what the target really does, and it repairs what it is shown."""

import copy

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import DynamicCache

from hf_kvtransfer import CalibrationError, SourceKV, distill_mapper, fit_mapper
from hf_kvtransfer.compat import cache_argument, read_into_cache
from hf_kvtransfer.fitting.continuations import Continuations
from hf_kvtransfer.translation import Translation

from ..tiny_models import FAMILIES, identity_mapper, plant, random_ids, tiny_model


OPTIONS = {"continuation_length": 8, "continuations": 3, "held_out_texts": 3, "evaluate_every": 5}


def damaged(mapper):
    """A copy that puts out something else everywhere, the same at each token."""
    generator = torch.Generator().manual_seed(0)
    mapper = copy.deepcopy(mapper)
    with torch.no_grad():
        for layer in mapper.layers:
            if hasattr(layer, "bias"):
                layer.bias += 0.7 * torch.randn(layer.bias.shape, generator=generator)
    return mapper


def native_layers_mapper(model, native_layers):
    """The exact mapper of a model to itself, with first layers native and token features that count for nothing."""
    exact = identity_mapper(model)
    config = copy.deepcopy(exact.config)
    config.layers[: native_layers + 1] = [{"kind": "native"}] * (native_layers + 1)
    config.token_features = model.config.hidden_size
    mapper = type(exact)(config)
    with torch.no_grad():
        for layer in mapper.layers[native_layers + 1 :]:
            layer.weight[:, : layer.weight.shape[0]] = torch.eye(layer.weight.shape[0])
    return mapper.eval()


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    return source, plant(source), list(random_ids(source, 40, 64, seed=1))


@pytest.fixture(scope="module")
def fitted(pair):
    source, target, texts = pair
    return fit_mapper(source, target, texts, num_source_layers=4, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_is_that_of_the_target_on_a_translation(family):
    model = tiny_model(family)
    mapper = damaged(identity_mapper(model))
    reader = Continuations(mapper, model, model, None, None, length=6, count=3)
    ids = random_ids(model, 1, 80, seed=3)
    starts = torch.tensor([20, 41, 70])
    found = reader.divergence(reader.read(ids[0], starts))

    expected = []
    full = log_softmax(read_into_cache(model, DynamicCache(), ids, num_logits=80)[0], -1)
    source_kv = SourceKV.prefill(model, None, ids)
    for start in starts.tolist():
        translation = Translation(source_kv[:start], mapper, model, tail_tokens=0)
        cache = DynamicCache()
        for layer_idx in range(4):
            keys, values = translation.layer(layer_idx, 0, start, model.device, model.dtype)
            cache.update(keys, values, layer_idx)
        logits = model(input_ids=ids[:, start : start + 6], **{cache_argument(model): cache}).logits[0]
        native = full[start : start + 6]
        expected.append((native.exp() * (native - log_softmax(logits, -1))).sum(-1))
    torch.testing.assert_close(found, torch.cat(expected).mean(), atol=1e-5, rtol=1e-4)
    assert found > 1e-3


def with_tokens_before(mapper, count):
    """The same maps, which also make something of the tokens before."""
    config = copy.deepcopy(mapper.config)
    for i in config.mapped_layers:
        config.layers[i]["previous_tokens"] = count
    other, generator = type(mapper)(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for i in config.mapped_layers:
            old, new = mapper.layers[i].weight, other.layers[i].weight
            new.copy_(0.05 * torch.randn(new.shape, generator=generator))
            new[:, : old.shape[1]] = old
    return other


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_tokens_before_are_those_of_a_translation(family, native_layers):
    model = tiny_model(family)
    mapper = with_tokens_before(native_layers_mapper(model, native_layers), 2)
    reader = Continuations(mapper, model, model, None, None, length=6, count=1)
    ids = random_ids(model, 80, seed=3)
    read = reader.read(ids, torch.tensor([50]))
    translation = Translation(SourceKV.prefill(model, None, ids), mapper, model, tail_tokens=0)
    for layer_idx in range(4):
        expected = translation.layer(layer_idx, 0, 50, model.device, model.dtype)
        for own, other in zip(reader._keys_and_values(read, layer_idx, 50), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train_weights", [False, True])
def test_maps_that_read_tokens_before_are_trained(pair, train_weights):
    source, target, texts = pair
    fitted = fit_mapper(source, target, texts, num_source_layers=4, previous_tokens=1, dtype=torch.float32)
    distilled = distill_mapper(
        damaged(fitted), source, target, texts, train_weights=train_weights, learning_rate=0.01, **OPTIONS
    )
    history = distilled.config.fit["distillation"]["held_out_divergence"]
    assert min(score for _, score in history) < 0.98 * history[0][1]
    assert distilled.config.layers == fitted.config.layers


@pytest.mark.parametrize("native_layers", [0, 2])
def test_native_layers_and_their_hidden_states_are_the_targets(native_layers):
    model = tiny_model("gemma3")
    reader = Continuations(native_layers_mapper(model, native_layers), model, model, None, None, length=6, count=3)
    text = reader.read(random_ids(model, 1, 80, seed=3)[0], torch.tensor([20, 70]))
    assert reader.divergence(text) < 1e-6
    assert text.token_features.shape == (1, 80, model.config.hidden_size)


def test_places_leave_room_for_sinks_and_the_continuation(pair):
    source, target, _ = pair
    reader = Continuations(identity_mapper(source), source, target, None, None, length=8, count=4)
    for seed in range(20):
        places = reader.places(40, seed, 0).tolist()
        assert places == sorted(set(places)) and places[0] > 4 and places[-1] + 8 <= 40
    assert len(reader.places(12, 0, 0)) == 0


# Weights are many: the few continuations here say little about them.
@pytest.mark.parametrize(("train_weights", "learning_rate", "share_left"), [(False, 0.05, 0.8), (True, 0.01, 0.95)])
def test_repairs_a_damaged_mapper(pair, fitted, train_weights, learning_rate, share_left):
    source, target, texts = pair
    broken = damaged(fitted)
    before = {name: weight.clone() for name, weight in broken.state_dict().items()}
    options = OPTIONS | {"epochs": 2, "learning_rate": learning_rate, "evaluate_every": 20}
    mapper = distill_mapper(broken, source, target, texts, train_weights=train_weights, **options)
    history = mapper.config.fit["distillation"]["held_out_divergence"]
    assert min(score for _, score in history) < share_left * history[0][1]
    assert all(torch.equal(weight, before[name]) for name, weight in broken.state_dict().items())
    assert mapper.state_dict().keys() == before.keys()
    assert not any(weight.requires_grad for weight in mapper.parameters())
    assert all(weight.requires_grad for weight in target.parameters())
    assert target.get_output_embeddings().weight.shape[0] == target.config.vocab_size


def test_a_target_in_half_precision_is_trained_on_in_its_own(pair, fitted):
    source, target, texts = pair
    target = copy.deepcopy(target).bfloat16()
    mapper = distill_mapper(damaged(fitted).bfloat16(), source, target, texts[:20], batch_size=8, **OPTIONS)
    assert mapper.dtype == torch.bfloat16
    history = mapper.config.fit["distillation"]["held_out_divergence"]
    assert 0 < min(score for _, score in history) <= history[0][1]


def test_keeps_what_it_began_with_if_nothing_is_better(pair, fitted):
    source, target, texts = pair
    mapper = distill_mapper(fitted, source, target, texts[:12], learning_rate=5.0, **OPTIONS)
    for name, weight in mapper.state_dict().items():
        torch.testing.assert_close(weight, fitted.state_dict()[name])


def test_goes_on_after_an_interruption(pair, fitted, tmp_path, monkeypatch):
    source, target, texts = pair
    broken = damaged(fitted)
    whole = distill_mapper(broken, source, target, texts, batch_size=3, **OPTIONS)

    reads = 0
    read = Continuations.read

    def interrupted(self, *arguments):
        nonlocal reads
        reads += 1
        if reads == 25:
            raise KeyboardInterrupt
        return read(self, *arguments)

    monkeypatch.setattr(Continuations, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill_mapper(broken, source, target, texts, batch_size=3, checkpoint=tmp_path, **OPTIONS)
    assert target.get_output_embeddings().weight.shape[0] == target.config.vocab_size
    with pytest.raises(CalibrationError, match="learning_rate"):
        distill_mapper(broken, source, target, texts, batch_size=3, checkpoint=tmp_path, learning_rate=0.5, **OPTIONS)
    resumed = distill_mapper(broken, source, target, texts, batch_size=3, checkpoint=tmp_path, **OPTIONS)
    assert reads < 25 + 3 + 37
    assert not list(tmp_path.iterdir())
    assert resumed.config.fit == whole.config.fit
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]), name


@pytest.mark.parametrize("name", ["epochs", "batch_size", "continuations", "learning_rate", "evaluate_every"])
def test_refuses_numbers_that_are_not_positive(pair, name):
    source, target, texts = pair
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got 0"):
        distill_mapper(identity_mapper(source), source, target, texts, **OPTIONS | {name: 0})


def test_refuses_too_few_texts(pair):
    source, target, texts = pair
    with pytest.raises(CalibrationError, match="0 of the `texts` have at least 20 tokens"):
        distill_mapper(identity_mapper(source), source, target, [text[:19] for text in texts], **OPTIONS)
