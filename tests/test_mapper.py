import gc
import json
import resource
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvtransfer import KVGeometry, KVMapper, KVMapperConfig, MapperFormatError

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


def test_a_full_disk_leaves_what_was_there(folder, copy):
    mapper = identity_mapper(tiny_model("llama"))
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        for place in (copy, copy / "new"):
            with pytest.raises(OSError, match="cannot be written: .* It is left as it was"):
                mapper.save_pretrained(place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    mapper.save_pretrained(copy)
    assert KVMapper.from_pretrained(copy).digest() == mapper.digest()
    assert {file.name for file in copy.iterdir()} == before.keys()


def test_shards(folder, tmp_path):
    mapper = KVMapper.from_pretrained(folder)
    mapper.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(mapper.parameters(), KVMapper.from_pretrained(tmp_path).parameters(), strict=True)
    )


# kv-translator
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


# kv-translator
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


# One layer of each kind, behind one that the target computes itself.
EVERY_KIND = [
    {"kind": "native"},
    {"kind": "linear", "source_layers": [0, 2]},
    {"kind": "head_matched", "source_layers": [1, 3], "source_heads": [[1, 0], [1, 1]]},
    {"kind": "low_rank", "source_layers": [2], "rank": 5},
    {"kind": "residual_mlp", "source_layers": [3, 1], "hidden_size": 7},
    {"kind": "identity", "source_layers": [2], "rank": 3},
    {"kind": "identity", "source_layers": [3], "rank": 0},
]


def mapper_of(layers, token_features=0, seed=0):
    """A mapper of a 4-layer source to a target of equal layers, random weights."""
    geometry = KVGeometry.from_dict({"layers": [[2, 8, 8, None]] * 4})
    target = {"layers": [None if spec is None else [2, 8, 8, None] for spec in layers]}
    sides = [{"name": "tiny", "geometry": g, "tokenizer": None} for g in (geometry.to_dict(), target)]
    config = KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=token_features)
    mapper, generator = KVMapper(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in mapper.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return mapper.eval()


def assert_same(mapper, other):
    states = mapper.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert tensor.dtype == states[1][key].dtype and torch.equal(tensor, states[1][key]), key


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_round_trip_of_every_kind(tmp_path, bits):
    mapper = mapper_of(EVERY_KIND, token_features=6)
    if bits:
        mapper = mapper.quantize(bits, 16)
    mapper.save_pretrained(tmp_path)
    again = KVMapper.from_pretrained(tmp_path)
    assert_same(mapper, again)
    assert again.digest() == mapper.digest()
    assert again.config.storage == (None if bits is None else {"bits": bits, "group_size": 16})
    assert again.config.native_layers == 0
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in saved.values()) == mapper.num_bytes()


@pytest.mark.parametrize("layers", [[{"kind": "identity", "source_layers": [3], "rank": 0}], [{"kind": "native"}]])
def test_round_trip_without_weights(tmp_path, layers):
    mapper = mapper_of(layers)
    assert (mapper.num_bytes(), mapper.dtype, mapper.device.type) == (0, torch.float32, "cpu")
    mapper.save_pretrained(tmp_path)
    again = KVMapper.from_pretrained(tmp_path)
    assert again.digest() == mapper.digest() and again.config.layers == layers
    assert again.quantize(4).num_bytes() == 0


def test_codes_stay_codes(tmp_path):
    mapper = mapper_of(EVERY_KIND).quantize(4)
    mapper.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        again = KVMapper.from_pretrained(tmp_path, dtype=dtype)
        assert again.layers[1].bias.dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)
        assert torch.equal(again.layers[1].weight.codes, mapper.layers[1].weight.codes)
        assert again.layers[1].weight.scales.dtype == torch.bfloat16
        assert again.digest() == mapper.digest() == again.to(torch.float32).digest()


def test_quantize_makes_another_mapper():
    mapper = mapper_of(EVERY_KIND)
    before = mapper.num_bytes(), mapper.digest()
    small = {bits: mapper.quantize(bits) for bits in (8, 4)}
    assert (mapper.num_bytes(), mapper.digest()) == before and mapper.config.storage is None
    assert before[0] > small[8].num_bytes() > small[4].num_bytes()
    assert len({before[1], small[8].digest(), small[4].digest()}) == 3
    assert small[8].evidence is None and not small[8].training and small[8].dtype == torch.float32
    features = [torch.rand(1, 5, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    with torch.no_grad():
        exact, *rounded = (m.layers[1](features) for m in (mapper, small[8], small[4]))
    errors = [(output - exact).norm() / exact.norm() for output in rounded]
    assert 0 < errors[0] < 0.01 and errors[0] < errors[1] < 0.1


def test_dequantize():
    small = mapper_of(EVERY_KIND).quantize(8)
    plain = small.dequantize(torch.bfloat16)
    assert plain.config.storage is None and plain.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.bfloat16 for tensor in plain.state_dict().values())
    assert_same(plain.dequantize(), plain)
    features = [torch.rand(1, 5, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    with torch.no_grad():
        assert torch.equal(small.layers[2](features), small.dequantize().layers[2](features))


@pytest.mark.parametrize("stored", [{"bits": 8}, {"bits": 4}, None])
def test_dense_weights_are_those_that_are_stored(stored, tmp_path):
    """Made once, anew where something has changed, and no part of what is saved, compared or copied."""
    mapper = mapper_of(EVERY_KIND) if stored is None else mapper_of(EVERY_KIND).quantize(**stored)
    cpu, dtype = torch.device("cpu"), torch.bfloat16 if stored is None else torch.float32
    digest, size = mapper.digest(), mapper.num_bytes()
    for layer_idx in mapper.config.mapped_layers:
        plain = mapper.layer_on(layer_idx, cpu, dtype)
        assert plain is mapper.layer_on(layer_idx, cpu, dtype)
        expected = mapper.dequantize(dtype).layers[layer_idx].state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())
    assert mapper.layer_on(1, cpu, torch.float64).bias.dtype == torch.float64
    assert (mapper.digest(), mapper.num_bytes()) == (digest, size)
    mapper.save_pretrained(tmp_path)
    assert KVMapper.from_pretrained(tmp_path).digest() == digest
    with torch.no_grad():
        mapper.layers[1].bias.add_(1)
    assert torch.equal(mapper.layer_on(1, cpu, dtype).bias, mapper.layers[1].bias.to(dtype))


def test_dense_weights_are_not_kept_where_they_are_not_wanted():
    mapper = mapper_of(EVERY_KIND).quantize(8)
    kept = weakref.ref(mapper.layer_on(1, torch.device("cpu"), torch.float32))
    mapper.keep_dense = False
    assert mapper.layer_on(1, torch.device("cpu"), torch.float32) is not kept()
    gc.collect()
    assert kept() is None


def test_what_cannot_be_quantised():
    mapper = mapper_of(EVERY_KIND)
    with pytest.raises(ValueError, match=r"`bits` must be one of \[4, 8\], got 2"):
        mapper.quantize(2)
    with pytest.raises(ValueError, match="have 8 bits: rounding them again"):
        mapper.quantize(8).quantize(4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.weight.codes"), "missing: layers.1.weight.codes"),
        (lambda tensors: tensors.pop("layers.4.feature_mean"), "missing: layers.4.feature_mean"),
        (
            lambda tensors: tensors.update({"layers.2.weight.codes": torch.ones(3, 2, dtype=torch.uint8)}),
            "another shape.*layers.2.weight.codes",
        ),
        (lambda tensors: tensors.update({"layers.1.weight": torch.ones(32, 64)}), "unknown: layers.1.weight"),
        (lambda tensors: tensors["layers.5.up.scales"].view(-1)[:1].fill_(torch.nan), "layers.5.up.scales.*NaN"),
    ],
)
def test_damaged_codes(tmp_path, damage, message):
    mapper_of(EVERY_KIND).quantize(4).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MapperFormatError, match=message):
        KVMapper.from_pretrained(tmp_path)


@pytest.mark.parametrize("storage", [{"bits": 3, "group_size": 64}, {"bits": 8}, 8, {"bits": 8, "group_size": "all"}])
def test_damaged_storage(tmp_path, storage):
    mapper_of(EVERY_KIND).quantize(8).save_pretrained(tmp_path)
    change_config(tmp_path, storage=storage)
    with pytest.raises(MapperFormatError, match="incomplete or damaged"):
        KVMapper.from_pretrained(tmp_path)


LINEAR, NATIVE = {"kind": "linear", "source_layers": [0]}, {"kind": "native"}


@pytest.mark.parametrize(
    ("layers", "native_layers"),
    [
        ([LINEAR, LINEAR], None),
        ([NATIVE, LINEAR], 0),
        ([None, NATIVE, None, NATIVE, LINEAR], 3),
        ([NATIVE, NATIVE], 1),
    ],
)
def test_native_layers(layers, native_layers):
    assert mapper_of(layers).config.native_layers == native_layers


@pytest.mark.parametrize("layers", [[LINEAR, NATIVE], [NATIVE, LINEAR, None, NATIVE]])
def test_native_layers_come_first(layers):
    with pytest.raises(MapperFormatError, match=r"leaves layers \[.*\] to the target.*be its first"):
        mapper_of(layers)


def test_native_layers_of_a_config_without_layers():
    assert KVMapperConfig().native_layers is None
