"""Bands around right readings: how often they alarm, and on what."""

import dataclasses
import json
import math
import random

import pytest

from hf_kvtransfer import EvidenceError
from hf_kvtransfer.fidelity.probe_band import ProbeBand
from hf_kvtransfer.fidelity.tail_reading import MAX_PROBE_TOKENS, PROBE_TOKENS, TailReading


COLUMNS = 6


def reading(generator, loss=0.0, error=0.0, column=None, known=True):
    """Texts of very different difficulty, which both models feel alike; errors that vary a little by column."""
    difficulty = generator.uniform(0.5, 5)
    losses = [loss + 0.5 + difficulty + generator.gauss(0, 0.3) for _ in range(MAX_PROBE_TOKENS)]
    errors = [-1.0 - 0.1 * i + generator.gauss(0, 0.1) + (error if column in (None, i) else 0) for i in range(COLUMNS)]
    source = [difficulty + generator.gauss(0, 0.3) for _ in losses] if known else None
    return TailReading(losses, source, [errors] * len(PROBE_TOKENS))


@pytest.fixture
def generator():
    return random.Random(0)


@pytest.fixture
def band(generator):
    right = [reading(generator) for _ in range(200)]
    wrong = {
        "other_document": [reading(generator, loss=1.0) for _ in range(50)],
        "noisy_layer": [reading(generator, error=1.5, column=2) for _ in range(50)],
        "nothing": [reading(generator) for _ in range(200)],
    }
    return ProbeBand.calibrate(right, wrong)


def point(band, tokens, rate):
    return next(p for p in band.curve if (p["tokens"], p["false_alarm_rate"]) == (tokens, rate))


def test_it_catches_what_is_off_and_little_else(band):
    assert band.documents == 200
    assert band.tokens == 8
    for tokens in PROBE_TOKENS:
        found = point(band, tokens, 0.05)
        assert found["caught"]["other_document"] > 0.9
        # Which the loss does not see.
        assert found["caught"]["noisy_layer"] == 1
        assert found["caught_by_loss"]["noisy_layer"] < 0.2
        assert found["caught"]["nothing"] < 0.1
        assert 0 < found["measured_false_alarms"] < 0.1
    assert point(band, 8, 0.01)["measured_false_alarms"] < point(band, 8, 0.1)["measured_false_alarms"]


def test_what_the_source_lost_makes_it_sharper(generator):
    right = [reading(generator) for _ in range(100)]
    wrong = {"other_document": [reading(generator, loss=1.0) for _ in range(100)]}
    known = ProbeBand.calibrate(right, wrong)
    unknown = ProbeBand.calibrate([dataclasses.replace(r, source_losses=None) for r in right], wrong)
    assert unknown.bands[8].slope is None
    assert (
        point(unknown, 8, 0.05)["caught"]["other_document"] < 0.5 < point(known, 8, 0.05)["caught"]["other_document"]
    )
    # A reading without the source's losses is held against the losses alone.
    (alone,) = (dataclasses.replace(r, source_losses=None) for r in right[:1])
    assert known.judge([alone], 8).max_loss == unknown.judge([alone], 8).max_loss


def test_a_batch_is_judged_by_its_worst_row(band, generator):
    right = [reading(generator) for _ in range(8)]
    assert band.judge(right, 16).passed
    wrong = reading(generator, error=3.0)
    found = band.judge([*right, wrong], 16)
    assert not found.passed
    assert found.deviation > found.max_deviation
    # The more rows, the more each of them is allowed: the rate is that of the batch.
    assert band.judge(right, 16).max_deviation >= band.judge(right[:1], 16).max_deviation


def test_what_is_not_a_number_is_an_alarm(band, generator):
    right = reading(generator)
    for wrong in (
        dataclasses.replace(right, losses=[math.nan] * MAX_PROBE_TOKENS),
        dataclasses.replace(right, state_errors=[[math.nan] * COLUMNS] * len(PROBE_TOKENS)),
        dataclasses.replace(right, state_errors=[[0.0]] * len(PROBE_TOKENS)),  # of another model
    ):
        assert not band.judge([wrong], 8).passed


def test_too_few_readings_give_no_band(generator):
    right = [reading(generator) for _ in range(39)]
    assert ProbeBand.calibrate(right, {}) is not None
    assert ProbeBand.calibrate(right[1:], {}) is None
    assert ProbeBand.calibrate(right[1:], {}, false_alarm_rate=0.1) is not None


def test_number_of_tokens(band):
    assert [band.num_tokens(available) for available in (0, 15, 16, 1000)] == [0, 0, 8, 8]
    assert [band.num_tokens(1000, wanted) for wanted in (0, 7, 8, 31, 32, 500)] == [0, 8, 8, 16, 32, 32]
    assert band.num_tokens(40, 32) == 16


def test_round_trip(band):
    state = json.loads(json.dumps(band.to_dict()))
    assert ProbeBand.from_dict(state) == band
    for damage in ("bands", "curve", "tokens"):
        with pytest.raises(EvidenceError, match="bands in the mapper's evidence are damaged"):
            ProbeBand.from_dict({key: value for key, value in state.items() if key != damage})
    del state["bands"]["8"]
    with pytest.raises(EvidenceError, match="Evaluate the mapper again"):
        ProbeBand.from_dict(state)


def test_without_mapped_layers_the_loss_decides(generator):
    def unmapped(loss=0.0):
        return dataclasses.replace(reading(generator, loss=loss), state_errors=[[]] * len(PROBE_TOKENS))

    band = ProbeBand.calibrate([unmapped() for _ in range(60)], {})
    band = ProbeBand.from_dict(json.loads(json.dumps(band.to_dict(), allow_nan=False)))
    right, wrong = (band.judge([unmapped(loss)], 32) for loss in (-0.5, 3.0))
    assert right.passed and not wrong.passed
    assert right.deviation == right.max_deviation == 0
