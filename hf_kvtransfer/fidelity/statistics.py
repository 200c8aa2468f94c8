"""From rows to figures: means, shares of the gap recovered, and how sure they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arms import in_order
from .results import PassageResult, check_results


# The standard error of an agreement is then at most 2.6 percentage points.
MIN_POSITIONS = 384
# The percentile bootstrap of a few documents is too narrow: it calls a difference that is nothing clearly positive in
# 1 of 4 cases with 2 documents, in 1 of 10 with 4 and in 1 of 16 with 8, instead of in 1 of 40.
MIN_DOCUMENTS = 8
RESAMPLES = 10_000

_TAIL = 0.025
_SEED = 0
# Resampled documents held at once, 8 bytes each in three arrays.
_BLOCK = 2**20
# A difference below it is rounding.
_POSITIVE = 1e-9


def figures(results: Sequence[PassageResult], intervals: bool = True) -> dict[str, Any]:
    """
    The figures of an evaluation. Means are sums over the positions of all passages, divided by their number.

    - `gap_recovered` is `(loss(no context) - loss(arm)) / (loss(no context) - loss(native))`, KVShareArena's "gap
      recovered": 1 is as good as the target's own prefill, 0 as bad as no context. It is not clipped.
    - `retention` of a multiple-choice task is `(accuracy(translated) - chance) / (accuracy(native) - chance)`, the
      ridge paper's retention, but above chance. Chance is the mean of `1 / choices`.
    - Both have a percentile interval of 95 % from a paired bootstrap over documents: all turns and all arms of a
      document are drawn together. Both are `None` where the denominator is not clearly positive, that is, where it is
      not positive in more than 2.5 % of the resamples, or where there are fewer than [`MIN_DOCUMENTS`] documents. A
      resample in which the denominator is not positive extends the interval at both ends.

    Args:
        results (`Sequence[PassageResult]`):
            One row for each passage, all with the same arms.
        intervals (`bool`, *optional*, defaults to `True`):
            Whether to bootstrap. Without, a share is `{"value": ...}` wherever its denominator is positive.

    Returns:
        `dict`: `positions`, `documents`, `sufficient` (at least [`MIN_POSITIONS`] positions), `arms`, `capabilities`,
        `turns` (one for each number of a turn), `late_turns` (`None` without turns) and `choices`, in plain Python
        types and without NaN. The layer of a `worst_layer` is its number among the target's layers that cache.

    Raises:
        `EvidenceError`: a row holds NaN, Inf or an impossible number, is there twice, or has other arms than the rest.
    """
    check_results(results)
    return _Scores(results, intervals).figures()


def layer_cosines(results: Sequence[PassageResult], arm: str) -> np.ndarray:
    """Mean over all positions of the attention cosine of an arm, `[layers]`; empty for the native arm."""
    positions = np.array([row.arms[arm].positions for row in results])
    return positions @ np.array([row.arms[arm].cosine for row in results], dtype=float) / positions.sum()


class _Scores:
    """The rows as columns `[rows]` and `[rows, arms]`; the first arm is the native one."""

    def __init__(self, results: Sequence[PassageResult], intervals: bool):
        self.intervals = intervals
        self.arms = in_order(results[0].arms)
        self.documents = np.unique([row.document for row in results], return_inverse=True)[1]
        self.capabilities = np.array([row.capability for row in results])
        self.turns = np.array([row.turn or 0 for row in results])
        self.choices = np.array([row.choices or 0 for row in results])
        self.labels = np.array([-1 if row.label is None else row.label for row in results])
        self.positions = np.array([row.arms["native"].positions for row in results])
        self.loss, self.agreement, self.kl = (
            np.array([[getattr(row.arms[arm], name) for arm in self.arms] for row in results], dtype=float)
            for name in ("loss", "agreement", "kl")
        )
        self.chosen = np.array(
            [[-1 if row.arms[arm].chosen is None else row.arms[arm].chosen for arm in self.arms] for row in results]
        )
        self.layer_cosines = {arm: layer_cosines(results, arm) for arm in self.arms}

    def figures(self) -> dict[str, Any]:
        everything = np.ones(len(self.positions), dtype=bool)
        positions = int(self.positions.sum())
        with_turns = self.turns > 0
        return {
            "positions": positions,
            "documents": self._num_documents(everything),
            "sufficient": positions >= MIN_POSITIONS,
            "arms": self._all_arms(everything),
            "capabilities": {
                str(name): self._group(self.capabilities == name) for name in np.unique(self.capabilities)
            },
            "turns": [
                {"turn": int(turn), **self._group(self.turns == turn)} for turn in np.unique(self.turns[with_turns])
            ],
            "late_turns": {
                "weights": "each position weighs as much as the number of its turn",
                "arms": self._arms(with_turns, self.turns),
            }
            if with_turns.any()
            else None,
            "choices": {
                str(name): self._choices((self.capabilities == name) & (self.choices > 0))
                for name in np.unique(self.capabilities[self.choices > 0])
            },
        }

    def _num_documents(self, rows: np.ndarray) -> int:
        return len(np.unique(self.documents[rows]))

    def _group(self, rows: np.ndarray) -> dict[str, Any]:
        return {
            "positions": int(self.positions[rows].sum()),
            "documents": self._num_documents(rows),
            "arms": self._arms(rows),
        }

    def _arms(self, rows: np.ndarray, weights: np.ndarray | None = None) -> dict[str, dict]:
        weight = np.ones(rows.sum()) if weights is None else weights[rows].astype(float)
        positions = weight @ self.positions[rows]
        loss, agreement = (weight @ column[rows] / positions for column in (self.loss, self.agreement))
        gaps: list[dict | None] = [None] * len(self.arms)
        if "no_context" in self.arms:
            # The arms share their positions, so that sums do for means.
            floor = self.loss[rows, self.arms.index("no_context"), None]
            gaps = self._shares_of_native(weight[:, None] * (floor - self.loss[rows]), rows)
        return {
            arm: {"loss": float(loss[i]), "agreement": float(agreement[i]), "gap_recovered": gaps[i]}
            for i, arm in enumerate(self.arms)
        }

    def _all_arms(self, rows: np.ndarray) -> dict[str, dict]:
        kl = self.kl.sum(0) / self.positions.sum()
        figures = {}
        for i, (arm, score) in enumerate(self._arms(rows).items()):
            layers = self.layer_cosines[arm]
            cosine = worst = None
            if len(layers):
                cosine = float(layers.mean())
                worst = {"layer": int(layers.argmin()), "cosine": float(layers.min())}
            figures[arm] = {
                "loss": score["loss"],
                "agreement": score["agreement"],
                "kl": float(kl[i]),
                "cosine": cosine,
                "worst_layer": worst,
                "gap_recovered": score["gap_recovered"],
            }
        return figures

    def _choices(self, rows: np.ndarray) -> dict[str, Any]:
        chosen = self.chosen[rows]
        correct = chosen == self.labels[rows, None]
        chance = 1 / self.choices[rows]
        as_native = (chosen == chosen[:, :1]).mean(0)
        retention = None
        if "translated" in self.arms:
            retention = self._shares_of_native(correct - chance[:, None], rows)[self.arms.index("translated")]
        return {
            "items": len(chosen),
            "chance": float(chance.mean()),
            "accuracy": dict(zip(self.arms, correct.mean(0).tolist(), strict=True)),
            "agreement": dict(zip(self.arms, as_native.tolist(), strict=True)),
            "retention": retention,
        }

    def _shares_of_native(self, above_floor: np.ndarray, rows: np.ndarray) -> list[dict[str, float] | None]:
        """What each arm has above a floor (`[rows, arms]`) as a share of what the native arm has."""
        documents, place = np.unique(self.documents[rows], return_inverse=True)
        totals = above_floor.sum(0)
        absent: list[dict[str, float] | None] = [None] * len(totals)
        if len(documents) < MIN_DOCUMENTS or totals[0] <= _POSITIVE:
            return absent
        shares = [{"value": value} for value in (totals / totals[0]).tolist()]
        if not self.intervals:
            return shares
        sums = np.zeros((len(documents), len(totals)))
        np.add.at(sums, place, above_floor)
        bounds = share_intervals(resampled_totals(sums))
        if bounds is None:
            return absent
        return [share | {"low": low, "high": high} for share, low, high in zip(shares, *bounds.tolist(), strict=True)]


def shares_of_first(sums: np.ndarray) -> list[dict[str, float]] | None:
    """
    Each column's share of the first one, with the interval of [`figures`].

    Args:
        sums (`np.ndarray`):
            `[documents, columns]`.

    Returns:
        `list[dict]`: `value`, `low` and `high` for each column, or `None` where there are fewer than [`MIN_DOCUMENTS`]
        documents, or the first column is not clearly positive.
    """
    bounds = share_intervals(resampled_totals(sums)) if len(sums) >= MIN_DOCUMENTS else None
    if bounds is None:
        return None
    values = sums.sum(0) / sums[:, 0].sum()
    return [
        {"value": value, "low": low, "high": high}
        for value, low, high in zip(values.tolist(), *bounds.tolist(), strict=True)
    ]


def resampled_totals(sums: np.ndarray) -> np.ndarray:
    """Totals `[resamples, columns]` of documents drawn with replacement; `sums` is `[documents, columns]`."""
    documents, columns = sums.shape
    generator = np.random.default_rng(_SEED)
    totals = np.empty((RESAMPLES, columns))
    block = max(1, _BLOCK // documents)
    for start in range(0, RESAMPLES, block):
        size = min(block, RESAMPLES - start)
        drawn = generator.integers(documents, size=(size, documents))
        drawn += documents * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * documents).reshape(size, documents)
        totals[start : start + size] = counts @ sums
    return totals


def share_intervals(totals: np.ndarray) -> np.ndarray | None:
    """Both ends `[2, columns]` of each column's share of the first one, `None` if that is not clearly positive."""
    positive = totals[:, :1] > _POSITIVE
    cut = int(_TAIL * len(totals))
    if np.count_nonzero(~positive) > cut:
        return None
    shares = totals / np.where(positive, totals[:, :1], 1)
    low = np.sort(np.where(positive, shares, -np.inf), axis=0)[cut]
    high = np.sort(np.where(positive, shares, np.inf), axis=0)[-1 - cut]
    return np.stack([low, high])
