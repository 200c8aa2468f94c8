import json
import math
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvtransfer.errors import EvidenceError
from hf_kvtransfer.fidelity import statistics
from hf_kvtransfer.fidelity.results import ArmScore, PassageResult
from hf_kvtransfer.fidelity.statistics import MIN_DOCUMENTS, figures

from .evidence import CAPABILITIES, EXCESS, evaluation, passage


def slow_arms(rows, weight=lambda row: 1):
    """Means and gap recovered, position by position as they are defined."""
    positions = math.fsum(weight(row) * row.arms["native"].positions for row in rows)
    found = {}
    for arm in EXCESS:
        found[arm] = {
            name: math.fsum(weight(row) * getattr(row.arms[arm], name) for row in rows) / positions
            for name in ("loss", "agreement")
        }
    for arm in found.values():
        arm["gap_recovered"] = (found["no_context"]["loss"] - arm["loss"]) / (
            found["no_context"]["loss"] - found["native"]["loss"]
        )
    return found


def assert_arms(found, expected, clear=True):
    assert found.keys() == expected.keys()
    for arm, score in expected.items():
        assert found[arm]["loss"] == pytest.approx(score["loss"], rel=1e-12)
        assert found[arm]["agreement"] == pytest.approx(score["agreement"], rel=1e-12)
        if clear:
            gap = found[arm]["gap_recovered"]
            assert gap["value"] == pytest.approx(score["gap_recovered"], rel=1e-12, abs=1e-12)
            assert gap["low"] <= gap["value"] <= gap["high"]
        else:
            assert found[arm]["gap_recovered"] is None


def test_figures_are_what_they_are_defined_to_be():
    rows = evaluation(num_documents=30)
    found = figures(rows)
    by_capability, by_turn = defaultdict(list), defaultdict(list)
    for row in rows:
        by_capability[row.capability].append(row)
        by_turn[row.turn].append(row)
    positions = sum(row.arms["native"].positions for row in rows)

    assert (found["positions"], found["documents"], found["sufficient"]) == (positions, 30, True)
    assert_arms(found["arms"], slow_arms(rows))
    for arm, score in found["arms"].items():
        kl = math.fsum(row.arms[arm].kl for row in rows) / positions
        assert score["kl"] == pytest.approx(kl, rel=1e-12)
        if arm == "native":
            assert score["cosine"] is None and score["worst_layer"] is None
            continue
        layers = [
            math.fsum(row.arms[arm].cosine[layer] * row.arms[arm].positions for row in rows) / positions
            for layer in range(4)
        ]
        assert score["cosine"] == pytest.approx(sum(layers) / 4, rel=1e-12)
        assert score["worst_layer"]["cosine"] == pytest.approx(min(layers), rel=1e-12)
        assert score["worst_layer"]["layer"] == layers.index(min(layers))

    assert list(found["capabilities"]) == list(CAPABILITIES)
    for name, group in found["capabilities"].items():
        assert group["documents"] == 10
        assert group["positions"] == sum(row.arms["native"].positions for row in by_capability[name])
        assert_arms(group["arms"], slow_arms(by_capability[name]))

    assert [group["turn"] for group in found["turns"]] == [1, 2, 3]
    for group in found["turns"]:
        assert group["documents"] == 10
        assert_arms(group["arms"], slow_arms(by_turn[group["turn"]]))
    assert_arms(found["late_turns"]["arms"], slow_arms(by_capability["dialogue"], weight=lambda row: row.turn))

    items = by_capability["knowledge"]
    task = found["choices"]["knowledge"]
    assert list(found["choices"]) == ["knowledge"] and task["items"] == 10
    chance = sum(1 / row.choices for row in items) / 10
    assert task["chance"] == pytest.approx(chance, rel=1e-12)
    for arm in EXCESS:
        assert task["accuracy"][arm] == sum(row.arms[arm].chosen == row.label for row in items) / 10
        same = sum(row.arms[arm].chosen == row.arms["native"].chosen for row in items)
        assert task["agreement"][arm] == same / 10
    retention = (task["accuracy"]["translated"] - chance) / (task["accuracy"]["native"] - chance)
    assert task["retention"]["value"] == pytest.approx(retention, rel=1e-12)
    assert task["retention"]["low"] <= retention <= task["retention"]["high"]


def test_the_ends_of_the_scale_are_exact():
    arms = figures(evaluation())["arms"]
    assert arms["native"]["gap_recovered"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert arms["no_context"]["gap_recovered"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_the_interval_is_that_of_another_bootstrap():
    rows = evaluation(num_documents=40, num_turns=4, seed=3)
    documents = defaultdict(list)
    for row in rows:
        documents[row.document].append(row)
    losses = {
        key: [sum(row.arms[arm].loss for row in rows) for arm in ("native", "translated", "no_context")]
        for key, rows in documents.items()
    }
    generator = random.Random(1)
    gaps = []
    for _ in range(10_000):
        drawn = generator.choices(list(losses.values()), k=len(losses))
        native, translated, no_context = map(sum, zip(*drawn, strict=True))
        gaps.append((no_context - translated) / (no_context - native))
    gap = figures(rows)["arms"]["translated"]["gap_recovered"]
    assert [gap["low"], gap["high"]] == pytest.approx(np.percentile(gaps, [2.5, 97.5]).tolist(), abs=0.004)


def test_the_interval_covers_the_truth(monkeypatch):
    """Losses of native, translated and no context differ by 1 and 0.25 in expectation: 0.75 is recovered."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = random.Random(0)
    covered = 0
    for _ in range(120):
        rows = []
        for number in range(40):
            native, help_of_context = generator.uniform(2, 4), generator.uniform(0.2, 1.8)
            lost = help_of_context * generator.uniform(0, 0.5)
            rows.append(
                passage(str(number), native=native, translated=native + lost, no_context=native + help_of_context)
            )
        gap = figures(rows)["arms"]["translated"]["gap_recovered"]
        covered += gap["low"] <= 0.75 <= gap["high"]
    assert 106 <= covered <= 119


def test_the_interval_is_over_documents_and_not_over_turns():
    """Turns that repeat each other say nothing new, so that they must not narrow the interval."""
    rows = [
        passage(str(number), turn=turn, native=2.0, translated=2.2 + 0.01 * number, no_context=3.0)
        for number in range(20)
        for turn in (1, 2, 3, 4)
    ]
    once = figures([row for row in rows if row.turn == 1])["arms"]["translated"]["gap_recovered"]
    assert figures(rows)["arms"]["translated"]["gap_recovered"] == pytest.approx(once, rel=1e-9)
    assert once["high"] - once["low"] > 0.04


def test_figures_do_not_depend_on_the_order_of_the_rows():
    rows = evaluation()
    shuffled = random.Random(0).sample(rows, len(rows))
    first, second = figures(rows), figures(shuffled)
    assert list(first["capabilities"]) == list(second["capabilities"])
    one, other = (found["arms"]["translated"]["gap_recovered"] for found in (first, second))
    assert one == pytest.approx(other, rel=1e-9)


def test_late_turns_weigh_more():
    rows = [
        row
        for number in range(10)
        for row in (
            passage(str(number), turn=1, positions=30, native=2.0, translated=2.0, no_context=3.0),
            passage(str(number), turn=3, positions=10, native=2.0, translated=3.0, no_context=3.0),
        )
    ]
    found = figures(rows)
    # 30 positions of weight 1 recover everything, 10 of weight 3 nothing.
    assert found["late_turns"]["arms"]["translated"]["gap_recovered"]["value"] == pytest.approx(0.5)
    assert found["late_turns"]["arms"]["translated"]["loss"] == pytest.approx(2.5)
    assert found["arms"]["translated"]["gap_recovered"]["value"] == pytest.approx(0.75)
    assert [group["turn"] for group in found["turns"]] == [1, 3]


def test_without_turns_and_choices():
    found = figures([passage(native=2.0, translated=2.5, no_context=3.0)])
    assert found["turns"] == [] and found["late_turns"] is None and found["choices"] == {}


@pytest.mark.parametrize(
    ("documents", "clear"), [(1, False), (2, False), (MIN_DOCUMENTS - 1, False), (MIN_DOCUMENTS, True)]
)
def test_few_documents_have_no_gap(documents, clear):
    """However many positions they have, and however alike they are."""
    rows = [
        passage(str(number), positions=500, native=2.0, translated=2.1, no_context=3.0) for number in range(documents)
    ]
    found = figures(rows)
    assert found["sufficient"]
    assert (found["arms"]["translated"]["gap_recovered"] is not None) == clear
    assert (found["capabilities"]["text"]["arms"]["native"]["gap_recovered"] is not None) == clear


def test_a_capability_of_few_documents():
    rows = evaluation(num_documents=12)
    found = figures(rows)
    assert found["capabilities"]["code"]["documents"] == 4
    assert found["capabilities"]["code"]["arms"]["translated"]["gap_recovered"] is None
    assert found["choices"]["knowledge"]["retention"] is None
    assert found["arms"]["translated"]["gap_recovered"]["value"] > 0


@pytest.mark.parametrize(
    "no_context",
    [
        lambda number: 2.0,
        lambda number: 1.5,
        lambda number: 2.0 + (-1) ** number,
        lambda number: 3 * (number == 0) + 2.0,
    ],
    ids=["as good as native", "better than native", "now and then better", "helps in one document only"],
)
def test_a_context_that_does_not_clearly_help(no_context):
    rows = [passage(str(i), native=2.0, translated=2.1, no_context=no_context(i)) for i in range(40)]
    assert {arm["gap_recovered"] for arm in figures(rows)["arms"].values()} <= {None}


def test_a_context_that_barely_helps():
    """Resamples in which it does not help widen the interval, and do not make it infinite."""
    rows = [passage(str(i), native=3.0, translated=3.05, no_context=3.35 + (-1) ** i) for i in range(40)]
    gap = figures(rows)["arms"]["translated"]["gap_recovered"]
    assert gap["low"] < gap["value"] - 0.5
    assert all(map(math.isfinite, gap.values()))


def test_without_the_control():
    arms = figures([passage(str(i), native=2.0, translated=2.1) for i in range(20)])["arms"]
    assert list(arms) == ["native", "translated"]
    assert arms["translated"]["gap_recovered"] is None


def choices(right, documents=40, choices=4):
    """Items of which each arm gets the first `right[arm]` right."""
    rows = []
    for number in range(documents):
        row = passage(str(number), choices=choices, label=1, **dict.fromkeys(right, 2.0))
        for arm, items in right.items():
            row.arms[arm].chosen = 1 if number < items else 0
        rows.append(row)
    return figures(rows)["choices"]["text"]


def test_retention():
    task = choices({"native": 30, "translated": 20, "no_context": 10})
    assert task["chance"] == 0.25
    assert task["accuracy"] == {"native": 0.75, "translated": 0.5, "no_context": 0.25}
    assert task["agreement"] == {"native": 1.0, "translated": 0.75, "no_context": 0.5}
    assert task["retention"]["value"] == pytest.approx(0.5)
    assert 0.1 < task["retention"]["low"] < 0.4 and 0.6 < task["retention"]["high"] < 0.9


@pytest.mark.parametrize("native", [4, 10, 12])
def test_no_retention_at_chance(native):
    assert choices({"native": native, "translated": 30})["retention"] is None


def test_too_few_positions():
    assert not figures([passage(positions=383, native=2.0)])["sufficient"]
    assert figures([passage(positions=384, native=2.0)])["sufficient"]


def test_bad_rows_are_refused():
    rows = evaluation()
    rows[5].arms["translated"].loss = float("nan")
    with pytest.raises(EvidenceError, match="Result 5 .* arm 'translated': `loss` is nan"):
        figures(rows)


def leaves(value):
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(entry)
    if not isinstance(value, dict | list):
        yield value


numbers = st.floats(0, 1e11) | st.sampled_from([0.0, 1e-12, 5e-324, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[numbers] * 4, st.sampled_from([None, 1, 2, 10**9]), st.integers(1, 10**9)), min_size=1))
def test_any_numbers_give_plain_finite_figures(scores):
    rows = [
        PassageResult(
            str(i),
            "text",
            turn,
            2,
            0,
            {
                arm: ArmScore(positions, loss, 1, loss, [cosine], i % 2)
                for arm, loss in zip(("native", "translated", "no_context"), losses, strict=True)
            },
        )
        for i, (*losses, cosine, turn, positions) in enumerate(scores)
    ]
    found = figures(rows)
    json.dumps(found, allow_nan=False)
    assert {type(leaf) for leaf in leaves(found)} <= {float, int, bool, str, type(None)}
