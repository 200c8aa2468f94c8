import json
import shutil

import pytest
import typer

from hf_kvtransfer import FidelityReport, KVMapper
from hf_kvtransfer.commands.evaluate import WORK_FILE, parse_data
from hf_kvtransfer.fidelity.replay import Replay

from .conftest import SHORT, message


@pytest.fixture
def short(mapper, models, files):
    """A quick evaluation."""
    return ("evaluate", mapper, *models, "--data", files / "own.jsonl", *SHORT)


@pytest.fixture
def interrupt(monkeypatch):
    """Ctrl-C while a passage is scored, and how many were begun."""
    score = Replay.score

    def interrupt_after(passages):
        begun = []

        def scored(*args, **kwargs):
            begun.append(args)
            if len(begun) > passages:
                raise KeyboardInterrupt
            return score(*args, **kwargs)

        monkeypatch.setattr(Replay, "score", scored)
        return begun

    return interrupt_after


def test_evidence_tables_and_verdict(evaluated, files):
    folder, result = evaluated
    assert result.exit_code == 0, result.output
    report = FidelityReport.load(folder)
    assert report.figures["documents"] == 12
    assert report.mapper["digest"] == KVMapper.from_pretrained(folder).digest()
    assert [source["name"] for source in report.data] == ["own.jsonl"]
    assert (report.settings["context_tokens"], report.settings["continuation_tokens"]) == (130, 32)
    assert "Arms, 384 positions of 12 documents" in result.stdout
    assert "Probe" in result.stdout
    gap = report.figures["arms"]["other_document"]["gap_recovered"]
    assert f"{gap['value']:.3f} [{gap['low']:.3f}, {gap['high']:.3f}]" in result.stdout
    assert result.stdout.index("Capability by capability") < result.stdout.index(f"{folder}: admitted")
    assert "12/12" in result.stderr
    assert "12/12" not in result.stdout
    assert not (folder / WORK_FILE).exists()


def test_json_is_all_there_is_on_stdout(short, run, mapper):
    result = run(*short, "--json")
    found = json.loads(result.stdout)
    report = FidelityReport.load(mapper)
    assert result.exit_code == 1
    assert not found["admitted"]
    assert found["strict"]
    assert any("384" in reason for reason in found["reasons"])
    assert found["figures"] == report.figures
    assert found["probe"] is None
    assert found["file"] == str(mapper / "fidelity.json")


def test_refusal_names_its_reasons(short, run):
    result = run(*short)
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "only 12 positions were scored, at least 384 are needed" in result.stdout


def test_capabilities_and_turns(mapper, models, files, run):
    given = (f"prose={files / 'text.jsonl'}", files / "dialogues.jsonl", files / "own.jsonl")
    result = run("evaluate", mapper, *models, *(part for file in given for part in ("--data", file)), *SHORT)
    figures = FidelityReport.load(mapper).figures
    assert set(figures["capabilities"]) == {"prose", "dialogue", "text"}
    assert figures["capabilities"]["prose"]["documents"] == 3
    assert [turn["turn"] for turn in figures["turns"]] == [1, 2]
    assert "Turn by turn" in result.stdout


def test_efforts(short, run, mapper):
    result = run(*short, "--effort", 0.5, "--effort", 0.2)
    report = FidelityReport.load(mapper)
    assert report.settings["efforts"] == [0.2, 0.5]
    assert "the same, effort 0.2" in result.stdout and "gap, effort 0.5" in result.stdout
    result = run(*short, "--effort", 0.5, "--effort", 0.5)
    assert result.exit_code == 2
    assert "must be different ones" in message(result)


def test_other_output(short, run, mapper, tmp_path):
    result = run(*short, "--output", tmp_path / "new" / "evidence")
    assert FidelityReport.load(tmp_path / "new" / "evidence").figures["positions"] == 12
    assert str(tmp_path / "new" / "evidence" / "fidelity.json") in result.stdout
    assert not (mapper / "fidelity.json").exists()


def test_dtype_and_tokenizers(mapper, models, files, tokenizers, run, tmp_path):
    tokenizers["bpe"].save_pretrained(tmp_path / "tokenizer")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((files / "model" / name).read_bytes())
    command = (
        "evaluate",
        mapper,
        "--source",
        bare,
        "--target",
        files / "model",
        "--data",
        files / "text.jsonl",
        *SHORT,
    )
    result = run(*command, "--dtype", "bfloat16", "--source-tokenizer", tmp_path / "tokenizer")
    settings = FidelityReport.load(mapper).settings
    assert settings["source_dtype"] == settings["target_dtype"] == "bfloat16", result.output
    result = run(*command, "--source-tokenizer", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "--source-tokenizer" in message(result)


def test_interrupted_run_goes_on(short, run, mapper, interrupt):
    run(*short)
    whole = FidelityReport.load(mapper)
    interrupt(2)
    result = run(*short)
    assert result.exit_code == 130
    assert "\nInterrupted. The same command goes on where it stopped" in result.stderr
    assert str(mapper / WORK_FILE) in result.stderr
    assert "Traceback" not in result.stderr
    begun = interrupt(100)
    result = run(*short)
    assert len(begun) == 1
    assert not (mapper / WORK_FILE).exists()
    assert FidelityReport.load(mapper).results == whole.results


def test_restart(short, run, mapper, interrupt):
    interrupt(2)
    run(*short)
    begun = interrupt(100)
    run(*short, "--restart")
    assert len(begun) == 3
    assert not (mapper / WORK_FILE).exists()


def test_interrupted_run_with_other_settings(short, run, mapper, interrupt):
    interrupt(2)
    run(*short)
    interrupt(100)
    result = run(*short, "--continuation-tokens", 5)
    assert result.exit_code == 2
    assert "settings.continuation_tokens was 4 and is 5" in message(result)
    assert not (mapper / "fidelity.json").exists()
    assert (mapper / WORK_FILE).exists()


def test_interrupted_before_anything_was_measured(short, run, mapper, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(KVMapper, "from_pretrained", interrupted)
    result = run(*short)
    assert result.exit_code == 130
    assert result.output == ""


def test_files_and_capabilities(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "k=v.jsonl", "lr=1=2.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "run=3").mkdir()
    (tmp_path / "run=3" / "a.jsonl").touch()
    elsewhere = f"{tmp_path}/run=3/a.jsonl"
    found = parse_data(
        ["code=a.jsonl", "b.jsonl", "k=v.jsonl", "code=lr=1=2.jsonl", "run=3/a.jsonl", f"math={elsewhere}"]
    )
    assert {capability: [str(file) for file in paths] for capability, paths in found.items()} == {
        "code": ["a.jsonl", "lr=1=2.jsonl"],
        None: ["b.jsonl", "k=v.jsonl", "run=3/a.jsonl"],
        "math": [elsewhere],
    }


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("c.jsonl", "no file 'c.jsonl'"),
        ("code=c.jsonl", "no file 'c.jsonl'"),
        ("runs/x=a.jsonl", "no file 'runs/x=a.jsonl'"),
        ("C:\\x=a.jsonl", "no file"),
        ("=a.jsonl", "no capability"),
        (".", "no file"),
        ("", "no file"),
    ],
)
def test_files_that_are_not_there(argument, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(typer.BadParameter, match=problem):
        parse_data([argument])


def test_mapper_on_the_hub_needs_an_output(files, models, run):
    result = run("evaluate", "me/source-to-target", *models, "--data", files / "own.jsonl")
    assert result.exit_code == 2
    assert "--output: there is no folder 'me/source-to-target'. For a mapper on the Hub" in message(result)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("--source", "nowhere"), "Error: No tokenizer can be loaded from --source 'nowhere'"),
        (("--data", "broken.jsonl"), "Error: Line 1 of broken.jsonl"),
        (("--max-length", 10), "--max-length: must be at least --context-tokens, 12"),
        (("--limit", 0), "'--limit'"),
        (("--dtype", "int8"), "'--dtype'"),
        (("--output", "broken.jsonl"), "'--output'"),
    ],
)
def test_bad_input_is_one_clear_message(change, problem, short, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"messages": [{"role": "robot", "content": "Hello."}]}\n')
    result = run(*short, *change)
    assert result.exit_code == 2
    assert problem in message(result)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_damaged_model_is_one_line(mapper, files, run, tmp_path):
    model = shutil.copytree(files / "model", tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    command = ("evaluate", mapper, "--source", files / "model", "--target", model)
    result = run(*command, "--data", files / "own.jsonl", *SHORT)
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"Error: No model can be loaded from --target '{model}': ")
