import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from hf_kvtransfer.commands import app

from ..tiny_models import identity_mapper, random_ids, tiny_model


# Enough for a verdict and for a band of the probe.
SETTINGS = ("--context-tokens", 130, "--continuation-tokens", 32, "--false-alarm-rate", 0.2)
# Just enough to run.
SHORT = ("--context-tokens", 12, "--continuation-tokens", 4, "--limit", 3)


def message(result):
    """What stderr says behind the progress, without the box around bad usage."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr.rpartition("\r")[2]).split())


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def files(tokenizers, tmp_path_factory):
    """
    Folders `model`, which is source and target, and `mapper`, the exact one; files of what the model wrote itself,
    since its next tokens depend on the context, of text and of dialogues.
    """
    root = tmp_path_factory.mktemp("files")
    model = tiny_model("llama")
    model.save_pretrained(root / "model")
    tokenizers["bpe"].save_pretrained(root / "model")
    identity_mapper(model).save_pretrained(root / "mapper")
    torch.manual_seed(0)
    ids = model.generate(random_ids(model, 12, 8), max_new_tokens=154, do_sample=True, top_k=0, pad_token_id=0)
    dialogue = [{"role": role, "content": f"The {role} waits."} for role in ("user", "assistant", "user", "assistant")]
    rows = {
        "own.jsonl": [{"input_ids": row} for row in ids.tolist()],
        "text.jsonl": [{"text": f"{word} The river carries silt down to the delta." * 2} for word in "ABCDEF"],
        "dialogues.jsonl": [{"messages": [{"role": "user", "content": word}, *dialogue[1:]]} for word in "ABC"],
    }
    for name, lines in rows.items():
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def evaluated(files):
    """The folder of a mapper that was evaluated by the command, and the command's result."""
    folder = shutil.copytree(files / "mapper", files / "evaluated")
    models = ("--source", files / "model", "--target", files / "model")
    arguments = ("evaluate", folder, *models, "--data", files / "own.jsonl", *SETTINGS)
    return folder, CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def mapper(files, tmp_path):
    """A copy of the mapper, without evidence."""
    return shutil.copytree(files / "mapper", tmp_path / "mapper")


@pytest.fixture
def models(files):
    return ("--source", files / "model", "--target", files / "model")
