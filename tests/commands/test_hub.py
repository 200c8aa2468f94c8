"""Push, pull and generate in processes of their own, through a local Hub."""

import json
import os
import subprocess
import sys

import pytest

from ..hub_server import TOKEN, HubServer


NAME = "me/source-to-target"
CODE = "import sys; from hf_kvtransfer.commands import app; app(sys.argv[1:], prog_name='hf-kvtransfer')"


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def process(hub, tmp_path):
    """Run a command as a user does."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }

    def run(*arguments, **changes):
        return subprocess.run(
            [sys.executable, "-c", CODE, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment | changes,
        )

    return run


def test_push_pull_generate(evaluated, models, process, hub, tmp_path):
    folder, _ = evaluated
    pushed = process("push", folder, NAME, "--source", "org/source", "--target", "org/target", "--json")
    assert pushed.returncode == 0, pushed.stderr
    revision = json.loads(pushed.stdout)["revision"]
    assert hub.repos[NAME].tags()[:3] == ["hf-kvtransfer", "kv-source:org/source", "kv-target:org/target"]

    pulled = process("pull", NAME, tmp_path / "pulled")
    assert pulled.returncode == 0, pulled.stderr
    assert f"{NAME} at {revision[:7]} is in {tmp_path / 'pulled'}" in pulled.stdout
    assert f"{NAME}: admitted" in pulled.stdout
    for name in ("model.safetensors", "fidelity.json", "config.json"):
        assert (tmp_path / "pulled" / name).read_bytes() == (folder / name).read_bytes()

    (tmp_path / "context.txt").write_text("The river carries silt down to the delta. " * 8)
    written = process(
        "generate", NAME, *models, "--context", tmp_path / "context.txt", "--max-new-tokens", 4, HF_HUB_OFFLINE="1"
    )
    assert written.returncode == 0, written.stderr
    assert f"{NAME}@{revision[:7]}" in written.stderr
    assert "tokens translated" in written.stderr
