import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvtransfer import KVMapper, KVMapperConfig, MapperFormatError

from .tiny_models import identity_mapper, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapper")
    identity_mapper(tiny_model("gemma3")).save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_round_trip(folder):
    mapper = KVMapper.from_pretrained(folder)
    assert not mapper.training
    assert torch.equal(mapper.layers[1].weight, torch.eye(96))
    assert mapper.layers[1].source_layers == (1,)
    assert mapper.config.source["name"] == "tiny"
    assert KVMapper.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_shards(folder, tmp_path):
    mapper = KVMapper.from_pretrained(folder)
    mapper.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(mapper.parameters(), KVMapper.from_pretrained(tmp_path).parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(copy, name):
    (copy / name).unlink()
    with pytest.raises(MapperFormatError, match=name.replace(".", r"\.")):
        KVMapper.from_pretrained(copy)


def test_no_such_folder():
    with pytest.raises(MapperFormatError, match="No mapper can be loaded from 'no/such'"):
        KVMapper.from_pretrained("no/such")


def test_truncated_weights(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(MapperFormatError, match="download it"):
        KVMapper.from_pretrained(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.bias"), "missing: layers.1.bias"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "unknown: extra"),
        (lambda tensors: tensors.update({"layers.0.weight": torch.ones(95, 96)}), "another shape.*layers.0.weight"),
        (lambda tensors: tensors["layers.2.weight"].view(-1)[7:8].fill_(torch.nan), "layers.2.weight.*NaN or Inf"),
        (lambda tensors: tensors["layers.2.bias"][:1].fill_(torch.inf), "layers.2.bias.*NaN or Inf"),
    ],
)
def test_damaged_tensors(copy, damage, message):
    tensors = load_file(copy / "model.safetensors")
    damage(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MapperFormatError, match=message):
        KVMapper.from_pretrained(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "`format_version` is 99"),
        ({"layers": [{"kind": "linear", "source_layers": [0]}]}, "lists 1 layer maps for a target of"),
        ({"layers": [{"kind": "os.system", "source_layers": [0]}] * 4}, "of kind 'os.system', this version knows"),
        ({"layers": [{"kind": "linear", "source_layers": [9]}] * 4}, r"reads source layers \[9\]"),
        ({"layers": None}, "incomplete or damaged"),
        ({"source": None}, "incomplete or damaged"),
        ({"target": {"name": "x", "geometry": {"layers": [[1, 2]]}}}, "incomplete or damaged"),
    ],
)
def test_damaged_config(copy, changes, message):
    change_config(copy, **changes)
    with pytest.raises(MapperFormatError, match=message):
        KVMapper.from_pretrained(copy)


def test_a_model_is_no_mapper(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(MapperFormatError):
        KVMapper.from_pretrained(tmp_path)


def test_config_holds_what_was_given():
    config = KVMapperConfig.from_dict(KVMapperConfig(layers=[None], sink_tokens=7).to_dict())
    assert (config.layers, config.sink_tokens, config.token_features) == ([None], 7, 0)
