"""Push, pull and search through the real client, and all that can go wrong between."""

import json
import re
import socket
import time

import pytest
import torch
from huggingface_hub import ModelCard, constants

from hf_kvtransfer import FidelityGate, FidelityReport, HubError, KVMapper, MapperFormatError, find_mappers
from hf_kvtransfer.hub.card import mapper_card

from ..fidelity.evidence import make_report
from ..hub_server import TOKEN
from ..tiny_models import identity_mapper, tiny_model


PAIR = ("org/small", "org/large")
NAME = "me/small-to-large"


@pytest.fixture(scope="module")
def mapper():
    return identity_mapper(tiny_model("llama"))


@pytest.fixture(scope="module")
def report(mapper):
    return make_report(mapper={"name": "small to large", "digest": mapper.digest()})


@pytest.fixture
def measured(mapper, report):
    mapper.evidence = report
    yield mapper
    mapper.evidence = None


@pytest.fixture(scope="module")
def files(mapper, report, tmp_path_factory):
    """What a repository of the mapper holds."""
    folder = tmp_path_factory.mktemp("files")
    mapper.evidence = report
    mapper.save_pretrained(folder)
    mapper_card(mapper, NAME, PAIR).save(folder / "README.md")
    mapper.evidence = None
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def no_waiting(monkeypatch):
    """The client tries again after some seconds."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def changed_config(files, **changes):
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | changes).encode()}


def test_push_and_load(hub, measured, files):
    commit = measured.push_to_hub(NAME, base_models=PAIR, license="apache-2.0", tags=["tiny"])
    pushed = hub.repos[NAME].files
    assert {name: pushed[name] for name in files if name != "README.md"} == {
        name: content for name, content in files.items() if name != "README.md"
    }
    again = KVMapper.from_pretrained(NAME)
    assert (again.name, again.revision) == (NAME, commit.oid)
    assert again.digest() == measured.digest()
    assert again.evidence.results == measured.evidence.results


def test_card(measured):
    card = mapper_card(measured, NAME, PAIR, "apache-2.0", ["tiny"])
    data = ModelCard(str(card)).data
    assert data.library_name == "hf-kvtransfer"
    assert data.base_model == list(PAIR)
    assert {"hf-kvtransfer", "kv-source:org/small", "kv-target:org/large", "tiny"} <= set(data.tags)
    gap = measured.evidence.figures["arms"]["translated"]["gap_recovered"]["value"]
    (overall,) = (
        result
        for result in data.eval_results
        if result.dataset_name == "all of the evidence" and result.metric_type == "gap_recovered"
    )
    assert overall.metric_value == pytest.approx(gap, abs=1e-4)
    assert {result.dataset_name for result in data.eval_results} == {
        "all of the evidence",
        *measured.evidence.figures["capabilities"],
    }
    text = card.content
    for part in ("Capability by capability", "TranslatedCache(source_kv", NAME, "█···", "4 layers of 2 KV heads x 16"):
        assert part in text


def test_card_without_evidence_of_models_in_folders(mapper):
    card = mapper_card(mapper, NAME)
    assert "Nothing was measured yet" in card.content
    assert "refuses it" in card.content
    assert card.data.base_model is None
    with pytest.raises(ValueError, match="`base_models` must be the two Hub ids"):
        mapper_card(mapper, NAME, ("small", "org/large"))


def test_push_replaces_what_another_mapper_left(hub, mapper, files):
    hub.add(NAME, files | {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"kept"})
    mapper.push_to_hub(NAME)
    left = set(hub.repos[NAME].files)
    assert left == {"config.json", "model.safetensors", "README.md", "notes.txt"}
    assert KVMapper.from_pretrained(NAME).evidence is None


def test_push_to_a_branch_and_by_short_name(hub, mapper, files):
    hub.add(NAME, files)
    mapper.push_to_hub("small-to-large", revision="trial")
    assert "fidelity.json" in hub.repos[NAME].files
    assert KVMapper.from_pretrained(NAME, revision="trial").evidence is None
    assert KVMapper.from_pretrained(NAME, revision="main").evidence is not None


def test_push_with_a_wrong_token(hub, mapper, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(HubError, match=r"(?s)'me/small-to-large'.*401.*hf auth login"):
        mapper.push_to_hub(NAME)
    assert hub.repos == {}


def test_nothing_is_made_if_the_mapper_cannot_be_saved(hub, mapper, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(KVMapper, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        mapper.push_to_hub(NAME)
    assert hub.requests == []


def test_subfolder_and_private(hub, files, monkeypatch):
    hub.add(NAME, {f"maps/{name}": content for name, content in files.items()}, private=True)
    assert KVMapper.from_pretrained(NAME, subfolder="maps", token=TOKEN).evidence is not None
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(MapperFormatError, match="hf auth login"):
        KVMapper.from_pretrained("me/private", token="hf_other")


def test_what_is_not_there(hub, files):
    hub.add(NAME, files)
    with pytest.raises(MapperFormatError, match=r"(?s)'me/other'.*404.*Check the name"):
        KVMapper.from_pretrained("me/other")
    with pytest.raises(MapperFormatError, match=r"(?s)404.*Check `revision`"):
        KVMapper.from_pretrained(NAME, revision="v2")
    with pytest.raises(MapperFormatError, match="there is no folder 'a/b/c'"):
        KVMapper.from_pretrained("a/b/c")


def test_repository_changes_between_two_files(hub, mapper, files):
    repo = hub.add(NAME, files)
    first = repo.branches["main"]
    other = {name: b"of another commit" for name in files if name != "config.json"}

    def push(method, path):
        if path.endswith("model.safetensors") and len(repo.commits) == 2:
            repo.commit(files | other)

    hub.before = push
    loaded = KVMapper.from_pretrained(NAME)
    assert len(repo.commits) == 3
    assert loaded.revision == first
    assert loaded.digest() == mapper.digest()
    assert loaded.evidence is not None


def test_connection_cut_in_the_middle(hub, files, no_waiting, mapper):
    hub.add(NAME, files)
    hub.cut["model.safetensors"] = 1000
    with pytest.raises(MapperFormatError, match="No mapper can be loaded from 'me/small-to-large'"):
        KVMapper.from_pretrained(NAME)
    with pytest.raises(MapperFormatError):  # nor is the half of it taken for a whole
        KVMapper.from_pretrained(NAME, local_files_only=True)
    hub.cut.clear()
    assert KVMapper.from_pretrained(NAME).digest() == mapper.digest()


def test_without_a_network(hub, files, mapper, monkeypatch, no_waiting):
    hub.add(NAME, files)
    KVMapper.from_pretrained(NAME)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}")
    assert KVMapper.from_pretrained(NAME).digest() == mapper.digest()
    with pytest.raises(MapperFormatError, match="Check the network"):
        KVMapper.from_pretrained("me/other")
    with pytest.raises(HubError, match="Check the"):
        mapper.push_to_hub(NAME)
    with pytest.raises(HubError, match="Check the network"):
        find_mappers(*PAIR)


def test_offline(hub, files, mapper, monkeypatch):
    hub.add(NAME, files)
    KVMapper.from_pretrained(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert KVMapper.from_pretrained(NAME).evidence is not None
    with pytest.raises(MapperFormatError, match="HF_HUB_OFFLINE"):
        KVMapper.from_pretrained("me/other")
    with pytest.raises(HubError):
        mapper.push_to_hub(NAME)
    assert len(hub.requests) == asked


def test_cache_that_cannot_be_written(hub, files, monkeypatch, tmp_path):
    hub.add(NAME, files)
    (tmp_path / "file").write_text("a file where the cache's folder should be")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MapperFormatError, match="No mapper can be loaded"):
        KVMapper.from_pretrained(NAME)
    assert KVMapper.from_pretrained(NAME, cache_dir=tmp_path / "other").evidence is not None


def test_a_model_is_no_mapper_and_its_weights_are_not_fetched(hub):
    hub.add("org/model", {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(10_000)})
    with pytest.raises(MapperFormatError, match="'org/model' is no mapper: .* of a model of type 'llama'"):
        KVMapper.from_pretrained("org/model")
    assert not any("safetensors" in path for _, path in hub.requests)


def test_pickles_and_code_are_not_even_fetched(hub, files, tmp_path):
    poison = {"pytorch_model.bin": b"pickle", "modeling_mapper.py": b"raise SystemExit", "adapter_config.json": b"{}"}
    hub.add(NAME, files | poison)
    KVMapper.from_pretrained(NAME)
    assert not any(path.endswith(tuple(poison)) for _, path in hub.requests if "/resolve/" in path)
    only_pickle = {name: content for name, content in files.items() if "safetensors" not in name}
    hub.add("me/pickle", only_pickle | poison)
    with pytest.raises(MapperFormatError, match="No mapper can be loaded"):
        KVMapper.from_pretrained("me/pickle")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"auto_map": {"AutoModel": "modeling.Mapper"}}, "asks for Python code of its own"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "asks for a quantisation"),
        ({"layers": [{"kind": "os.system"}] * 4}, "kind 'os.system'"),
        ({"model_type": "kv_mapper2"}, "of type 'kv_mapper2'"),
    ],
)
def test_config_that_asks_for_more_than_data(changes, problem, hub, files):
    hub.add(NAME, changed_config(files, **changes))
    with pytest.raises(MapperFormatError, match=re.escape(problem)):
        KVMapper.from_pretrained(NAME)


def test_unknown_class_in_the_config_is_not_looked_for(hub, files, mapper):
    hub.add(NAME, changed_config(files, architectures=["os.system"]))
    assert KVMapper.from_pretrained(NAME).digest() == mapper.digest()


def test_adapter_beside_a_mapper(files, tmp_path):
    for name, content in (files | {"adapter_config.json": b'{"base_model_name_or_path": "org/other"}'}).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MapperFormatError, match="would load an adapter"):
        KVMapper.from_pretrained(tmp_path)


def test_broken_card_metadata_keeps_nobody_from_loading(hub, files, mapper):
    hub.add(NAME, files | {"README.md": b"---\ntags: [unclosed\n---\n# Hello"})
    assert KVMapper.from_pretrained(NAME).digest() == mapper.digest()
    assert find_mappers(*PAIR) == []


def test_find_mappers(hub, files, report, mapper):
    hub.add("me/good", files)
    hub.add("me/unmeasured", {name: content for name, content in files.items() if name != "fidelity.json"})
    hub.add("me/edited", files | {"fidelity.json": files["fidelity.json"].replace(b'"talk.jsonl"', b'"text.jsonl"')})
    hub.add("me/back", files | {"README.md": str(mapper_card(mapper, "me/back", PAIR[::-1])).encode()})
    gate = FidelityGate(min_gap_recovered=-9, min_late_turns=-9, min_agreement=0, max_control=1, min_positions=1)
    reasons = gate.judge(report)
    found = {mapper.repo_id: mapper for mapper in find_mappers(*PAIR, gate=gate)}
    assert list(found)[0] == "me/good"
    assert set(found) == {"me/good", "me/unmeasured", "me/edited"}
    assert found["me/good"].verdict.reasons == tuple(reasons)
    assert found["me/good"].gap_recovered == report.figures["arms"]["translated"]["gap_recovered"]["value"]
    assert "no evidence" in str(found["me/unmeasured"])
    assert "edited" in str(found["me/edited"].verdict)
    assert [mapper.repo_id for mapper in find_mappers(*PAIR[::-1])] == ["me/back"]
    assert not any("safetensors" in path for _, path in hub.requests)
    assert isinstance(report, FidelityReport)


def test_dtype_from_the_hub(hub, files):
    hub.add(NAME, files)
    assert KVMapper.from_pretrained(NAME, dtype=torch.bfloat16).dtype == torch.bfloat16
