"""Every kind of layer map against its formula, written out token by token."""

import copy

import pytest
import torch
from torch.nn.functional import silu

from hf_kvtransfer import KVGeometry, MapperFormatError
from hf_kvtransfer.geometry import LayerGeometry
from hf_kvtransfer.maps import build_layer_map


# Heads, widths and layers all differ, so that no mix-up goes unseen.
SOURCE = KVGeometry((LayerGeometry(3, 4, 5), None, LayerGeometry(2, 6, 3), LayerGeometry(2, 5, 7)))
TARGET = KVGeometry((LayerGeometry(2, 5, 7, 16),))
TOKEN_FEATURES = 9
HEADS = [[2, 1], [0, 1]]
SPECS = {
    "linear": {"kind": "linear", "source_layers": [2, 0]},
    "head_matched": {"kind": "head_matched", "source_layers": [0, 2], "source_heads": HEADS},
    "low_rank": {"kind": "low_rank", "source_layers": [2, 0], "rank": 3},
    "residual_mlp": {"kind": "residual_mlp", "source_layers": [2, 0], "hidden_size": 6},
    "identity": {"kind": "identity", "source_layers": [3], "rank": 2},
    "unchanged": {"kind": "identity", "source_layers": [3], "rank": 0},
}
ABLE = [name for name in SPECS if name != "unchanged"]


def build(spec, token_features=0, **options):
    return build_layer_map(spec, 0, SOURCE, TARGET, token_features, **options)


def random_map(name, token_features, seed=0, **fields):
    """A map of a kind with every weight random, as after a fit."""
    generator = torch.Generator().manual_seed(seed)
    layer_map = build(SPECS[name] | fields, token_features)
    with torch.no_grad():
        for tensor in layer_map.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
        if name == "residual_mlp":
            layer_map.feature_scale.abs_().add_(0.5)
    return layer_map


def inputs(layer_map, token_features, indexed, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(2, 8, SOURCE.num_features(i), generator=generator) for i in layer_map.source_layers]
    index = torch.randint(0, 8, (2, 11), generator=generator) if indexed else None
    tokens = torch.randn(2, 11 if indexed else 8, token_features, generator=generator) if token_features else None
    return [s.to(dtype) for s in states], tokens, index


def written_out(name, layer_map, states, tokens, index):
    """The keys and values of one target token, from the states of the source token that speaks for it."""
    spec, w = SPECS[name], {key: tensor.float() for key, tensor in layer_map.state_dict().items()}
    if name in ("identity", "unchanged"):
        (x,) = states
        return x if name == "unchanged" else x + w["up"] @ (w["down"] @ x) + w["bias"]
    if name == "head_matched":
        keys, values = [], []
        for head in range(2):
            x = []
            for state, i, heads in zip(states, spec["source_layers"], HEADS, strict=True):
                layer, j = SOURCE.layers[i], heads[head]
                first_value = layer.num_key_value_heads * layer.key_head_dim
                x.append(state[j * layer.key_head_dim : (j + 1) * layer.key_head_dim])
                x.append(state[first_value + j * layer.value_head_dim :][: layer.value_head_dim])
            output = w["weight"][head] @ torch.cat(x + tokens) + w["bias"][head]
            keys.append(output[:5])
            values.append(output[5:])
        return torch.cat(keys + values)
    x = torch.cat(states + tokens)
    if name == "low_rank":
        return w["bias"] + w["up"] @ (w["down"] @ x)
    output = w["weight"] @ x + w["bias"]
    if name == "residual_mlp":
        hidden = w["down"] @ ((x - w["feature_mean"]) / w["feature_scale"]) + w["down_bias"]
        output = output + w["up"] @ silu(hidden)
    return output


def expected(name, layer_map, states, tokens, index):
    index = torch.arange(8).repeat(2, 1) if index is None else index
    rows = [
        torch.stack(
            [
                written_out(
                    name,
                    layer_map,
                    [s[row, column] for s in states],
                    [] if tokens is None else [tokens[row, target]],
                    index,
                )
                for target, column in enumerate(columns.tolist())
            ]
        )
        for row, columns in enumerate(index)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("token_features", [0, TOKEN_FEATURES])
@pytest.mark.parametrize("name", SPECS)
def test_formula(name, token_features, indexed):
    layer_map = random_map(name, token_features)
    assert layer_map.source_layers == tuple(SPECS[name]["source_layers"])
    states, tokens, index = inputs(layer_map, token_features, indexed)
    untouched = [s.clone() for s in states]
    with torch.no_grad():
        found = layer_map(states, tokens, index)
    assert torch.allclose(found, expected(name, layer_map, states, tokens, index), atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(states, untouched, strict=True))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_distinct_tokens(name, indexed):
    """Features of distinct tokens and each token's row of them are as good as the features of each token."""
    layer_map = random_map(name, TOKEN_FEATURES)
    states, tokens, index = inputs(layer_map, TOKEN_FEATURES, indexed)
    rows = torch.arange(tokens.shape[0] * tokens.shape[1]).view(tokens.shape[:2]) * 3 % 5
    distinct = tokens[0, :5]
    actual = layer_map(states, distinct, index, rows[None])
    torch.testing.assert_close(actual, layer_map(states, distinct[rows], index))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("name", [name for name in ABLE if name != "identity"])
def test_tokens_before(name, indexed):
    """They are further token features, and rows of distinct ones are as good as the features themselves."""
    layer_map = random_map(name, TOKEN_FEATURES, previous_tokens=2)
    assert layer_map.previous_tokens == 2
    states, tokens, index = inputs(layer_map, 3 * TOKEN_FEATURES, indexed)
    expected_states = expected(name, layer_map, states, tokens, index)
    torch.testing.assert_close(layer_map(states, tokens, index), expected_states, rtol=1e-4, atol=1e-4)
    distinct = torch.randn(7, TOKEN_FEATURES, generator=torch.Generator().manual_seed(2))
    rows = torch.arange(3 * tokens.shape[0] * tokens.shape[1]).view(3, *tokens.shape[:2]) ** 2 % 7
    side_by_side = torch.cat([distinct[index_of_token] for index_of_token in rows], -1)
    actual = layer_map(states, distinct, index, rows)
    torch.testing.assert_close(actual, layer_map(states, side_by_side, index), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "token_features", "previous_tokens", "message"),
    [
        ("linear", 0, 1, "the mapper has none"),
        ("low_rank", TOKEN_FEATURES, 0, "an integer of 1 or more"),
        ("head_matched", TOKEN_FEATURES, "2", "an integer of 1 or more"),
        ("residual_mlp", TOKEN_FEATURES, True, "an integer of 1 or more"),
        ("identity", TOKEN_FEATURES, 1, "unknown fields .'previous_tokens'."),
    ],
)
def test_impossible_tokens_before_are_refused(name, token_features, previous_tokens, message):
    with pytest.raises(MapperFormatError, match=message):
        build(SPECS[name] | {"previous_tokens": previous_tokens}, token_features)


@pytest.mark.parametrize("name", SPECS)
def test_a_range_of_tokens(name):
    """Of a batch, where it is no contiguous piece of memory."""
    layer_map = random_map(name, 0)
    states, _, _ = inputs(layer_map, 0, False)
    ranges = [part[:, 2:6] for part in states]
    index = torch.tensor([[0, 1, 1, 3], [3, 2, 0, 0]])
    torch.testing.assert_close(layer_map(ranges), layer_map([part.contiguous() for part in ranges]))
    copies = layer_map([part.contiguous() for part in ranges], None, index)
    torch.testing.assert_close(layer_map(ranges, None, index), copies)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_features(name, indexed):
    layer_map = random_map(name, TOKEN_FEATURES)
    states, tokens, index = inputs(layer_map, TOKEN_FEATURES, indexed, dtype=torch.bfloat16)
    with torch.no_grad():
        found = layer_map(states, tokens, index)
    assert found.dtype == torch.bfloat16
    reference = expected(name, layer_map, [s.float() for s in states], tokens, index)
    assert (found - reference).abs().mean() < 0.02 * reference.abs().mean()


@pytest.mark.parametrize("name", ABLE)
def test_gradients_reach_weights_and_features(name):
    layer_map = random_map(name, TOKEN_FEATURES).double()
    states, tokens, index = inputs(layer_map, TOKEN_FEATURES, True, dtype=torch.float64)
    states, tokens = [s[:1, :3].requires_grad_() for s in states], tokens[:1, :4].double().requires_grad_()
    index = index[:1, :4] % 3
    names, weights = zip(*layer_map.named_parameters(), strict=True)

    def run(*tensors):
        parameters = dict(zip(names, tensors[: len(names)], strict=True))
        rest = tensors[len(names) :]
        return torch.func.functional_call(layer_map, parameters, (rest[:-1], rest[-1], index))

    assert torch.autograd.gradcheck(run, (*weights, *states, tokens), fast_mode=True)
    run(*weights, *states, tokens).square().sum().backward()
    assert all(tensor.grad.abs().sum() > 0 for tensor in (*weights, *states))


@pytest.mark.parametrize("name", ["identity", "low_rank", "residual_mlp"])
def test_a_new_map_adds_nothing_but_learns(name):
    layer_map = build(SPECS[name])
    states, _, index = inputs(layer_map, 0, True)
    output = layer_map(states, None, index)
    start = states[0][torch.arange(2)[:, None], index] if name == "identity" else torch.zeros_like(output)
    assert torch.equal(output, start)
    output.sum().backward()
    assert layer_map.up.grad.abs().sum() > 0


def test_the_identity_copies_nothing_and_has_no_weights():
    layer_map = build(SPECS["unchanged"], TOKEN_FEATURES)
    states, tokens, _ = inputs(layer_map, TOKEN_FEATURES, False)
    assert layer_map(states, tokens) is states[0]
    assert not layer_map.state_dict()


def test_head_matching_divides_the_weights_by_the_heads():
    sides = KVGeometry((LayerGeometry(8, 16, 16),))
    matched = {"kind": "head_matched", "source_layers": [0], "source_heads": [list(range(8))]}
    linear = {"kind": "linear", "source_layers": [0]}
    sizes = [build_layer_map(spec, 0, sides, sides, 0).weight.numel() for spec in (matched, linear)]
    assert sizes[1] == 8 * sizes[0]


def test_a_large_mean_does_not_drown_the_mlp_in_bfloat16():
    layer_map = random_map("residual_mlp", 0)
    with torch.no_grad():
        layer_map.weight.zero_()
        layer_map.feature_mean.fill_(256.0)
        layer_map.feature_scale.fill_(4.0)
    states, _, _ = inputs(layer_map, 0, False)
    states = [(256 + 4 * s).bfloat16() for s in states]
    reference = expected("residual_mlp", layer_map, [s.float() for s in states], None, None)
    assert (layer_map(states) - reference).abs().mean() < 0.03 * reference.abs().mean()


def test_the_native_placeholder_computes_nothing():
    layer_map = build({"kind": "native"}, TOKEN_FEATURES)
    assert layer_map.source_layers == () and not layer_map.state_dict()
    with pytest.raises(NotImplementedError, match="A NativeLayer has nothing to apply"):
        layer_map([], None, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("linear", {"kind": "quadratic"}, "of kind 'quadratic', this version knows"),
        ("linear", {"source_layers": [1]}, r"reads source layers \[1\]"),
        ("linear", {"source_layers": []}, r"reads source layers \[\]"),
        ("linear", {"source_layers": 2}, "reads source layers 2"),
        ("linear", {"rank": 2}, r"kind 'linear', cannot be built: unknown fields \['rank'\]"),
        ("low_rank", {"rank": 0}, "`rank` must be an integer of 1 or more, got 0"),
        ("low_rank", {"rank": True}, "`rank` must be an integer of 1 or more, got True"),
        ("low_rank", {"rank": None}, "no 'rank'"),
        ("residual_mlp", {"hidden_size": 2.0}, "`hidden_size` must be an integer of 1 or more, got 2.0"),
        ("identity", {"rank": -1}, "`rank` must be an integer of 0 or more, got -1"),
        ("identity", {"source_layers": [3, 3]}, r"reads one source layer, not \[3, 3\]"),
        ("identity", {"source_layers": [0]}, "source layer has 3, 4, 5 and the target layer 2, 5, 7"),
        ("head_matched", {"source_heads": None}, "no 'source_heads'"),
        ("head_matched", {"source_heads": 5}, "cannot be built"),
        ("head_matched", {"source_heads": [[0, 1]]}, "entries for 1 source layers, there are 2"),
        ("head_matched", {"source_heads": [[0, 1], [0]]}, r"source layer 2 are \[0\], but 2 KV heads"),
        ("head_matched", {"source_heads": [[0, 3], [0, 1]]}, r"source layer 0 are \[0, 3\].*one of its 3 each"),
        ("head_matched", {"source_heads": [[0, -1], [0, 1]]}, r"source layer 0 are \[0, -1\]"),
    ],
)
def test_bad_specs(name, changes, message):
    spec = {key: value for key, value in (copy.deepcopy(SPECS[name]) | changes).items() if value is not None}
    with pytest.raises(MapperFormatError, match=f"Layer 0 of the mapper.*{message}"):
        build(spec)
