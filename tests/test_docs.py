"""The pages in docs/: their Python is run as it stands, and what they say of the code is so."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvtransfer
from hf_kvtransfer.commands import app

from .documents import CONTEXT, ROOT, blocks


PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "AGENTS.md")}


@pytest.fixture(scope="module")
def names(hub_folders):
    """What the pages take for granted: two loaded models, and a text."""
    found = {"context": CONTEXT[:300]}
    for side in ("source", "target"):
        found[side] = AutoModelForCausalLM.from_pretrained(hub_folders / "org" / side)
        found[f"{side}_tokenizer"] = AutoTokenizer.from_pretrained(hub_folders / "org" / side)
    return found


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if blocks(text, "python")])
def test_python(page, names, in_hub_folders, no_evidence_needed, recwarn, capsys):
    namespace = dict(names)
    for block in blocks(PAGES[page], "python"):
        exec(block, namespace)
    if "cache.report" in PAGES[page]:
        assert "recomputed" not in capsys.readouterr().out


def test_commands_have_the_options_that_are_shown():
    commands = typer.main.get_command(app).commands
    shown = 0
    for name, text in TEXTS.items():
        for line in "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program != "hf-kvtransfer":
                continue
            known = {option for parameter in commands[arguments[0]].params for option in parameter.opts}
            used = {argument for argument in arguments if argument.startswith("--")}
            assert used <= known, (name, line)
            shown += 1
    assert shown > 5


def test_files_that_are_named_exist():
    paths = {
        path.rstrip(".")
        for text in TEXTS.values()
        for path in re.findall(r"\b(?:benchmarks|examples|mappers|docs|tests)/[\w./-]+", text)
    }
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_navigation():
    def files(entries):
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from files(value) if isinstance(value, list) else [value]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(files(config["nav"])) == sorted(PAGES)


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: hf_kvtransfer\.(\w+)$", PAGES["api.md"], flags=re.MULTILINE)
    assert sorted(listed) == sorted(hf_kvtransfer.__all__)


def test_messages_that_are_explained_are_those_of_the_code():
    """In the first column, with … for what a message puts in; of transformers' own messages there is no text here."""
    code = "\n".join(_texts())
    rows = re.findall(r"^\| (`+)(.*?)\1 \|", PAGES["troubleshooting.md"], flags=re.MULTILINE)
    assert len(rows) > 25
    parts = [part.strip() for _, message in rows for part in message.split("…")]
    assert [part for part in parts if " ".join(part.split()) not in code] == []


def _texts():
    """All strings in the package, with nothing in place of what f-strings put in."""
    for path in (ROOT / "hf_kvtransfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_site_is_built(tmp_path):
    """With every link checked, and every public name found."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="hf_kvtransfer.TranslatedCache"' in reference
    assert "Args:" not in reference
    assert "[<code>" not in reference
