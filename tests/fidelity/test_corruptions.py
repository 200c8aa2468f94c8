"""Planted corruptions, each wrong in its own way and in no other."""

import pytest
import torch

from hf_kvtransfer import SourceKV
from hf_kvtransfer.fidelity.corruptions import CORRUPTIONS, corruptions
from hf_kvtransfer.fidelity.tail_reading import MAX_PROBE_TOKENS
from hf_kvtransfer.translation import Translation

from ..tiny_models import identity_mapper, random_ids, tiny_model, with_native_layers


LENGTH, SINKS = 50, 4


@pytest.fixture(scope="module")
def model():
    return tiny_model("gemma3")


@pytest.fixture(scope="module")
def translation(model):
    ids = random_ids(model, 1, LENGTH)
    return Translation(SourceKV.prefill(model, None, ids), identity_mapper(model), model)


@pytest.fixture(scope="module")
def other(model):
    return SourceKV.prefill(model, None, random_ids(model, 1, LENGTH, seed=1))


def states(translation):
    """Keys and values of each layer behind the sinks, `[heads, tokens, head_dim]`."""
    rows = []
    for i in range(len(translation.geometry.layers)):
        keys, values = translation.layer(i, SINKS, translation.length, torch.device("cpu"), torch.float32)
        rows.append((keys[0], values[0]))
    return rows


@pytest.fixture(scope="module")
def right(translation):
    return states(translation)


@pytest.fixture(scope="module")
def wrong(translation, other):
    return dict(corruptions(translation, other, seed=3))


def changed(found, right):
    """For each layer whether its keys and its values differ."""
    return [
        tuple(not torch.allclose(a, b, atol=1e-5) for a, b in zip(*pair, strict=True))
        for pair in zip(found, right, strict=True)
    ]


def test_all_of_them_leave_the_right_one_alone(translation, wrong, right):
    assert tuple(wrong) == CORRUPTIONS
    assert all(any(map(any, changed(states(corrupted), right))) for corrupted in wrong.values())
    assert not any(map(any, changed(states(translation), right)))
    for corrupted in wrong.values():
        assert corrupted.length == translation.length
        assert torch.equal(corrupted.input_ids, translation.input_ids)
        assert corrupted.source_kv.text == translation.source_kv.text
        for i in range(4):
            for a, b in zip(
                *(t.layer(i, 0, SINKS, torch.device("cpu"), torch.float32) for t in (corrupted, translation)),
                strict=True,
            ):
                assert torch.equal(a, b)


def test_states_of_another_document(wrong, other, model, right):
    found = states(wrong["other_document"])
    assert changed(found, right) == [(True, True)] * 4
    expected = states(Translation(other, identity_mapper(model), model))
    assert not any(map(any, changed(found, expected)))


def test_only_the_beginning_is_another_document_s(wrong, other, model, right):
    found = states(wrong["other_beginning"])
    expected = states(Translation(other, identity_mapper(model), model))
    # What a probe reads, and the token before it, is this document's.
    own = slice(LENGTH - 1 - MAX_PROBE_TOKENS - SINKS, None)
    for values, here, there in zip(*([v for _, v in layers] for layers in (found, right, expected)), strict=True):
        torch.testing.assert_close(values[:, own], here[:, own])
        torch.testing.assert_close(values[:, : own.start], there[:, : own.start])
        assert own.start > 0


def test_a_shorter_document_is_repeated(translation, model):
    short = SourceKV.prefill(model, None, random_ids(model, 1, 15, seed=1))
    corrupted = dict(corruptions(translation, short))["other_document"]
    for i, (_, values) in enumerate(states(corrupted)):
        for token in range(values.shape[1]):
            torch.testing.assert_close(values[:, token], short.value_states(i)[0, :, (SINKS + token) % 15])


def test_tokens_in_another_order(translation, wrong):
    kv = translation.source_kv
    orders = []
    for i, (_, values) in enumerate(states(wrong["shuffled_tokens"])):
        distance = torch.cdist(values.transpose(0, 1).flatten(1), kv.value_states(i)[0].transpose(0, 1).flatten(1))
        orders.append(distance.argmin(-1).tolist())
        torch.testing.assert_close(values, kv.value_states(i)[0, :, orders[-1]])
    # In the first layer a token that occurs twice has the same values twice.
    assert orders[1] == orders[2] == orders[3]
    assert len(set(orders[1])) == len(orders[1])
    assert orders[1] != sorted(orders[1])


def test_noise_in_one_layer(wrong, right):
    found = states(wrong["noisy_layer"])
    differs = changed(found, right)
    assert sorted(differs) == [(False, False)] * 3 + [(True, True)]
    noisy = differs.index((True, True))
    noise, values = found[noisy][1] - right[noisy][1], right[noisy][1]
    assert 0.3 < noise.std() / values.std() < 3
    assert abs(noise.mean()) < 0.3 * noise.std()


def test_two_layers_of_one_shape_have_each_other_s_maps(translation, wrong):
    corrupted = wrong["swapped_layers"]
    moved = [
        i
        for i, (a, b) in enumerate(zip(corrupted.mapper.layers, translation.mapper.layers, strict=True))
        if a is not b
    ]
    assert len(moved) == 2
    first, second = moved
    values = [v for _, v in states(corrupted)]
    for here, there in ((first, second), (second, first)):
        torch.testing.assert_close(values[here], translation.source_kv.value_states(there)[0, :, SINKS : LENGTH - 1])


def test_a_target_without_two_layers_of_one_shape():
    model = tiny_model("llama", num_hidden_layers=1)
    kv, other = (SourceKV.prefill(model, None, random_ids(model, 1, 20, seed=seed)) for seed in (0, 1))
    names = [name for name, _ in corruptions(Translation(kv, identity_mapper(model), model), other)]
    assert names == [name for name in CORRUPTIONS if name != "swapped_layers"]


def test_a_stale_mapper_is_off_in_all_layers(wrong, right):
    found = states(wrong["stale_mapper"])
    assert changed(found, right) == [(True, True)] * 4
    for (_, values), (_, expected) in zip(found, right, strict=True):
        error = (values - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert 0.3 < error < 0.7


def test_only_keys_know_of_wrong_positions(wrong, right):
    assert changed(states(wrong["wrong_positions"]), right) == [(True, False)] * 4


def test_the_same_seed_gives_the_same_corruptions(translation, other, wrong):
    again = dict(corruptions(translation, other, seed=3))
    another = dict(corruptions(translation, other, seed=4))
    for name in CORRUPTIONS:
        assert not any(map(any, changed(states(again[name]), states(wrong[name]))))
    for name in ("shuffled_tokens", "noisy_layer", "stale_mapper"):
        assert any(map(any, changed(states(another[name]), states(wrong[name]))))


@pytest.fixture(scope="module", params=[None, 8])
def behind_native_layers(model, request):
    """A translation whose first two layers are the target's own; also one of quantised weights."""
    mapper = with_native_layers(identity_mapper(model), 1)
    mapper = mapper if request.param is None else mapper.quantize(request.param)
    return Translation(SourceKV.prefill(model, None, random_ids(model, 1, LENGTH)), mapper, model)


@pytest.mark.parametrize("seed", range(4))
def test_native_layers_stay_right(behind_native_layers, other, seed):
    right = states(behind_native_layers)
    wrong = dict(corruptions(behind_native_layers, other, seed=seed))
    assert tuple(wrong) == CORRUPTIONS
    for name, corrupted in wrong.items():
        native, mapped = (changed(*(found[part] for found in (states(corrupted), right))) for part in PARTS)
        assert not any(map(any, native))
        assert sum(map(any, mapped)) == (1 if name == "noisy_layer" else 2)


PARTS = (slice(2), slice(2, None))


@pytest.mark.parametrize(("native_layers", "left_out"), [(2, {"swapped_layers"}), (3, set(CORRUPTIONS))])
def test_few_mapped_layers(model, other, native_layers, left_out):
    mapper = with_native_layers(identity_mapper(model), native_layers)
    translation = Translation(SourceKV.prefill(model, None, random_ids(model, 1, LENGTH)), mapper, model)
    names = [name for name, _ in corruptions(translation, other)]
    assert names == [name for name in CORRUPTIONS if name not in left_out]
