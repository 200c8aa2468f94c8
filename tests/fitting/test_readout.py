"""Readout calibration: it repairs values that it is shown to be wrong, and touches nothing else."""

import copy
import itertools

import pytest
import torch
from torch import nn

from hf_kvtransfer import CalibrationError, KVGeometry, KVMapper, KVMapperConfig, fit_mapper
from hf_kvtransfer.fitting.continuations import Continuations
from hf_kvtransfer.fitting.group_readouts import GroupReadouts
from hf_kvtransfer.fitting.readout import calibrate_readout
from hf_kvtransfer.fitting.written_out_attention import WrittenOutAttention

from ..tiny_models import identity_mapper, plant, random_ids, tiny_model
from ..tiny_tokenizers import SENTENCES


OPTIONS = {"continuation_length": 8, "continuations": 3, "held_out_every": 4}


def exact_mapper(model, specs):
    """The exact mapper of a model to itself, with layers of given kinds."""
    geometry = KVGeometry.from_model(model)
    side = {"name": "tiny", "geometry": geometry.to_dict(), "tokenizer": None}
    torch.manual_seed(0)
    mapper = KVMapper(KVMapperConfig(source=side, target=side, layers=specs))
    with torch.no_grad():
        for layer_map in mapper.layers:
            if hasattr(layer_map, "weight"):
                layer_map.weight.copy_(torch.eye(layer_map.weight.shape[-1]))
    return mapper.eval()


@torch.no_grad()
def damage_values(mapper, layers=range(4), seed=0):
    """A copy that mixes each head's values, and adds something to them."""
    generator = torch.Generator().manual_seed(seed)
    mapper = copy.deepcopy(mapper)
    for i in layers:
        layer, layer_map = mapper.target_geometry.layers[i], mapper.layers[i]
        for weight, bias in value_rows(layer_map, layer):
            mix = torch.eye(len(weight)) + 0.3 * torch.randn(len(weight), len(weight), generator=generator)
            weight.copy_(mix @ weight)
            bias.add_(0.3 * torch.randn(len(weight), generator=generator))
    return mapper


def value_rows(layer_map, layer):
    """Weight and bias of each KV head's values."""
    if layer_map.weight.dim() == 3:
        first = layer.key_head_dim
        return list(zip(layer_map.weight[:, first:], layer_map.bias[:, first:], strict=True))
    parts = (part[layer.widths[0] :].split(layer.value_head_dim) for part in (layer_map.weight, layer_map.bias))
    return list(zip(*parts, strict=True))


KINDS = {
    "linear": lambda i: {"kind": "linear", "source_layers": [i]},
    "head_matched": lambda i: {"kind": "head_matched", "source_layers": [i], "source_heads": [[0, 1]]},
    "residual_mlp": lambda i: {"kind": "residual_mlp", "source_layers": [i], "hidden_size": 4},
}


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma3", "linear"), ("llama", "head_matched"), ("qwen3", "residual_mlp")]
)
def test_repairs_damaged_values(family, kind):
    model = tiny_model(family)
    exact = exact_mapper(model, [KINDS[kind](i) for i in range(4)])
    damaged = damage_values(exact)
    before = damaged.digest()
    texts = list(random_ids(model, 16, 64, seed=1))
    mapper = calibrate_readout(damaged, model, model, texts, passes=4, **OPTIONS)
    assert damaged.digest() == before
    fit = mapper.config.fit["readout"]
    assert (fit["train_tokens"], fit["held_out_tokens"]) == (12 * 24, 4 * 24)
    for report in fit["layers"]:
        error = report["held_out_error"]
        assert error[0] > 0.05 and error[1] < 1e-3 * error[0]
        assert None not in report["ridge_strengths"]
    for i, layer in enumerate(mapper.target_geometry.layers):
        maps = [some.layers[i] for some in (mapper, damaged, exact)]
        (found, was, wanted) = ([weight for weight, _ in value_rows(layer_map, layer)] for layer_map in maps)
        for a, b, c in zip(found, was, wanted, strict=True):
            assert (a - c).norm() < 0.2 * (b - c).norm()
        keys = [
            part[..., : layer.key_head_dim if part.dim() == 3 else layer.widths[0], :]
            for part in (layer_map.weight for layer_map in maps)
        ]
        assert torch.equal(keys[0], keys[1])


@pytest.mark.parametrize("kind", ["linear", "head_matched"])
def test_what_values_take_from_tokens_before_is_repaired(kind):
    model = tiny_model("llama")
    target, texts = plant(model), list(random_ids(model, 80, 64, seed=1))
    options = {"kind": kind, "previous_tokens": 1, "num_source_layers": 1, "dtype": torch.float32}
    damaged = fit_mapper(model, target, texts, **options)
    generator = torch.Generator().manual_seed(0)
    for i in damaged.config.mapped_layers:
        for weight, _ in value_rows(damaged.layers[i], damaged.target_geometry.layers[i]):
            weight[:, -64:] += 0.3 * torch.randn(len(weight), 64, generator=generator)
    found = calibrate_readout(damaged, model, target, texts, **OPTIONS)
    for report in found.config.fit["readout"]["layers"][1:]:
        before, after = report["held_out_error"]
        assert before > 0.05 and after < 0.1 * before
    assert found.config.layers == damaged.config.layers


def test_later_layers_see_the_earlier_ones_corrected():
    model = tiny_model("llama")
    damaged = damage_values(identity_mapper(model))
    texts = list(random_ids(model, 16, 64, seed=1))
    found = {
        passes: calibrate_readout(damaged, model, model, texts, passes=passes, **OPTIONS).config.fit["readout"]
        for passes in (1, 2, 9)  # never more than there are layers
    }
    errors = {passes: [layer["held_out_error"][1] for layer in fit["layers"]] for passes, fit in found.items()}
    assert errors[1][0] == pytest.approx(errors[9][0])
    # What is left are keys and queries that come from damaged states: nothing, if those were corrected before.
    assert errors[9][3] < 0.1 * errors[2][3] < 0.1 * errors[1][3]


def test_held_out_error_never_rises():
    """Noise to learn from, and hardly any of it: every strength does harm somewhere."""
    source, target = tiny_model("llama"), tiny_model("qwen3", seed=3)
    texts = list(random_ids(source, 40, 40, seed=1))
    mapper = fit_mapper(source, target, texts * 4, num_source_layers=1, native_layers=None)
    assert mapper.dtype == torch.bfloat16
    found = calibrate_readout(mapper, source, target, texts[:2], **OPTIONS | {"held_out_every": 2})
    reports = found.config.fit["readout"]["layers"]
    assert all(after <= before for before, after in (report["held_out_error"] for report in reports))
    assert found.dtype == torch.bfloat16 and found.evidence is None
    assert found.config.fit["layers"] == mapper.config.fit["layers"]

    same = calibrate_readout(mapper, source, target, texts[:2], ridge_strengths=(), **OPTIONS | {"held_out_every": 2})
    assert same.digest() == mapper.digest()
    reports = same.config.fit["readout"]["layers"]
    assert all(len(set(report["held_out_error"])) == 1 for report in reports)
    assert all(report["ridge_strengths"] == [None, None] for report in reports)


def test_other_kinds_stay_as_they_are():
    model = tiny_model("llama")
    specs = [
        {"kind": "native"},
        {"kind": "identity", "source_layers": [1], "rank": 0},
        {"kind": "linear", "source_layers": [2]},
        {"kind": "low_rank", "source_layers": [3], "rank": 64},
    ]
    mapper = exact_mapper(model, specs)
    nn.init.normal_(mapper.layers[3].up, std=0.1)
    damaged = damage_values(mapper, layers=[2])
    found = calibrate_readout(damaged, model, model, list(random_ids(model, 24, 64, seed=1)), **OPTIONS)
    reports = found.config.fit["readout"]["layers"]
    assert [report.get("skipped") for report in reports] == [
        "kind 'native'",
        "kind 'identity'",
        None,
        "kind 'low_rank'",
    ]
    assert reports[2]["held_out_error"][1] < 1e-3 * reports[2]["held_out_error"][0]
    for a, b in zip(found.layers[3].parameters(), damaged.layers[3].parameters(), strict=True):
        assert torch.equal(a, b)

    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate_readout(exact_mapper(model, [specs[1] | {"source_layers": [i]} for i in range(4)]), model, model, [])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layer_idx", [1, 2])
@torch.no_grad()
def test_sums_are_those_of_written_out_attention(family, layer_idx):
    """Rows of different lengths, windows, and two query heads for each KV head."""
    model = tiny_model(family)
    # Up to the damaged layer everything is exact, so that attention weights are those of one forward pass.
    mapper = damage_values(identity_mapper(model), layers=[layer_idx])
    layer, layer_map = mapper.target_geometry.layers[layer_idx], mapper.layers[layer_idx]
    ids, starts, length = random_ids(model, 1, 90, seed=3), torch.tensor([10, 37, 80]), 9
    reader = Continuations(mapper, model, model, None, None, length=length, count=3)
    with WrittenOutAttention(model) as attention:
        readouts = GroupReadouts(reader, attention, {layer_idx: layer})
        readouts.add(ids[0], starts, held_out=False)
        readouts.add(ids[0], starts, held_out=True)

    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True, use_cache=True)
    weights = output.attentions[layer_idx][0]
    text = reader.read(ids[0], starts)
    features = text.source_kv.features[layer_idx]
    values = [layer.split_heads(states)[1][0] for states in (features, layer_map([features]))]
    for j, sums in enumerate(readouts._sums[layer_idx]):
        smoothed, residual, native = [], [], []
        centred = (features[0] - sums.mean) / sums.scale
        for start, head in itertools.product(starts.tolist(), (2 * j, 2 * j + 1)):
            rows = weights[head, start : start + length]
            context = rows[:, 4:start]
            smoothed.append(torch.cat([context @ centred[4:start], context.sum(1, keepdim=True)], 1))
            residual.append(context @ (values[0][j] - values[1][j])[4:start])
            native.append(rows @ values[0][j])
        smoothed, residual, native = (torch.cat(parts).double() for parts in (smoothed, residual, native))
        for moments in (sums.train, sums.held_out):
            assert moments.count == len(smoothed)
            for a, x in (("features", smoothed), ("residual", residual), ("native", native)):
                torch.testing.assert_close(moments.mean([a]), x.mean(0), atol=1e-5, rtol=1e-3)
            for b, y in (("features", smoothed), ("residual", residual)):
                expected = smoothed.T @ y / len(y)
                found = moments.covariance(["features"], [b]) + torch.outer(
                    moments.mean(["features"]), moments.mean([b])
                )
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
            size = moments.variance(["native"]) + moments.mean(["native"]).square()
            torch.testing.assert_close(size, native.square().mean(0), atol=1e-4, rtol=1e-3)


def test_two_tokenizers(tokenizers):
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    words = [word for sentence in SENTENCES[:1] for word in sentence.split()]
    generator = torch.Generator().manual_seed(0)
    texts = [
        " ".join(words[i] for i in torch.randint(len(words), (30,), generator=generator).tolist()) for _ in range(30)
    ]
    names = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": tokenizers["unigram"]}
    mapper = fit_mapper(source, target, texts, **names, num_source_layers=1, dtype=torch.float32, max_length=90)
    found = calibrate_readout(mapper, source, target, texts, **names, **OPTIONS, max_length=61, passes=1)
    assert target.config._attn_implementation != "hf_kvtransfer_written_out"
    assert target.lm_head.out_features == 400
    reports = found.config.fit["readout"]["layers"]
    assert reports[0] == {"skipped": "kind 'native'"}  # the depth dial
    errors = [report["held_out_error"] for report in reports[1:]]
    assert all(after <= before for before, after in errors)
    assert any(after < before for before, after in errors)


def test_bad_arguments_and_texts():
    model = tiny_model("llama")
    mapper = identity_mapper(model)
    with pytest.raises(ValueError, match="`passes` must be positive, got 0"):
        calibrate_readout(mapper, model, model, [], passes=0)
    with pytest.raises(CalibrationError, match="0 of the `texts` have at least 13 tokens"):
        calibrate_readout(mapper, model, model, list(random_ids(model, 9, 12)), **OPTIONS)
    overflowing = plant(model)
    overflowing.model.embed_tokens.weight.data[399] = torch.inf
    texts = random_ids(model, 8, 60)
    texts[2, 5] = 399
    with pytest.raises(CalibrationError, match="target layer 0 hold NaN or Inf"):
        calibrate_readout(mapper, model, overflowing, list(texts), **OPTIONS)
    assert overflowing.config._attn_implementation == model.config._attn_implementation
