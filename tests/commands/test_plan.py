import json

import pytest

from hf_kvtransfer.home import HOME_VARIABLE

from .conftest import message


TRAFFIC = ("--traffic", "100=2000", "--traffic", "400=150.5")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Tests of this module share what one of them has measured."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        yield


def test_before_there_is_a_mapper(run, models):
    result = run("plan", *models, *TRAFFIC, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [kind["tokens"] for kind in plan["traffic"]] == [100, 400]
    assert plan["verdict"] is None
    assert [row["tokens"] for row in plan["costs"]["measured"]] == [128, 512]
    assert plan["fit_seconds"] > 0 and plan["validation_seconds"] > 0
    for decision in plan["decisions"]:
        assert decision["prefill_seconds"] > 0 and decision["handoff_seconds"] > 0


def test_table(run, models):
    result = run("plan", *models, *TRAFFIC, "--days", 7, "--fit-minutes", 10, "--evaluate-minutes", 2)
    assert result.exit_code == 0, result.output
    for column in ("recompute exposure a day", "adaptation cost", "validation burden", "default"):
        assert column in result.stdout
    assert "Plan for 7 days" in result.stdout
    assert "Fitting takes 10.0 min and validation 2.0 min" in result.stdout


def test_refused_mapper_is_not_planned_with(run, models, mapper):
    result = run("plan", mapper, *models, *TRAFFIC, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert not plan["verdict"]["admitted"] and not plan["pays"]
    result = run("plan", mapper, *models, *TRAFFIC)
    assert "Re-prefill: the gate refuses" in result.stdout and "it has no evidence" in result.stdout


def test_measured_mapper(run, models, evaluated):
    options = ("--wrong-answer-seconds", 5, "--evaluations", 3, "--evaluate-minutes", 1, "--json")
    result = run("plan", evaluated[0], *models, *TRAFFIC, *options)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["verdict"]["admitted"]
    assert plan["validation_seconds"] == 180
    # It is the exact one: nothing is answered wrong.
    assert plan["decisions"][0]["wrong_answer_seconds"] < 0.1
    again = json.loads(run("plan", evaluated[0], *models, *TRAFFIC, "--effort", 0.5, "--json").stdout)
    assert again["verdict"]["effort"] == again["decisions"][0]["effort"] == 0.5


@pytest.mark.parametrize("traffic", ["100", "100=", "0=5", "many=5", "100=-1"])
def test_traffic_that_is_none(run, models, traffic):
    result = run("plan", *models, "--traffic", traffic)
    assert result.exit_code == 2
    assert "is not TOKENS=PER_DAY" in message(result)
