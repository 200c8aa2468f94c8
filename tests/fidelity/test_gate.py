"""What a gate makes of figures. What it makes of live models is in tests/test_trust.py."""

import copy

import pytest

from hf_kvtransfer import FidelityGate

from .evidence import evaluation, make_report, passage


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


# vllm-project/semantic-router#2976
def test_too_few_positions():
    report = make_report(evaluation(num_documents=2), probe=None)
    reasons = judged(report)
    assert any("positions were scored, at least 384 are needed" in reason for reason in reasons)


def test_a_context_that_makes_no_difference():
    rows = [passage(f"{i}", native=2.0, translated=2.0, other_document=2.0, no_context=2.0) for i in range(20)]
    assert any("the context made no clear difference" in reason for reason in judged(make_report(rows, probe=None)))
