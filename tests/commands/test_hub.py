"""Push, pull and generate in a process of their own, through a local Hub."""

import json
import os
import subprocess
import sys

import pytest

from ..hub_server import TOKEN, HubServer


NAME = "me/source-to-target"
# Several commands in one process, which takes its time to import torch.
CODE = """
import json, sys
from hf_kvtransfer.commands import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments, prog_name="hf-kvtransfer")
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def process(hub, tmp_path):
    """Run commands as a user does."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }

    def run(*commands):
        arguments = json.dumps([[str(argument) for argument in command] for command in commands])
        result = subprocess.run(
            [sys.executable, "-c", CODE, arguments], capture_output=True, text=True, env=environment
        )
        assert result.returncode == 0, result.stderr
        return result

    return run


def test_push_pull_generate(evaluated, models, process, hub, tmp_path):
    folder, _ = evaluated
    (tmp_path / "context.txt").write_text("The river carries silt down to the delta. " * 8)
    written = process(
        ("push", folder, NAME, "--source", "org/source", "--target", "org/target", "--json"),
        ("pull", NAME, tmp_path / "pulled"),
        ("generate", NAME, *models, "--context", tmp_path / "context.txt", "--max-new-tokens", 4),
    )
    pushed, _ = json.JSONDecoder().raw_decode(written.stdout)
    revision = pushed["revision"]
    assert hub.repos[NAME].branches["main"] == revision
    assert hub.repos[NAME].tags()[:3] == ["hf-kvtransfer", "kv-source:org/source", "kv-target:org/target"]
    assert f"{NAME} at {revision[:7]} is in {tmp_path / 'pulled'}" in written.stdout
    assert f"{NAME}: admitted" in written.stdout
    for name in ("model.safetensors", "fidelity.json", "config.json"):
        assert (tmp_path / "pulled" / name).read_bytes() == (folder / name).read_bytes()
    assert f"{NAME}@{revision[:7]}" in written.stderr
    assert "tokens translated" in written.stderr
