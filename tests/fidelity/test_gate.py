"""What a gate makes of figures. What it makes of live models is in tests/test_trust.py."""

import copy

import pytest

from hf_kvtransfer import FidelityGate
from hf_kvtransfer.fidelity.effort_advice import effort_advice

from .evidence import evaluation, make_report, passage


CONTROLS = {"other_document": 2.1, "random_map": 2.5}


@pytest.fixture
def report():
    return make_report()


def judged(report, **thresholds):
    return FidelityGate(**thresholds).judge(report)


def test_good_evidence_meets_every_threshold(report):
    gaps = [c["arms"]["translated"]["gap_recovered"]["value"] for c in report.figures["capabilities"].values()]
    assert min(gaps) > 0.5
    assert judged(report, min_agreement=0.3) == []


def test_the_worst_capability_counts(report):
    mean = report.figures["arms"]["translated"]["gap_recovered"]["value"]
    gaps = {
        name: c["arms"]["translated"]["gap_recovered"]["value"] for name, c in report.figures["capabilities"].items()
    }
    worst = min(gaps, key=gaps.get)
    assert gaps[worst] < mean
    (reason,) = judged(report, min_agreement=0.3, min_gap_recovered=(gaps[worst] + mean) / 2)
    assert f"{gaps[worst]:.2f} of the gap in its worst capability ({worst})" in reason


@pytest.mark.parametrize(
    ("thresholds", "reason"),
    [
        ({"min_late_turns": 0.99}, "late turns weighted most, at least 0.99 is asked for"),
        ({"min_agreement": 0.9}, "of the positions, at least 0.9 is asked for"),
        ({"min_positions": 10**6}, "at least 1000000 are needed to admit anything"),
        ({"max_control": -0.9}, "the control 'other_document' recovers"),
    ],
)
def test_each_threshold(report, thresholds, reason):
    assert any(reason in found for found in judged(report, **{"min_agreement": 0.3} | thresholds))


def test_only_what_the_use_asks_for(report):
    gaps = {
        name: c["arms"]["translated"]["gap_recovered"]["value"] for name, c in report.figures["capabilities"].items()
    }
    worst, *others = sorted(gaps, key=gaps.get)
    threshold = (gaps[worst] + gaps[others[0]]) / 2
    asked = {"min_agreement": 0.3, "min_gap_recovered": threshold, "min_late_turns": 0.0}
    assert judged(report, **asked) != []
    assert judged(report, **asked, capabilities=tuple(others)) == []
    (reason,) = judged(report, capabilities=(others[0], "law"))
    assert reason == f"its evidence says nothing about ['law'], only about {sorted(gaps)}"
    # Late turns are those of the capabilities asked for.
    without = tuple(name for name in gaps if name != "dialogue")
    assert judged(report, min_agreement=0.3, min_late_turns=0.99, capabilities=without) == []
    for wrong in ("code", ()):
        with pytest.raises(ValueError, match="`capabilities` must be a tuple of names"):
            FidelityGate(capabilities=wrong)


# vllm-project/semantic-router#2976
@pytest.mark.parametrize("control", ["other_document", "random_map"])
def test_a_control_that_does_as_well(report, control):
    report.figures["arms"][control] = copy.deepcopy(report.figures["arms"]["translated"])
    (reason,) = judged(report, min_agreement=0.3)
    assert f"the control {control!r} recovers" in reason
    assert reason.endswith("does not depend on " + ("the maps" if control == "random_map" else "the content"))
    del report.figures["arms"][control]
    assert judged(report, min_agreement=0.3) == [f"the control {control!r} was not measured"]


def test_an_effort_is_asked_for_what_was_measured_of_it():
    rows = [
        passage(
            f"{i}",
            turn=i % 3 + 1,
            positions=100,
            native=1.0,
            translated=1.6,
            no_context=2.0,
            **CONTROLS,
            **{"effort 0.1": 1.4, "effort 0.5": 1.1},
        )
        for i in range(24)
    ]
    report = make_report(rows, probe=None)
    asked = FidelityGate(min_gap_recovered=0.5, min_late_turns=0.7, min_agreement=0.4)
    assert [len(asked.judge(report, effort)) for effort in (0.0, 0.05, 0.1, 0.49, 0.5, 1.0)] == [2, 2, 1, 1, 0, 0]
    assert asked.judge(report) == asked.judge(report, 0.09)
    (reason,) = asked.judge(report, 0.3)
    assert reason.startswith("with an effort of 0.1 it recovers 0.60 of the gap in dialogues")
    assert FidelityGate(capabilities=("text",), min_agreement=0.4, min_late_turns=0.7).judge(report, 0.6) == []
    (reason,) = FidelityGate(min_agreement=0.8).judge(report, 0.6)
    assert reason.startswith("with an effort of 0.5 the next token is the native one in 0.50")
    # What the target reads itself is no merit of the maps.
    report.figures["arms"]["random_map"] = copy.deepcopy(report.figures["arms"]["translated"])
    (reason,) = asked.judge(report, 1.0)
    assert "the control 'random_map' recovers 0.40 of the gap, too close to the mapper's own 0.40" in reason
    verdict = asked.verdict("a mapper", asked.judge(report, 1.0), 1.0)
    assert str(verdict).startswith("a mapper: with an effort of 1 refused\n")
    for effort in (-0.1, 1.5):
        with pytest.raises(ValueError, match="`effort` must be between 0"):
            asked.judge(report, effort)


def test_advice_about_an_effort():
    rows = [
        passage(f"{i}", positions=100, native=1.0, translated=1.6, no_context=2.0, **CONTROLS, **{"effort 0.3": 1.2})
        for i in range(24)
    ]
    report, asked = make_report(rows, probe=None), FidelityGate(min_agreement=0.4)
    reasons = asked.judge(report)
    advice = effort_advice(asked, asked.verdict("a mapper", reasons), report)
    assert advice == 'With `effort=0.3`, which `effort="auto"` takes, it is admitted.'
    # What is wrong beside the figures is wrong with any effort.
    for gate, verdict, evidence in (
        (asked, asked.verdict("a mapper", [*reasons, "the source is another one"]), report),
        (asked, asked.verdict("a mapper", []), report),
        (asked, asked.verdict("a mapper", ["it has no evidence"]), None),
        (strict := FidelityGate(min_gap_recovered=0.9), strict.verdict("a mapper", strict.judge(report)), report),
    ):
        assert effort_advice(gate, verdict, evidence) is None


# vllm-project/semantic-router#2976
def test_too_few_positions():
    report = make_report(evaluation(num_documents=2), probe=None)
    reasons = judged(report)
    assert any("positions were scored, at least 384 are needed" in reason for reason in reasons)


def test_a_context_that_makes_no_difference():
    rows = [passage(f"{i}", native=2.0, translated=2.0, other_document=2.0, no_context=2.0) for i in range(20)]
    assert any("the context made no clear difference" in reason for reason in judged(make_report(rows, probe=None)))
