import pytest
import torch

from hf_kvtransfer.maps import build_layer_map
from hf_kvtransfer.maps.storage import QuantizedWeight, dense, dequantized, num_bytes, quantized

from .test_kinds import ABLE, SOURCE, SPECS, TARGET, TOKEN_FEATURES, expected, inputs, random_map


SHAPES = [(6, 128), (5, 100), (7, 3), (1, 1), (3, 5, 65)]


def random_weight(shape, seed=0):
    """Columns of very different scale, one of nothing, as the features of a cache have them."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp(2 * torch.randn(shape[-1], generator=generator))
    weight = torch.randn(shape, generator=generator) * columns
    if shape[-1] > 1:
        weight[..., 1] = 0
    return weight


def step(weight, bits, group_size):
    """Distance of two codes, in the weight's units: half of it is the largest error."""
    norms = weight.norm(dim=-2, keepdim=True)
    norms = torch.where(norms == 0, torch.ones(()), norms)
    largest = torch.cat(
        [g.abs().amax(-1, keepdim=True).expand(g.shape) for g in (weight / norms).split(group_size, -1)], -1
    )
    return largest * norms / (127 if bits == 8 else 7)


@pytest.mark.parametrize("group_size", [64, 7])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_weight_is_off_by_more_than_half_a_step(shape, bits, group_size):
    weight = random_weight(shape)
    stored = QuantizedWeight.from_dense(weight, bits, group_size)
    error = (stored.dense(torch.float32) - weight).abs()
    # The rounding of norm and scale to bfloat16 makes a step larger by less than a percent.
    assert (error <= 0.505 * step(weight, bits, group_size) + 1e-12).all()


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), (4, 0.13)])
def test_error_of_a_whole_matrix(bits, bound):
    weight = random_weight((64, 256))
    error = QuantizedWeight.from_dense(weight, bits, 64).dense(torch.float32) - weight
    assert error.norm() < bound * weight.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_size(shape):
    weight = random_weight(shape)
    groups = weight.numel() // shape[-1] * -(-shape[-1] // 64)
    others = 2 * groups + 2 * weight.numel() // shape[-2]
    assert num_bytes(QuantizedWeight.from_dense(weight, 8, 64)) == weight.numel() + others
    assert num_bytes(QuantizedWeight.from_dense(weight, 4, 64)) == (weight.numel() + 1) // 2 + others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dense_dtype(dtype):
    stored = QuantizedWeight.from_dense(random_weight((6, 100)), 4, 32)
    assert stored.dense(dtype).dtype == dtype
    assert torch.equal(stored.dense(dtype), stored.dense(torch.float64).to(dtype)) or dtype == torch.bfloat16
    # A module's `to` changes what its numbers are kept as, not what they say, and never the codes.
    assert torch.equal(stored.to(torch.float32).dense(torch.float32), stored.dense(torch.float32))
    assert stored.codes.dtype == torch.uint8


def test_nothing_stays_nothing():
    assert not QuantizedWeight.from_dense(torch.zeros(4, 70), 4, 64).dense(torch.float32).any()
    assert not QuantizedWeight((4, 70), 4, 64).dense(torch.float32).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_scales(bad):
    weight = torch.ones(4, 70)
    weight[1, 2] = bad
    assert not QuantizedWeight.from_dense(weight, 8, 64).scales.isfinite().all()


@pytest.mark.parametrize(
    ("bits", "group_size", "message"),
    [(3, 64, r"`bits` must be one of \[4, 8\], got 3"), (8, 0, "`group_size`.*got 0"), (8, 6.4, "`group_size`.*6.4")],
)
def test_bad_arguments(bits, group_size, message):
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.from_dense(torch.ones(2, 2), bits, group_size)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ABLE)
def test_a_quantised_map_is_the_map_of_its_rounded_weights(name, bits):
    layer_map = random_map(name, TOKEN_FEATURES)
    small = quantized(layer_map, bits, 16)
    matrices = [key for key, tensor in layer_map.state_dict().items() if tensor.dim() > 1 and key != "bias"]
    assert matrices and all(isinstance(getattr(small, key), QuantizedWeight) for key in matrices)
    assert all(not isinstance(getattr(layer_map, key), QuantizedWeight) for key in matrices)
    states, tokens, index = inputs(layer_map, TOKEN_FEATURES, True)
    again = dequantized(small, torch.float32)
    with torch.no_grad():
        found = small(states, tokens, index)
        assert torch.equal(found, again(states, tokens, index))
    assert torch.allclose(found, expected(name, again, states, tokens, index), atol=1e-4)
    original = expected(name, layer_map, states, tokens, index)
    assert 0 < (found - original).norm() < (0.02 if bits == 8 else 0.3) * original.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SPECS)
def test_room_for_the_codes(name, bits):
    """What a config describes has the tensors, shapes and types of what was quantised."""
    stored = quantized(random_map(name, TOKEN_FEATURES), bits, 16)
    with torch.device("meta"):
        reserved = build_layer_map(SPECS[name], 0, SOURCE, TARGET, TOKEN_FEATURES, {"bits": bits, "group_size": 16})
    kinds = [{key: (t.shape, t.dtype) for key, t in m.state_dict().items()} for m in (stored, reserved)]
    assert kinds[0] == kinds[1]
    assert num_bytes(reserved) == num_bytes(stored)


def test_gradients_pass_through_a_quantised_map():
    layer_map = quantized(random_map("residual_mlp", 0), 8, 64)
    states, _, _ = inputs(layer_map, 0, False)
    states[0].requires_grad_()
    layer_map(states).sum().backward()
    assert states[0].grad.abs().sum() > 0 and layer_map.bias.grad is not None


def test_a_plain_weight_is_dense():
    weight = torch.ones(2, 3)
    assert dense(weight, torch.float32) is weight
