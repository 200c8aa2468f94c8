"""How times grow: `fixed + rate * tokens ** exponent`, with an interval for the exponent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


_CANDIDATES = np.linspace(0.0, 2.5, 251)
_DRAWS = 400


@dataclass(frozen=True)
class Growth:
    """
    Args:
        exponent (`float`), low (`float`), high (`float`):
            The exponent, and its 95 % interval by drawing measurements anew.
        fixed (`float`), rate (`float`):
            What does not grow, and what a token takes to the power of the exponent.
    """

    exponent: float
    low: float
    high: float
    fixed: float
    rate: float


def fit_growth(tokens: Sequence[float], values: Sequence[float], has_fixed: bool = True, seed: int = 0) -> Growth:
    """
    Least squares of relative errors, with nothing negative.

    Args:
        tokens (`Sequence[float]`), values (`Sequence[float]`):
            One of each for each measurement, some at each of three lengths or more.
        has_fixed (`bool`, *optional*, defaults to `True`):
            Whether there may be a part that does not grow.
        seed (`int`, *optional*, defaults to 0):
            Of the draws.

    Raises:
        `ValueError`: fewer than three lengths.
    """
    x, y = np.asarray(tokens, dtype=float), np.asarray(values, dtype=float)
    if len(np.unique(x)) < 3:
        raise ValueError(f"`tokens` must be of three lengths or more to tell how values grow, got {sorted(set(x))}.")
    generator = np.random.default_rng(seed)
    best = _fit(x, y, has_fixed)
    drawn = []
    while len(drawn) < _DRAWS:
        index = generator.integers(len(x), size=len(x))
        if len(np.unique(x[index])) >= 3:
            drawn.append(_fit(x[index], y[index], has_fixed)[0])
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Growth(best[0], float(low), float(high), best[1], best[2])


def _fit(x: np.ndarray, y: np.ndarray, has_fixed: bool) -> tuple[float, float, float]:
    """Exponent, fixed part and rate, for all candidates at once. In units of the longest: powers do not overflow."""
    exponents = _CANDIDATES[_CANDIDATES > 0] if has_fixed else _CANDIDATES
    grown, constant = (x / x.max()) ** exponents[:, None] / y, 1 / y
    cc, cg, gg = (constant**2).sum(), (grown * constant).sum(1), (grown**2).sum(1)
    c, g = constant.sum(), grown.sum(1)
    rate, fixed = g / gg, np.zeros_like(gg)
    if has_fixed:
        determinant = np.maximum(cc * gg - cg**2, 1e-300)
        both_fixed, both_rate = (c * gg - g * cg) / determinant, (g * cc - c * cg) / determinant
        inside = (both_fixed >= 0) & (both_rate >= 0)
        rate, fixed = np.where(inside, both_rate, rate), np.where(inside, both_fixed, fixed)
    errors = ((fixed[:, None] * constant + rate[:, None] * grown - 1) ** 2).sum(1)
    best = int(errors.argmin())
    return float(exponents[best]), float(fixed[best]), float(rate[best] / x.max() ** exponents[best])
