"""How long something takes for a context of some length."""

import dataclasses
from collections.abc import Sequence
from itertools import combinations

import numpy as np


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """
    Seconds for `n` tokens: `constant + per_token * n + per_token_squared * n**2`.

    Args:
        constant (`float`):
            What it takes whatever the length.
        per_token (`float`):
            What each token adds.
        per_token_squared (`float`, *optional*, defaults to 0.0):
            What each pair of tokens adds: attention.
    """

    constant: float
    per_token: float
    per_token_squared: float = 0.0

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float], *, quadratic: bool) -> "TimeModel":
        """
        The model with the least squared *relative* errors: one second counts for more in a short run than in a long
        one. No term is negative, so that it can be extended beyond what was measured.

        Args:
            tokens (`Sequence[int]`):
                Lengths.
            seconds (`Sequence[float]`):
                What each took, above 0.
            quadratic (`bool`):
                Whether there is a term for pairs of tokens.

        Raises:
            `ValueError`: nothing was measured.
        """
        if not len(tokens) or len(tokens) != len(seconds) or min(seconds) <= 0:
            raise ValueError(f"`tokens` {list(tokens)} and `seconds` {list(seconds)} are no measurements.")
        terms = [0, 1, 2] if quadratic else [0, 1]
        columns = np.array([[n**term / s for term in terms] for n, s in zip(tokens, seconds, strict=True)])
        best, least = np.zeros(len(terms)), np.inf
        # Non-negative least squares of so few terms: the best solution is that of one of their subsets.
        for size in range(1, len(terms) + 1):
            for used in combinations(terms, size):
                part = columns[:, used]
                solution = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
                error = float(np.square(part @ solution - 1).sum())
                if (solution >= 0).all() and error < least - 1e-12:
                    best, least = np.zeros(len(terms)), error
                    best[list(used)] = solution
        return cls(*best.tolist())

    def seconds(self, tokens: int, batch_size: int = 1) -> float:
        """
        What a batch takes, in seconds. Rows are computed together: each adds what its tokens do, and the constant
        counts once.

        Args:
            tokens (`int`):
                In each row.
            batch_size (`int`, *optional*, defaults to 1):
                Number of rows.
        """
        return self.constant + batch_size * (self.per_token * tokens + self.per_token_squared * tokens**2)

    def __add__(self, other: "TimeModel") -> "TimeModel":
        """One after the other."""
        return TimeModel(
            self.constant + other.constant,
            self.per_token + other.per_token,
            self.per_token_squared + other.per_token_squared,
        )
