import json

import pytest

from .conftest import message


@pytest.fixture
def context(tmp_path):
    file = tmp_path / "context.txt"
    file.write_text("The river carries silt down to the delta. " * 8, encoding="utf-8")
    return file


@pytest.fixture
def command(models, context):
    return (*models, "--context", context, "--prompt", " The farmers", "--max-new-tokens", 6)


def test_translated_as_native(evaluated, mapper, command, run):
    folder, _ = evaluated
    result = run("generate", folder, *command)
    assert result.exit_code == 0, result.output
    assert "tokens translated" in result.stderr
    native = run("generate", mapper, *command)  # without evidence
    assert native.exit_code == 0
    assert "the target reads the context itself" in native.stderr
    assert "no evidence" in native.stderr
    assert result.stdout == native.stdout
    assert result.stdout.strip()


def test_json(evaluated, command, run):
    found = json.loads(run("generate", evaluated[0], *command, "--json").stdout)
    assert found["outcome"] == "translated"
    assert found["translated_tokens"] > 50
    assert found["verdict"]["admitted"]
    assert found["text"] == run("generate", evaluated[0], *command).stdout.rstrip("\n")


def test_refusal_can_be_asked_for(mapper, command, run):
    result = run("generate", mapper, *command, "--on-refusal", "fail")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no evidence" in result.stderr
    refused = json.loads(run("generate", mapper, *command, "--on-refusal", "fail", "--json").stdout)
    assert refused["outcome"] == "refused"


def test_capability_and_no_gate(evaluated, mapper, command, run):
    result = run("generate", evaluated[0], *command, "--capability", "law", "--on-refusal", "fail")
    assert (result.exit_code, "says nothing about ['law']" in result.stderr) == (1, True)
    result = run("generate", mapper, *command, "--no-gate", "--on-refusal", "fail", "--json")
    assert json.loads(result.stdout)["outcome"] == "translated"


def test_bad_context(evaluated, models, run, tmp_path):
    result = run("generate", evaluated[0], *models, "--context", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "--context" in message(result)
    (tmp_path / "empty").touch()
    result = run("generate", evaluated[0], *models, "--context", tmp_path / "empty")
    assert result.exit_code == 2
    assert "holds no text" in message(result)


def test_effort(evaluated, command, run):
    plain, again = (
        json.loads(run("generate", evaluated[0], *command, "--effort", effort, "--json").stdout)
        for effort in ("auto", 0.25)
    )
    assert plain["effort"] == 0  # enough for an exact mapper
    assert again["effort"] == again["verdict"]["effort"] == 0.25
    assert plain["translated_tokens"] - again["translated_tokens"] > 10
    assert plain["text"] == again["text"]
    for wrong in ("much", 1.5):
        result = run("generate", evaluated[0], *command, "--effort", wrong)
        assert result.exit_code == 2
        assert f"'{wrong}' is neither a share from 0 to 1 nor auto" in message(result)
