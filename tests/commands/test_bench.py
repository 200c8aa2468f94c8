import json

from .conftest import message


def test_prefill_and_handoff_are_measured(run, files, models):
    arguments = ("bench", files / "mapper", *models, "--length", 40, "--length", 20, "--runs", 1)
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["tokens"] for row in found["lengths"]] == [20, 40]
    for row in found["lengths"]:
        assert row["ratio"] == row["prefill_seconds"] / row["handoff_seconds"] > 0
    assert (found["dtype"], found["device"], found["runs"]) == ("float32", "cpu", 1)
    shown = run(*arguments)
    assert "medians of 1" in shown.stdout
    assert "40" in shown.stdout


def test_a_context_that_is_too_long_is_refused(run, files, models):
    result = run("bench", files / "mapper", *models, "--length", 5000)
    assert result.exit_code == 2
    assert "these models read contexts of up to 512 tokens, not 5000" in message(result)
