"""Ridge regression from moments: the strength chosen, and the error measured, on held-out rows."""

import dataclasses
from collections.abc import Sequence

import torch

from .symmetric import SymmetricBlocks


# Relative to the mean eigenvalue of the standardised features' covariance, which is 1.
RIDGE_STRENGTHS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """
    Mean and covariance of features and targets.

    Args:
        mean_x (`torch.Tensor`), mean_y (`torch.Tensor`):
            `[features]` and `[targets]`, float64.
        cov_xx ([`SymmetricBlocks`]):
            Of `features`, the only part of which memory grows with the square.
        cov_xy (`torch.Tensor`):
            `[features, targets]`.
        var_y (`torch.Tensor`):
            `[targets]`.
    """

    mean_x: torch.Tensor
    mean_y: torch.Tensor
    cov_xx: SymmetricBlocks
    cov_xy: torch.Tensor
    var_y: torch.Tensor

    def feature_scale(self) -> torch.Tensor:
        """Standard deviation of the features; 1 for a constant one, which so gets no weight, and no error."""
        scale = self.cov_xx.diagonal().clamp(min=0).sqrt()
        return torch.where(scale > 0, scale, torch.ones_like(scale))

    def select(self, features: torch.Tensor, targets: torch.Tensor) -> "Gaussian":
        """The same for some of the features and of the targets, by their columns."""
        return Gaussian(
            self.mean_x[features],
            self.mean_y[targets],
            self.cov_xx.select(features),
            self.cov_xy[features][:, targets],
            self.var_y[targets],
        )

    def less_features(self) -> "Gaussian":
        """For targets as wide as the features: the same for the targets less the features."""
        variance = self.var_y - 2 * self.cov_xy.diagonal() + self.cov_xx.diagonal()
        return dataclasses.replace(
            self,
            mean_y=self.mean_y - self.mean_x,
            cov_xy=self.cov_xy - self.cov_xx.dense(),
            var_y=variance.clamp(min=0),
        )

    def explained_variance(self, weight: torch.Tensor, bias: torch.Tensor, columns: slice) -> float:
        """
        Share of the targets' variance that an affine map explains on these rows, over a range of columns.

        Args:
            weight (`torch.Tensor`), bias (`torch.Tensor`):
                `[features, columns]` and `[columns]`.
            columns (`slice`):
                The targets that the map predicts.
        """
        offset = self.mean_y[columns] - self.mean_x @ weight - bias
        residual = self.var_y[columns] - 2 * (weight * self.cov_xy[:, columns]).sum(0) + offset.square()
        for rows, product in self.cov_xx.times(weight):
            residual += (weight[rows] * product).sum(0)
        return 1 - (residual.sum() / self.var_y[columns].sum().clamp(min=torch.finfo(torch.float64).tiny)).item()


@dataclasses.dataclass(frozen=True)
class RidgeFit:
    """
    An affine map for each group of target columns, side by side.

    Args:
        weight (`torch.Tensor`), bias (`torch.Tensor`):
            `[features, targets]` and `[targets]`, float64.
        strengths (`list[float]`), explained_variance (`list[float]`):
            For each group the strength chosen, and the share of variance explained on held-out rows.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    strengths: list[float]
    explained_variance: list[float]


def fit_ridge(
    train: Gaussian, held_out: Gaussian, groups: Sequence[slice], strengths: Sequence[float] = RIDGE_STRENGTHS
) -> RidgeFit:
    """
    Least squares with a penalty on the weights of standardised features, `W = (X'X + s I)^-1 X'Y`.

    Args:
        train (`Gaussian`):
            Moments that the weights are solved from.
        held_out (`Gaussian`):
            Moments that choose the strength.
        groups (`Sequence[slice]`):
            Ranges of target columns, one after another, that each get a strength of their own.
        strengths (`Sequence[float]`, *optional*):
            Candidates, from the strongest down.

    Raises:
        `torch.linalg.LinAlgError`: no strength makes the features' covariance positive definite.
    """
    scale = train.feature_scale()
    right = train.cov_xy / scale[:, None]
    best: list[tuple[float, float, torch.Tensor, torch.Tensor] | None] = [None] * len(groups)
    for strength in strengths:
        factor = train.cov_xx.cholesky(scale, strength)
        if factor is None:
            continue
        solution = factor.solve(right).div_(scale[:, None])
        del factor  # the next one takes its place
        better = False
        for i, columns in enumerate(groups):
            weight = solution[:, columns]
            bias = train.mean_y[columns] - train.mean_x @ weight
            explained = held_out.explained_variance(weight, bias, columns)
            if best[i] is None or explained > best[i][0]:
                best[i] = explained, strength, weight, bias
                better = True
        if not better:  # the error falls, then rises with the strength
            break
    if None in best:
        raise torch.linalg.LinAlgError("The features' covariance is not positive definite at any ridge strength.")
    scores, chosen, weights, biases = (list(column) for column in zip(*best, strict=True))
    return RidgeFit(torch.cat(weights, 1), torch.cat(biases), chosen, scores)
