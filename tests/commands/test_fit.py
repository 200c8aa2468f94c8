import json

import pytest
import typer

from hf_kvtransfer import KVMapper
from hf_kvtransfer.commands import fit_steps
from hf_kvtransfer.commands.fit import WORK_FOLDER, parse_texts

from .conftest import message


SENTENCE = "The river carries silt from the mountains down to the delta, where farmers wait for the flood. "


@pytest.fixture(scope="session")
def texts(files):
    """Some texts that are long enough for a continuation."""
    rows = [{"text": SENTENCE[number % 40 :] + SENTENCE * 6 + f"Number {number}."} for number in range(24)]
    file = files / "calibration.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def command(tmp_path, models, texts):
    """A quick fit."""
    return ("fit", tmp_path / "new", *models, "--data", texts, "--num-source-layers", 1)


def test_fit_says_what_was_made_and_what_to_run_next(command, run, tmp_path):
    result = run(*command)
    assert result.exit_code == 0, result.output
    mapper = KVMapper.from_pretrained(tmp_path / "new")
    assert mapper.config.fit["num_texts"] == 24
    assert f"{mapper.num_bytes() / 1e3:.1f} kB" in result.stdout
    assert "explains" in result.stdout
    assert "Without evidence the default gate refuses it. Measure it" in result.stdout
    assert f"hf-kvtransfer evaluate {tmp_path / 'new'} --source" in result.stdout
    assert "Summing" in result.stderr
    assert not (tmp_path / "new" / WORK_FOLDER).exists()


def test_options_reach_the_fit(models, texts, run, tmp_path):
    mixture = ("--data", f"0.7={texts}", "--data", f"0.3={texts}")
    options = ("--kind", "low_rank", "--rank", 3, "--native-layers", 1, "--storage-bits", 8, "--max-tokens", 2000)
    result = run("fit", tmp_path / "new", *models, *mixture, *options, "--budget", "60kB", "--memory", "1MB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    mapper = KVMapper.from_pretrained(tmp_path / "new")
    assert found["digest"] == mapper.digest()
    assert found["admitted"] is False
    assert mapper.config.native_layers == 1
    assert mapper.config.storage["bits"] == 8
    assert {spec.get("rank") for spec in mapper.config.layers} == {None, 3}
    assert found["fit"]["train_tokens"] + found["fit"]["held_out_tokens"] < 2300  # to the end of a text
    assert found["bytes"] < 60_000


def test_another_fit_on_the_same_text_takes_kept_states(command, models, texts, run, tmp_path):
    states, options = tmp_path / "states", ("--data", texts, "--kind", "low_rank", "--rank", 3, "--json")
    assert run(*command, "--keep-states", states).exit_code == 0

    def kept():
        return {file: file.stat().st_mtime_ns for file in states.rglob("*") if file.is_file()}

    before = kept()
    assert before
    other = run("fit", tmp_path / "other", *models, *options, "--keep-states", states)
    assert kept() == before
    plain = run("fit", tmp_path / "plain", *models, *options)
    assert json.loads(other.stdout)["digest"] == json.loads(plain.stdout)["digest"]


def test_exact_copies_are_admitted_as_they_are(models, texts, run, tmp_path):
    result = run("fit", tmp_path / "new", *models, "--data", texts, "--kind", "identity", "--native-layers", -1)
    assert result.exit_code == 0, result.output
    assert "the default gate sees that, and admits it without evidence" in " ".join(result.stdout.split())


def test_all_steps_and_interruption(command, run, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    steps = ("--readout", 10, "--distill", 9, "--max-length", 150, "--json")
    monkeypatch.setattr(fit_steps, "distill_mapper", interrupted)
    result = run(*command, *steps)
    assert result.exit_code == 130
    assert "Interrupted. The same command goes on" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "new" / "config.json").exists()

    monkeypatch.undo()
    # What was done is not done again, and what other settings have done is not taken over.
    monkeypatch.setattr(fit_steps, "fit_mapper", interrupted)
    monkeypatch.setattr(fit_steps, "calibrate_readout", interrupted)
    result = run(*command, *steps, "--seed", 1)
    assert result.exit_code == 2
    assert "options.seed was 0 and is 1" in message(result)
    result = run(*command, *steps)
    assert result.exit_code == 0, result.output
    fit = json.loads(result.stdout)["fit"]
    assert fit["readout"]["num_texts"] == 10
    assert fit["distillation"]["train_texts"] == 1
    assert not (tmp_path / "new" / WORK_FOLDER).exists()
    assert run(*command, *steps, "--overwrite", "--restart").exit_code == 130


def test_a_mapper_is_not_replaced_unasked(mapper, models, texts, run):
    before = (mapper / "model.safetensors").read_bytes()
    result = run("fit", mapper, *models, "--data", texts)
    assert result.exit_code == 2
    assert "replace it with --overwrite" in message(result)
    assert (mapper / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--residuals", 3), "only maps of --kind residual_mlp"),
        (("--storage-bits", 3), "must be 8, 4 or None, got 3"),
        (("--budget", "much"), "must be a positive number of bytes"),
        (("--budget", "1kB"), "the smallest mapper"),
        (("--memory", "1kB"), "even alone"),
    ],
)
def test_bad_input(options, problem, models, texts, run, tmp_path):
    result = run("fit", tmp_path / "new", *models, "--data", texts, *options)
    assert result.exit_code == 2
    assert problem in message(result)
    assert not (tmp_path / "new" / "config.json").exists()


def test_mixtures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.txt", "k=v.jsonl"):
        (tmp_path / name).touch()
    assert parse_texts([]) is None
    assert parse_texts(["a.jsonl"]) == "a.jsonl"
    assert parse_texts(["org/corpus"]) == "org/corpus"
    assert parse_texts(["a.jsonl", "k=v.jsonl"]) == [("a.jsonl", 1.0), ("k=v.jsonl", 1.0)]
    assert parse_texts(["0.7=a.jsonl", "3=b.txt"]) == [("a.jsonl", 0.7), ("b.txt", 3.0)]
    for arguments in (["c.jsonl"], ["0=a.jsonl", "1=b.txt"], ["nan=a.jsonl"], ["0.5=a.jsonl", "b.txt"], ["x=a.jsonl"]):
        with pytest.raises(typer.BadParameter):
            parse_texts(arguments)
