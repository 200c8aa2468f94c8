import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_kvtransfer


COMMANDS = ("bench", "doctor", "evaluate", "fit", "gate", "generate", "inspect", "plan", "pull", "push")


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_teaches_and_is_quick(arguments):
    """No torch and no transformers, which take seconds to import."""
    code = (
        "import sys\n"
        "from hf_kvtransfer.commands import app\n"
        "try:\n    app(sys.argv[1:], prog_name='hf-kvtransfer')\n"
        "finally:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"
    if not arguments:
        assert all(command in result.stdout for command in COMMANDS)
    for command in arguments:
        assert f"hf-kvtransfer {command} " in result.stdout[result.stdout.index("Examples") :]
        assert "Exit code" in result.stdout


def test_public_names_are_there_when_asked_for():
    assert [name for name in hf_kvtransfer.__all__ if not hasattr(hf_kvtransfer, name)] == []
    assert set(hf_kvtransfer.__all__) <= set(dir(hf_kvtransfer))
    with pytest.raises(AttributeError, match="'hf_kvtransfer' has no attribute 'Mapper'"):
        hf_kvtransfer.Mapper  # noqa: B018


def test_console_script():
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = pyproject["project"]["scripts"]["hf-kvtransfer"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{hf_kvtransfer.__version__}\n")


def test_without_arguments(run):
    result = run()
    assert "Commands" in result.output
    assert result.exit_code == 2


def test_unknown_command(run):
    assert run("fly").exit_code == 2


def test_errors_are_one_line_on_stderr(run, tmp_path):
    result = run("gate", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: No mapper can be loaded from")
    assert result.stderr.count("\n") == 1
