import dataclasses
import json

import pytest

from hf_kvtransfer.errors import EvidenceError
from hf_kvtransfer.fidelity.results import PassageResult, check_results

from .evidence import evaluation, passage


def test_round_trip():
    rows = [row.rounded() for row in evaluation()]
    assert [PassageResult.from_dict(json.loads(json.dumps(row.to_dict()))) for row in rows] == rows


def test_rounding_keeps_what_was_measured():
    rows = evaluation()
    for row, rounded in zip(rows, [row.rounded() for row in rows], strict=True):
        assert rounded.rounded() == rounded
        for arm, score in row.arms.items():
            assert rounded.arms[arm].loss == pytest.approx(score.loss, rel=1e-6)
            assert rounded.arms[arm].cosine == pytest.approx(score.cosine, rel=1e-6)


@pytest.mark.parametrize("row", [{}, {"arms": []}, {"arms": {"native": 1}}, 3, None, {"arms": {}, "unknown": 1}])
def test_a_row_with_other_fields(row):
    with pytest.raises(EvidenceError, match="missing, unknown or damaged fields"):
        PassageResult.from_dict(row)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": 0}, "`positions` is 0"),
        ({"positions": -64}, "`positions` is -64"),
        ({"positions": 64.0}, r"`positions` is 64\.0"),
        ({"positions": True}, "`positions` is True"),
        ({"positions": 63, "agreement": 63}, "different numbers of positions"),
        ({"agreement": 65}, "`agreement` is 65"),
        ({"agreement": -1}, "`agreement` is -1"),
        ({"loss": float("nan")}, "`loss` is nan"),
        ({"loss": float("inf")}, "`loss` is inf"),
        ({"loss": 10**400}, "`loss` is 1000"),
        ({"loss": -1.0}, r"`loss` is -1\.0, below 0"),
        ({"loss": "1"}, "`loss` is '1'"),
        ({"kl": float("-inf")}, "`kl` is -inf"),
        ({"cosine": [0.9, float("nan")]}, r"`cosine` is \[0\.9, nan\]"),
        ({"cosine": [float("inf"), float("-inf")]}, "`cosine` is"),
        ({"cosine": [0.9, None]}, "`cosine` is"),
        ({"cosine": [0.9, True]}, "`cosine` is"),
        ({"cosine": None}, "`cosine` is None"),
        ({"cosine": [0.9]}, "other arms or layers"),
        ({"chosen": 1}, "without choices"),
    ],
)
def test_impossible_numbers(changes, reason):
    rows = [passage(document, native=2.0, translated=2.5) for document in "ab"]
    check_results(rows)
    rows[1].arms["translated"] = dataclasses.replace(rows[1].arms["translated"], **changes)
    with pytest.raises(EvidenceError, match=rf"Result 1 \(document 'b'\) cannot be used: .*{reason}"):
        check_results(rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"document": ""}, "`document` is ''"),
        ({"document": 7}, "`document` is 7"),
        ({"capability": None}, "`capability` is None"),
        ({"turn": 0}, "`turn` is 0"),
        ({"turn": "1"}, "`turn` is '1'"),
        ({"choices": 1}, "`choices` is 1"),
        ({"label": 4}, "`label` is 4 with 4 choices"),
        ({"label": None}, "`label` is None with 4 choices"),
        ({"choices": None}, "`label` is 1 with None choices"),
        ({"choices": 2, "label": 0, "arms": {}}, "'native' is always there"),
    ],
)
def test_impossible_rows(changes, reason):
    row = passage(choices=4, label=1, native=2.0, translated=2.5)
    check_results([row])
    with pytest.raises(EvidenceError, match=reason):
        check_results([dataclasses.replace(row, **changes)])


def test_an_unknown_arm():
    with pytest.raises(EvidenceError, match=r"its arms are \['native', 'translatd'\]"):
        check_results([passage(native=2.0, translatd=2.5)])


def test_a_choice_that_is_missing():
    row = passage(choices=4, label=1, native=2.0, translated=2.5)
    row.arms["translated"].chosen = None
    with pytest.raises(
        EvidenceError, match=r"arm 'translated': `chosen` is None, not an integer below `choices` \(4\)"
    ):
        check_results([row])


def test_a_passage_that_is_there_twice():
    turns = [passage("a", turn=turn, native=2.0) for turn in (1, 2)]
    check_results(turns)
    with pytest.raises(EvidenceError, match=r"Result 2 \(document 'a', turn 2\) .* there twice"):
        check_results([*turns, turns[1]])


def test_arms_that_were_not_measured_everywhere():
    with pytest.raises(EvidenceError, match=r"Result 1 \(document 'b'\) .* other arms"):
        check_results([passage("a", native=2.0, translated=2.5), passage("b", native=2.0)])


def test_no_results():
    with pytest.raises(EvidenceError, match="nothing was scored"):
        check_results([])
