"""Least squares block by block against the same solved at once."""

import pytest
import torch

from hf_kvtransfer.fitting.forward_selection import RANKING_STRENGTH, Correlations, ForwardSelection
from hf_kvtransfer.fitting.ridge import Gaussian, fit_ridge
from hf_kvtransfer.fitting.symmetric import SymmetricBlocks


def gaussian(x, y):
    return Gaussian(
        x.mean(0),
        y.mean(0),
        SymmetricBlocks.of(torch.cov(x.T, correction=0)),
        ((x - x.mean(0)).T @ (y - y.mean(0))) / len(x),
        y.var(0, correction=0),
    )


@pytest.fixture(scope="module")
def moments():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    both = []
    for rows, shift in ((400, 0.0), (150, 0.3)):  # held-out rows have other means
        x = torch.randn(rows, 12, generator=generator, dtype=torch.float64) @ mixing + shift
        noise = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        both.append(gaussian(x, (x * x.sign()) @ weight + 3 * noise + shift))
    return both


def test_each_step_is_the_ridge_solution(moments):
    train, held_out = moments
    selection = ForwardSelection(Correlations.of(train, held_out), torch.tensor([0, 2]))
    targets = torch.tensor([0, 2])
    blocks = [torch.tensor([4, 5, 6]), torch.tensor([0, 9]), torch.tensor([1, 2, 3, 11]), torch.tensor([7])]
    taken = torch.zeros(0, dtype=torch.long)
    while blocks:
        promised = selection.residuals_with(blocks)
        for block, residual in zip(blocks, promised, strict=True):
            columns = torch.cat([taken, block])
            fit = fit_ridge(
                train.select(columns, targets),
                held_out.select(columns, targets),
                [slice(0, 1), slice(1, 2)],
                [RANKING_STRENGTH],
            )
            found = 1 - residual / held_out.var_y[targets]
            torch.testing.assert_close(found, torch.tensor(fit.explained_variance, dtype=torch.float64))
        block = blocks.pop(1 if len(blocks) > 1 else 0)
        selection.take(block)
        taken = torch.cat([taken, block])
    torch.testing.assert_close(selection.residual, promised[0])


def test_a_copy_of_what_is_taken_adds_nothing(moments):
    twice, targets = torch.arange(6).repeat(2), torch.arange(3)
    selection = ForwardSelection(Correlations.of(*(part.select(twice, targets) for part in moments)), targets)
    selection.take(torch.arange(6))
    copied = selection.residuals_with([torch.arange(6, 12)])[0]
    torch.testing.assert_close(copied, selection.residual, rtol=1e-2, atol=0)
