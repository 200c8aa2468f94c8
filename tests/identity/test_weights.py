"""Which samples count as those of one tensor, at all magnitudes and between any two dtypes."""

import itertools

import pytest
import torch

from hf_kvtransfer.identity.tensors import StoredTensor
from hf_kvtransfer.identity.weights import NUM_SAMPLES, compare_samples, sample_tensors


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PAIRS = list(itertools.product(DTYPES, DTYPES))


def sample(tensors, dtype=None):
    return sample_tensors({name: StoredTensor(tensor.to(dtype)) for name, tensor in tensors.items()})


def tensors(values):
    return {f"weight.{i}": row.clone() for i, row in enumerate(values)}


def all_magnitudes():
    """float32 from far below what float16 can hold to far above, and what lies halfway between two roundings."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(300, 64, generator=generator) * 10 ** (torch.rand(300, 64, generator=generator) * 16 - 10)
    bfloat16 = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    halfway = bfloat16[bfloat16.isfinite()][: 63 * 1024].view(-1, 64)
    halfway = halfway * (
        1 + 2.0 ** -torch.arange(7, 12).repeat_interleave(halfway.shape[0] // 5 + 1)[: len(halfway), None]
    )
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504, 65519, 65520, 65536, 2**-24, 2**-25, 1e-7]
    )
    return tensors(random) | {f"halfway.{i}": row for i, row in enumerate(halfway)} | {"special": special}


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_roundings_of_one_tensor_agree(dtypes):
    values = all_magnitudes()
    first, second = (sample(values, dtype) for dtype in dtypes)
    assert list(compare_samples(first, second)) == []


@pytest.mark.parametrize("checkpoint", DTYPES[2:], ids=str)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_roundings_of_a_checkpoint_in_half_precision_agree(dtypes, checkpoint):
    values = {name: value.to(checkpoint) for name, value in all_magnitudes().items()}
    first, second = (sample(values, dtype) for dtype in dtypes)
    assert list(compare_samples(first, second)) == []


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 6e4])
def test_what_two_steps_of_the_coarser_dtype_change_is_seen(dtypes, magnitude):
    generator = torch.Generator().manual_seed(0)
    values = (1 + 0.08 * torch.rand(200, 64, generator=generator, dtype=torch.float64)) * magnitude
    step = 2 * max(torch.finfo(dtype).eps for dtype in dtypes)
    first, second = sample(tensors(values), dtypes[0]), sample(tensors(values * (1 - step)), dtypes[1])
    [(status, detail)] = compare_samples(first, second)
    assert (status, detail) == ("changed", "weight.0 and 199 others differ")


def test_values_near_zero_are_not_all_alike():
    ones = {"weight": torch.full((8, 8), 1e-4)}
    for dtypes in PAIRS:
        for other in (0.0, -1e-4, 2e-4):
            first, second = sample(ones, dtypes[0]), sample({"weight": torch.full((8, 8), other)}, dtypes[1])
            assert [status for status, _ in compare_samples(first, second)] == ["changed"]


def test_one_dtype_is_compared_bit_by_bit():
    values = torch.randn(1, 8, dtype=torch.float64)
    other = torch.nextafter(values, values + 1)
    assert list(compare_samples(sample(tensors(values), None), sample(tensors(other), None)))
    assert not list(compare_samples(sample(tensors(values), None), sample(tensors(other), None), tolerance=1e-5))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (NUM_SAMPLES,), (NUM_SAMPLES + 1,), (3, 5, 7)])
def test_shapes(shape):
    values = {"weight": torch.randn(shape)}
    assert not list(compare_samples(sample(values, None), sample(values, torch.bfloat16)))
    assert len(sample(values, None)["weight"].elements) == 4 * min(values["weight"].numel(), NUM_SAMPLES)


def test_places_follow_from_name_and_size_alone():
    values = torch.arange(60_000, dtype=torch.float32).view(200, 300)
    places = {}
    for name, value in (("a", values), ("a", values.view(300, 200)), ("a", values.clone()), ("b", values)):
        elements = sample({"other": torch.ones(5), name: value}, None)[name].elements
        taken = torch.frombuffer(bytearray(elements), dtype=torch.float32)
        places.setdefault(name, taken)
        assert torch.equal(taken, places[name])
        # One in each stretch.
        assert torch.equal(taken.long() * NUM_SAMPLES // values.numel(), torch.arange(NUM_SAMPLES))
    assert not torch.equal(places["a"], places["b"])
    # Artifacts hold samples: these places must stay.
    assert places["a"][:3].tolist() == [1585, 5406, 9074]


def test_a_tensor_that_is_not_contiguous():
    values = torch.randn(64, 32)
    assert sample({"weight": values.T}, None) == sample({"weight": values.T.contiguous()}, None)
