import dataclasses

import pytest

from hf_kvtransfer import EvidenceError
from hf_kvtransfer.policy.error_rate import error_rates

from ..fidelity.evidence import make_report, passage


LOSSES = {"native": 1.0, "translated": 1.5, "no_context": 3.0}


def test_of_text_it_is_what_is_lost_of_the_gap():
    rows = [passage(str(i), "text", **LOSSES) for i in range(8)]
    assert error_rates(make_report(rows)) == {0: pytest.approx(0.25)}


def test_of_questions_it_is_what_is_answered_wrong():
    rows = [passage(str(i), "quiz", choices=4, label=0, **LOSSES) for i in range(8)]
    for row in rows[:2]:
        row.arms["translated"] = dataclasses.replace(row.arms["translated"], chosen=1)
    text = [passage(f"t{i}", "text", **LOSSES) for i in range(8)]
    report = make_report(rows + text)
    assert error_rates(report, ["quiz"])[0] == pytest.approx(0.25)
    assert error_rates(report, ["text"])[0] == pytest.approx(0.25)
    assert error_rates(report)[0] == pytest.approx(0.25)
    with pytest.raises(EvidenceError, match="nothing about \\['law'\\]"):
        error_rates(report, ["law"])


def test_each_effort_has_its_own():
    rows = [passage(str(i), "text", **LOSSES, **{"effort 0.2": 1.2}) for i in range(8)]
    rows += [passage(f"q{i}", "quiz", choices=4, label=0, **LOSSES, **{"effort 0.2": 1.2}) for i in range(8)]
    for row in rows[8:10]:
        row.arms["translated"] = dataclasses.replace(row.arms["translated"], chosen=1)
    assert error_rates(make_report(rows)) == {0: pytest.approx(0.25), 0.2: pytest.approx(0.05)}


def test_without_evidence_every_answer_counts_as_wrong():
    assert error_rates(None) == {0: 1.0}
