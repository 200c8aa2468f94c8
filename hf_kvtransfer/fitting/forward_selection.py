"""Which block of features to take next: least squares that grows block by block, judged on held-out rows."""

import dataclasses
from collections.abc import Sequence

import torch

from .ridge import Gaussian


# One strength is enough to rank blocks.
RANKING_STRENGTH = 1e-3


@dataclasses.dataclass(frozen=True)
class Correlations:
    """
    Second moments of standardised features and of targets, about the means of the rows that are fitted on.

    Args:
        train_xx (`torch.Tensor`), train_xy (`torch.Tensor`):
            `[features, features]`, penalised, and `[features, targets]`.
        held_out_xx (`torch.Tensor`), held_out_xy (`torch.Tensor`), held_out_yy (`torch.Tensor`):
            The same on held-out rows; of the targets the diagonal.
        variance (`torch.Tensor`):
            Of the targets on held-out rows, about their own mean there.
    """

    train_xx: torch.Tensor
    train_xy: torch.Tensor
    held_out_xx: torch.Tensor
    held_out_xy: torch.Tensor
    held_out_yy: torch.Tensor
    variance: torch.Tensor

    @classmethod
    def of(cls, train: Gaussian, held_out: Gaussian) -> "Correlations":
        """From the moments of both kinds of rows, with a penalty as in [`fit_ridge`]."""
        scale = train.feature_scale()
        penalised, held_out_xx = (
            moments.cov_xx.dense().div_(scale).div_(scale[:, None]) for moments in (train, held_out)
        )
        penalised.diagonal().add_(RANKING_STRENGTH)
        offset_x, offset_y = (held_out.mean_x - train.mean_x) / scale, held_out.mean_y - train.mean_y
        return cls(
            penalised,
            train.cov_xy / scale[:, None],
            held_out_xx.addr_(offset_x, offset_x),
            held_out.cov_xy / scale[:, None] + torch.outer(offset_x, offset_y),
            held_out.var_y + offset_y.square(),
            held_out.var_y,
        )


class ForwardSelection:
    """
    Ridge regression of some targets on the blocks of features taken so far, and what each further block would add.

    Taking a block appends rows to a Cholesky factor, so that a candidate costs a solve of its own size, however many
    blocks were taken before it; and several selections share the moments.

    Args:
        correlations ([`Correlations`]):
            Of all features and targets.
        targets (`torch.Tensor`):
            Columns of the targets to explain.
    """

    def __init__(self, correlations: Correlations, targets: torch.Tensor):
        self._xx, self._held_xx = correlations.train_xx, correlations.held_out_xx
        self._xy, self._held_xy = correlations.train_xy[:, targets], correlations.held_out_xy[:, targets]
        # Held-out mean squared error of each target with what is taken so far.
        self.residual = correlations.held_out_yy[targets]
        self._taken = torch.zeros(0, dtype=torch.long)
        self._factor = self._xx.new_zeros(0, 0)
        # The factor's inverse times the covariance of what is taken with all features, and with the targets.
        self._reduced_xx = self._xx.new_zeros(0, len(self._xx))
        self._reduced_xy = self._xx.new_zeros(0, len(targets))

    def residuals_with(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """
        Args:
            blocks (`Sequence[torch.Tensor]`):
                Columns of the features, for each candidate.

        Returns:
            `list[torch.Tensor]`: For each candidate the held-out mean squared error of each target if it were taken.
        """
        # How what is taken predicts all features and the targets, and the held-out products of what that leaves.
        predictor = torch.linalg.solve_triangular(self._factor.T, self._reduced_xx, upper=True)
        taken_weight = torch.linalg.solve_triangular(self._factor.T, self._reduced_xy, upper=True)
        held_rows = self._held_xx[self._taken]
        held_taken = held_rows[:, self._taken]
        left_xy = (self._held_xy - held_rows.T @ taken_weight) - predictor.T @ (
            self._held_xy[self._taken] - held_taken @ taken_weight
        )
        correction = held_taken @ predictor
        residuals = []
        for block in blocks:
            _, corner, right = self._reduce(block)
            weight = torch.cholesky_solve(right, corner)
            mine = predictor[:, block]
            crossed = mine.T @ held_rows[:, block]
            left_xx = self._held_xx[block][:, block] - crossed - crossed.T + mine.T @ correction[:, block]
            gain = 2 * (weight * left_xy[block]).sum(0) - (weight * (left_xx @ weight)).sum(0)
            residuals.append(self.residual - gain)
        return residuals

    def take(self, block: torch.Tensor) -> None:
        """Take a block of features for good."""
        (self.residual,) = self.residuals_with([block])
        reduced, corner, right = self._reduce(block)
        rows = torch.linalg.solve_triangular(corner, self._xx[block] - reduced.T @ self._reduced_xx, upper=False)
        self._reduced_xx = torch.cat([self._reduced_xx, rows])
        self._reduced_xy = torch.cat([self._reduced_xy, torch.linalg.solve_triangular(corner, right, upper=False)])
        above = torch.cat([self._factor, self._factor.new_zeros(len(self._factor), len(block))], 1)
        self._factor = torch.cat([above, torch.cat([reduced.T, corner], 1)])
        self._taken = torch.cat([self._taken, block])

    def _reduce(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's rows of the factor before its corner, transposed; the corner; what is left of the targets."""
        reduced = self._reduced_xx[:, block]
        corner = torch.linalg.cholesky(self._xx[block][:, block] - reduced.T @ reduced)
        return reduced, corner, self._xy[block] - reduced.T @ self._reduced_xy
