"""Moments and ridge against the same computed from all rows at once."""

import pytest
import torch

from hf_kvtransfer.fitting.moments import Moments
from hf_kvtransfer.fitting.ridge import Gaussian, fit_ridge


def gaussian(moments):
    return Gaussian(
        moments.mean(["a", "b"]),
        moments.mean(["y"]),
        moments.covariance_blocks(["a", "b"]),
        moments.covariance(["a", "b"], ["y"]),
        moments.variance(["y"]),
    )


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(500, 5, generator=generator) * 3 + 1000  # a mean that would cost float32 three digits
    b = torch.randn(500, 4, generator=generator)
    weight = torch.randn(9, 3, generator=generator)
    y = torch.cat([a, b], 1) @ weight + 7 + 0.1 * torch.randn(500, 3, generator=generator)
    return {"a": a, "b": b, "y": y}


@pytest.fixture(scope="module")
def moments(rows):
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("a", "y"), ("b", "y")]
    moments = Moments(pairs)
    for start in range(0, 500, 70):
        moments.add({name: block[start : start + 70] for name, block in rows.items()})
    return moments


def test_moments(rows, moments):
    x, y = torch.cat([rows["a"], rows["b"]], 1).double(), rows["y"].double()
    assert moments.count == 500
    assert moments.width(["a", "b"]) == 9
    torch.testing.assert_close(moments.mean(["a", "b"]), x.mean(0), rtol=1e-6, atol=1e-6)
    joint = torch.cov(torch.cat([x, y], 1).T, correction=0)
    torch.testing.assert_close(moments.covariance(["a", "b"], ["a", "b"]), joint[:9, :9], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        moments.covariance(["b", "a"], ["y"]), joint[[5, 6, 7, 8, 0, 1, 2, 3, 4], 9:], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(moments.variance(["y"]), joint.diagonal()[9:], rtol=1e-4, atol=1e-4)


def test_ridge_is_least_squares_and_knows_its_error(rows, moments):
    x, y = torch.cat([rows["a"], rows["b"]], 1).double(), rows["y"].double()
    fit = fit_ridge(gaussian(moments), gaussian(moments), [slice(0, 1), slice(1, 3)], [1e-10])
    exact = torch.linalg.lstsq(torch.cat([x, torch.ones(500, 1)], 1), y).solution
    torch.testing.assert_close(fit.weight, exact[:9], rtol=1e-3, atol=1e-3)
    residual = y - x @ fit.weight - fit.bias
    explained = 1 - residual[:, 1:].square().sum() / (y[:, 1:] - y[:, 1:].mean(0)).square().sum()
    assert fit.explained_variance[1] == pytest.approx(explained.item(), abs=1e-4)


def test_strength_is_chosen_on_held_out_rows(rows):
    generator = torch.Generator().manual_seed(1)
    noise = {"a": torch.randn(14, 5, generator=generator), "b": torch.randn(14, 4, generator=generator)}
    noise["y"] = torch.randn(14, 3, generator=generator)
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("a", "y"), ("b", "y")]
    few, many = Moments(pairs), Moments(pairs)
    few.add(noise)
    many.add({name: torch.randn(500, block.shape[1], generator=generator) for name, block in noise.items()})
    groups = [slice(0, 3)]
    fit = fit_ridge(gaussian(few), gaussian(many), groups, [1e2, 1e-2, 1e-8])
    # There is nothing to learn: the strongest penalty is the best on other rows, and none explains anything.
    assert fit.strengths == [1e2]
    assert fit.explained_variance[0] < 0.05


def test_constant_and_repeated_columns_do_no_harm():
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(60, 3, generator=generator)
    moments = Moments([("a", "a"), ("a", "b"), ("b", "b"), ("a", "y"), ("b", "y")])
    moments.add({"a": a, "b": torch.cat([a[:, :1], torch.full((60, 1), 5.0)], 1), "y": a[:, :1] * 2})
    fit = fit_ridge(gaussian(moments), gaussian(moments), [slice(0, 1)])
    assert torch.isfinite(fit.weight).all()
    assert fit.explained_variance[0] > 0.999
