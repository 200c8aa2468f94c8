"""
docs/command-line.md says what the commands' help says, and what they print when they are run.

After a change of a command: `python -m tests.test_command_line_docs`, and look at the difference.
"""

import contextlib
import inspect
import json
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_kvtransfer.commands import app
from hf_kvtransfer.home import HOME_VARIABLE

from .hub_server import HubServer, use_hub
from .tiny_models import random_ids, tiny_model
from .tiny_tokenizers import byte_level_bpe


DOCUMENT = Path(__file__).parents[1] / "docs" / "command-line.md"
PAIR = "--source source --target target"
# In the order in which they build on each other.
RUNS = {
    "doctor": "doctor source target --config-only",
    "plan": f"plan {PAIR} --traffic 100=2000 --traffic 400=150 --days 90",
    "fit": f"fit my-mapper {PAIR} --data calibration.jsonl --kind identity --native-layers -1",
    "evaluate": f"evaluate my-mapper {PAIR} --data held_out.jsonl --context-tokens 64 --continuation-tokens 48",
    "gate": f"gate my-mapper {PAIR}",
    "bench": f"bench my-mapper {PAIR} --length 100 --length 400 --runs 1",
    "inspect": "inspect my-mapper",
    "generate": f"generate my-mapper {PAIR} --context story.txt --max-new-tokens 16",
    "push": "push my-mapper me/source-to-target --source org/source --target org/target",
    "pull": "pull me/source-to-target pulled",
}
# Random models write nothing worth reading, and are too small for a handoff to be worth it on every machine.
WITHOUT_OUTPUT = {"bench", "generate", "plan"}
INTRODUCTION = """# The command line

`hf-kvtransfer COMMAND --help` says what stands here. Models are given as folders, Hub ids or GGUF files, mappers as
folders or Hub ids. Results go to stdout, progress and remarks to stderr; `--json` prints one JSON object instead. Exit
codes are 0, 1 where a command advises against something, 2 after an error, which is one line on stderr, and 130 after
Ctrl-C. `evaluate` and `fit` go on where they were interrupted.

The runs below are real: of two small random models that are the same, so that the exact mapper is the identity.
"""


def commands():
    return typer.main.get_command(app).commands


def help_section(name):
    """A command's help as Markdown."""
    command = commands()[name]
    text, _, examples = inspect.cleandoc(command.callback.__doc__).partition("\n\nExamples:\n\n")
    rows = ["| | |", "|---|---|"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.human_readable_name}`"
        default = parameter.default
        shown = (
            "" if default in (None, "", False, True) or callable(default) or parameter.required else f" `{default}`"
        )
        rows.append(f"| {names}{shown} | {parameter.help} |")
    return f"## {name}\n\n{text}\n\n" + "\n".join(rows) + f"\n\n{examples.strip()}\n"


def run_block(name, output):
    shown = "" if name in WITHOUT_OUTPUT else "\n".join(line.rstrip() for line in output.strip().splitlines()) + "\n"
    return f"```console\n$ hf-kvtransfer {RUNS[name]}\n{shown}```\n"


def prepare(folder):
    """What the runs work on: two models that are the same, and what they write themselves, where contexts matter."""
    model = tiny_model("llama")
    for name in ("source", "target"):
        model.save_pretrained(folder / name)
        byte_level_bpe().save_pretrained(folder / name)
    torch.manual_seed(0)
    ids = model.generate(random_ids(model, 8, 8), max_new_tokens=104, do_sample=True, top_k=0, pad_token_id=0)
    texts = [f"Number {number}. " + "The river carries silt down to the delta. " * 4 for number in range(10)]
    for name, rows in {
        "held_out.jsonl": [{"input_ids": row} for row in ids.tolist()],
        "calibration.jsonl": [{"text": text} for text in texts],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "story.txt").write_text(texts[0] * 2, encoding="utf-8")


def outputs(folder):
    """What each run prints, in order."""
    prepare(folder)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as monkeypatch, HubServer() as hub:
        use_hub(hub, monkeypatch, folder / "cache")
        monkeypatch.setenv(HOME_VARIABLE, str(folder / "home"))
        for name, command in RUNS.items():
            result = CliRunner().invoke(app, shlex.split(command))
            assert result.exit_code == 0, (name, result.output)
            yield name, result.stdout.replace(hub.url, "https://huggingface.co")


def same_but_for_numbers(text):
    """Lines without their figures, which differ from machine to machine, and the widths that these make."""
    return [" ".join(re.sub(r"[\d.,:T+-]*\d[\w.,:+-]*|─+", "#", line).split()) for line in text.splitlines()]


def test_help_is_the_commands_own():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert set(RUNS) == set(commands())
    assert text.startswith(INTRODUCTION)
    for name in RUNS:
        assert help_section(name) in text


def test_runs_print_what_it_says(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = dict(zip(RUNS, re.findall(r"```console\n.*?```\n", text, flags=re.DOTALL), strict=True))
    for name, output in outputs(tmp_path):
        assert same_but_for_numbers(run_block(name, output)) == same_but_for_numbers(shown[name]), name


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        parts = [f"{help_section(name)}\n{run_block(name, output)}" for name, output in outputs(Path(scratch))]
    DOCUMENT.write_text("\n".join([INTRODUCTION, *parts]), encoding="utf-8")
