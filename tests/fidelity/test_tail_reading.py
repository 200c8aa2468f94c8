"""What the target reads on top of a translation, against the same written out."""

import pytest
import torch

from hf_kvtransfer import SourceKV
from hf_kvtransfer.fidelity.tail_reading import MAX_PROBE_TOKENS, PROBE_TOKENS, read_tail
from hf_kvtransfer.translation import Translation

from ..tiny_models import FAMILIES, identity_mapper, random_ids, tiny_model, with_native_layers


LENGTH = 80


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


def losses(model, ids):
    """Of each token but the first."""
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
    return -log_probs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("num_tokens", [8, MAX_PROBE_TOKENS])
def test_losses_are_those_of_both_models(model, num_tokens):
    ids = random_ids(model, 2, LENGTH)
    translation = Translation(SourceKV.prefill(model, None, ids), identity_mapper(model), model)
    readings, cache = read_tail(translation, num_tokens)
    assert cache.get_seq_length() == translation.length == LENGTH - 1
    expected = losses(model, ids)[:, -num_tokens:]
    for reading, row in zip(readings, expected, strict=True):
        torch.testing.assert_close(torch.tensor(reading.losses), row, rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(reading.source_losses), row, rtol=0, atol=1e-4, check_dtype=False)
        assert len(reading.state_errors) == sum(length <= num_tokens for length in PROBE_TOKENS)
        # Keys and values of four layers, which the identity renders up to rounding.
        assert [len(errors) for errors in reading.state_errors] == [8] * len(reading.state_errors)
        assert max(map(max, reading.state_errors)) < -20


def test_state_errors_see_what_the_source_said_of_other_tokens(model):
    ids = random_ids(model, 1, LENGTH)
    source_kv = SourceKV.prefill(model, None, random_ids(model, 1, LENGTH, seed=1))
    source_kv.input_ids = ids
    (reading,), _ = read_tail(Translation(source_kv, identity_mapper(model), model), 8)
    assert min(map(max, reading.state_errors)) > -1


def test_a_padded_batch_reads_as_its_rows(model):
    ids = random_ids(model, 2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    ids = ids * mask
    mapper = identity_mapper(model)
    both, _ = read_tail(Translation(SourceKV.prefill(model, None, ids, attention_mask=mask), mapper, model), 16)
    (alone,), _ = read_tail(Translation(SourceKV.prefill(model, None, ids[1:, 30:]), mapper, model), 16)
    torch.testing.assert_close(torch.tensor(both[1].losses), torch.tensor(alone.losses), rtol=0, atol=1e-4)


def test_a_tail_that_is_not_held_back_has_one_loss_less(model):
    ids = random_ids(model, 1, LENGTH)
    translation = Translation(SourceKV.prefill(model, None, ids), identity_mapper(model), model, tail_tokens=0)
    (reading,), _ = read_tail(translation, 8)
    assert len(reading.losses) == len(reading.source_losses) == 7


def test_a_source_whose_losses_are_not_known(model):
    ids = random_ids(model, 1, LENGTH)
    source_kv = SourceKV.prefill(model, None, ids)
    source_kv.token_losses = None
    (reading,), _ = read_tail(Translation(source_kv, identity_mapper(model), model), 8)
    assert reading.source_losses is None


@pytest.mark.parametrize("native_layers", [1, 3])
def test_layers_that_the_target_computes_itself_are_not_compared(model, native_layers):
    """Their errors are rounding, of another size in another dtype."""
    ids = random_ids(model, 2, LENGTH)
    mapper = identity_mapper(model)
    source_kv = SourceKV.prefill(model, None, random_ids(model, 2, LENGTH, seed=1))
    source_kv.input_ids = ids
    expected, _ = read_tail(Translation(source_kv, mapper, model), 16)
    readings, _ = read_tail(Translation(source_kv, with_native_layers(mapper, native_layers), model), 16)
    for reading, other in zip(readings, expected, strict=True):
        assert [len(errors) for errors in reading.state_errors] == [2 * (3 - native_layers)] * 2
        if native_layers == 3:
            # All of it is what the target reads itself.
            row = losses(model, ids)[readings.index(reading), -16:]
            torch.testing.assert_close(torch.tensor(reading.losses), row, rtol=0, atol=1e-4)
        else:
            assert len(other.state_errors[0]) == 8
            assert max(reading.state_errors[0]) > -1
