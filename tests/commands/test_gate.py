import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from hf_kvtransfer import FidelityReport

from .conftest import message


@pytest.fixture
def folder(evaluated, tmp_path):
    """A copy of the mapper with its evidence."""
    return shutil.copytree(evaluated[0], tmp_path / "mapper")


def change_weight(file, name, change):
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def test_evidence_alone(folder, run):
    result = run("gate", folder)
    assert result.exit_code == 0, result.output
    assert "Arms, 384 positions of 12 documents" in result.stdout
    assert f"{folder}: admitted" in result.stdout
    assert "on the evidence alone" in result.stdout
    assert "model to model, measured 20" in result.stdout
    assert "own.jsonl (12 documents)" in result.stdout
    assert "Probe" not in result.stdout


def test_a_capability_that_was_not_measured(folder, run):
    result = run("gate", folder, "--capability", "law")
    assert result.exit_code == 1
    assert "its evidence says nothing about ['law'], only about ['text']" in result.stdout


def test_effort(folder, run):
    verdict = json.loads(run("gate", folder, "--effort", 0.25, "--json").stdout)
    assert (verdict["admitted"], verdict["effort"]) == (True, 0.25)
    assert json.loads(run("gate", folder, "--json").stdout)["effort"] == 0


def test_operating_curve(folder, run):
    result = run("gate", folder, "--probe")
    assert "other document" in result.stdout[result.stdout.index("Probe") :]
    assert result.exit_code == 0


def test_with_the_models(folder, models, run):
    result = run("gate", folder, *models)
    assert result.exit_code == 0, result.output
    assert "alone" not in result.stdout


def test_with_a_model_that_was_trained_on(folder, files, run, tmp_path):
    other = shutil.copytree(files / "model", tmp_path / "model")
    change_weight(other / "model.safetensors", "model.layers.2.mlp.up_proj.weight", lambda weight: weight * 1.01)
    result = run("gate", folder, "--source", files / "model", "--target", other)
    assert result.exit_code == 1
    assert "the target is not the one that was measured: weights changed" in result.stdout
    assert "up_proj" in result.stdout
    assert run("gate", folder, "--source", other, "--target", files / "model").exit_code == 1


def test_json(folder, models, run):
    found = json.loads(run("gate", folder, "--json").stdout)
    assert found["admitted"]
    assert found["reasons"] == []
    assert not found["models_checked"]
    assert found["figures"] == FidelityReport.load(folder).figures
    assert found["probe"]["curve"]
    assert json.loads(run("gate", folder, *models, "--json").stdout)["models_checked"]


def test_without_evidence(mapper, run):
    result = run("gate", mapper)
    assert result.exit_code == 1
    assert "hf-kvtransfer evaluate" in result.stdout
    result = run("gate", mapper, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["figures"] is None


def test_edited_evidence(folder, models, run):
    file = folder / "fidelity.json"
    file.write_text(file.read_text().replace('"positions": 384', '"positions": 768', 1))
    for arguments in ((), models):
        result = run("gate", folder, *arguments)
        assert result.exit_code == 1
        assert "digest does not match" in result.stdout


def test_evidence_of_other_weights(folder, run):
    change_weight(folder / "model.safetensors", "layers.0.weight", lambda weight: weight * 1.1)
    result = run("gate", folder)
    assert result.exit_code == 1
    assert "about another mapper" in result.stdout


@pytest.mark.parametrize("given", ["--source", "--target"])
def test_one_model_is_not_enough(given, folder, files, run):
    result = run("gate", folder, given, files / "model")
    assert result.exit_code == 2
    assert f"{given}: both models are checked, or none" in message(result)
