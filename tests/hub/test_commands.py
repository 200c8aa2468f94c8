"""`push` and `pull` where something goes wrong."""

import json

import pytest
from typer.testing import CliRunner

from hf_kvtransfer.commands import app

from ..tiny_models import identity_mapper, tiny_model


NAME = "me/source-to-target"


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapper")
    identity_mapper(tiny_model("llama")).save_pretrained(path)
    return path


@pytest.fixture
def pushed(hub, folder):
    return hub.add(NAME, {file.name: file.read_bytes() for file in folder.iterdir()})


def test_pull_leaves_no_half_folder(hub, pushed, run, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut["model.safetensors"] = 500
    result = run("pull", NAME, tmp_path / "pulled")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: No mapper can be loaded from '{NAME}'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    hub.cut.clear()
    result = run("pull", NAME, tmp_path / "pulled", "--json")
    assert json.loads(result.stdout)["admitted"] is False
    assert (tmp_path / "pulled" / "model.safetensors").exists()


def test_pull_does_not_replace_unasked(pushed, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("pull", NAME).exit_code == 0
    (tmp_path / "source-to-target" / "notes.txt").touch()
    assert run("pull", NAME).exit_code == 2
    assert (tmp_path / "source-to-target" / "notes.txt").exists()
    assert run("pull", NAME, "--overwrite").exit_code == 0
    assert not (tmp_path / "source-to-target" / "notes.txt").exists()


def test_pull_of_a_model(hub, run, tmp_path):
    hub.add("org/model", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b""})
    result = run("pull", "org/model", tmp_path / "pulled")
    assert result.exit_code == 2
    assert "'org/model' is no mapper" in result.stderr
    assert not (tmp_path / "pulled").exists()


def test_push_without_evidence_says_so(hub, folder, run):
    result = run("push", folder, NAME)
    assert result.exit_code == 0, result.output
    assert f"Pushed: {hub.url}/{NAME}/commit/" in result.stdout
    assert "It has no evidence" in result.stderr


def test_push_without_a_login(hub, folder, run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = run("push", folder, NAME)
    assert result.exit_code == 2
    assert "hf auth login" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("push", folder, NAME, "--source", "org/source").exit_code == 2
