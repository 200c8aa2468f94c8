"""Reduced-rank regression: the best map through a narrow waist, in closed form from a full one."""

import torch

from .symmetric import SymmetricBlocks


def reduce_rank(
    weight: torch.Tensor, cov_xx: SymmetricBlocks, rank: int, metric: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The map of a given rank whose predictions are closest to those of a full one.

    Least squares splits into the error of the full solution and the distance from it, so this is also the map of that
    rank with the least error: the full one, projected on the first principal directions of its predictions. (Izenman,
    "Reduced-rank regression for the multivariate linear model", 1975.)

    Args:
        weight (`torch.Tensor`):
            `[features, targets]`, the full solution.
        cov_xx ([`SymmetricBlocks`]):
            `[features, features]`, covariance of the features.
        rank (`int`):
            Width of the waist.
        metric (`torch.Tensor`):
            `[targets, targets]`, positive semidefinite: the squared size of an error `e` is `e @ metric @ e`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `down` `[rank, features]` and `up` `[targets, rank]`.
    """
    scales, directions = torch.linalg.eigh(metric)
    # Directions that nobody looks at are predicted by the mean.
    seen = scales > scales[-1] * 1e-12
    roots = torch.where(seen, scales, 0).clamp(min=0).sqrt()
    inverse_roots = torch.where(seen, scales, 1).rsqrt() * seen
    root, inverse_root = (directions * part @ directions.T for part in (roots, inverse_roots))
    seen_weight = weight @ root
    predicted = torch.zeros_like(metric)
    for rows, product in cov_xx.times(seen_weight):
        predicted.addmm_(seen_weight[rows].T, product)
    _, principal = torch.linalg.eigh(predicted)
    principal = principal[:, -rank:].flip(1)
    return (seen_weight @ principal).T, inverse_root @ principal
