"""What an evaluation measured: one row for each scored passage."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..errors import EvidenceError
from .arms import ARMS, in_order


# Measured numbers are kept to this many significant digits: enough for figures to hold to 1e-6.
_DIGITS = 7
# What is larger was not measured. Sums and ratios of numbers below it stay finite.
_LARGEST = 1e12


@dataclasses.dataclass
class ArmScore:
    """
    How one arm continued one passage.

    Args:
        positions (`int`):
            Scored tokens of the reference continuation.
        loss (`float`):
            Sum over them, in nats.
        agreement (`int`):
            Positions at which the most probable token is the native arm's.
        kl (`float`):
            Sum over the positions of the divergence KL(native || arm), in nats.
        cosine (`list[float]`):
            For each target layer that caches, the mean over the positions of the cosine between the attention output
            and the native arm's. Empty for the native arm.
        chosen (`int`, *optional*):
            Of a multiple-choice item, the index of the ending with the highest log-probability per character.
    """

    positions: int
    loss: float
    agreement: int
    kl: float
    cosine: list[float]
    chosen: int | None = None

    def problem(self, choices: int | None) -> str | None:
        """What is wrong with the score of a passage with so many `choices`, `None` if nothing is."""
        if not _is_count(self.positions, 1):
            return f"`positions` is {self.positions!r}, not a positive integer"
        if not _is_count(self.agreement, 0, self.positions):
            return f"`agreement` is {self.agreement!r}, not an integer from 0 to `positions` ({self.positions})"
        for name, value in (("loss", self.loss), ("kl", self.kl)):
            if not is_number(value):
                return f"`{name}` is {value!r}, not a finite number"
        if not isinstance(self.cosine, list) or not _are_numbers(self.cosine):
            return f"`cosine` is {self.cosine!r}, not a list of finite numbers"
        if self.loss < 0:
            return f"`loss` is {self.loss!r}, below 0"
        if choices is None and self.chosen is not None:
            return f"`chosen` is {self.chosen!r} for a passage without choices"
        if choices is not None and not _is_count(self.chosen, 0, choices - 1):
            return f"`chosen` is {self.chosen!r}, not an integer below `choices` ({choices})"
        return None


@dataclasses.dataclass
class PassageResult:
    """
    How all arms continued one passage.

    Args:
        document (`str`):
            Key of the document, unique in the evaluation.
        capability (`str`):
            What the passage tests.
        turn (`int`, *optional*):
            Number of the assistant's turn, from 1. `None` where there are no turns.
        choices (`int`, *optional*):
            Number of endings of a multiple-choice item.
        label (`int`, *optional*):
            Index of the right ending.
        arms (`dict[str, ArmScore]`):
            By name, see [`ARMS`], and of the translated cache with efforts, see [`effort_arm`].
    """

    document: str
    capability: str
    turn: int | None
    choices: int | None
    label: int | None
    arms: dict[str, ArmScore]

    def rounded(self) -> "PassageResult":
        """A copy with the numbers as they are written to a file."""
        arms = {
            name: dataclasses.replace(
                score, loss=_rounded(score.loss), kl=_rounded(score.kl), cosine=[_rounded(x) for x in score.cosine]
            )
            for name, score in self.arms.items()
        }
        return dataclasses.replace(self, arms=arms)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, see [`PassageResult.from_dict`]."""
        return vars(self) | {"arms": {name: vars(score) for name, score in self.arms.items()}}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "PassageResult":
        """
        Raises:
            `EvidenceError`: `row` is not what [`PassageResult.to_dict`] gives.
        """
        try:
            return cls(**row | {"arms": {name: ArmScore(**score) for name, score in row["arms"].items()}})
        except (TypeError, KeyError, AttributeError) as error:
            raise EvidenceError(f"A result has missing, unknown or damaged fields ({error}).") from error

    def problem(self) -> str | None:
        """What is wrong with the row, `None` if nothing is."""
        for name in ("document", "capability"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                return f"`{name}` is {getattr(self, name)!r}, not a name"
        if self.turn is not None and not _is_count(self.turn, 1):
            return f"`turn` is {self.turn!r}, not a positive integer"
        if self.choices is not None and not _is_count(self.choices, 2):
            return f"`choices` is {self.choices!r}, not an integer of at least 2"
        if (self.label is None) != (self.choices is None) or (
            self.choices is not None and not _is_count(self.label, 0, self.choices - 1)
        ):
            return f"`label` is {self.label!r} with {self.choices!r} choices"
        if "native" not in self.arms or not self.arms.keys() <= set(in_order(self.arms)):
            return (
                f"its arms are {sorted(self.arms)}: 'native' is always there, the others are of {ARMS[1:]} or efforts"
            )
        for name, score in self.arms.items():
            problem = score.problem(self.choices)
            if problem:
                return f"arm {name!r}: {problem}"
        if len({score.positions for score in self.arms.values()}) > 1:
            return "its arms are scored at different numbers of positions"
        return None


def check_results(results: Sequence[PassageResult]):
    """
    Check that rows can be made into figures: plausible numbers, each passage once, the same arms in all of them.

    Raises:
        `EvidenceError`: naming the row and what is wrong.
    """
    if not results:
        raise EvidenceError("There are no results: nothing was scored.")
    shape, seen = None, set()
    for number, row in enumerate(results):
        problem = row.problem()
        passage = (row.document, row.turn)
        if problem is None and passage in seen:
            problem = "it is there twice, and would count twice"
        if problem is None:
            # Means over other passages than the native arm's could not be compared with it.
            shape = shape or _shape(row)
            if _shape(row) != shape:
                problem = f"it has other arms or layers than the first result: {_shape(row)}, not {shape}"
        if problem is not None:
            turn = "" if row.turn is None else f", turn {row.turn}"
            raise EvidenceError(f"Result {number} (document {row.document!r}{turn}) cannot be used: {problem}.")
        seen.add(passage)


def is_number(value) -> bool:
    """Whether `value` is a plain finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _are_numbers(values: list) -> bool:
    """As [`is_number`] for each, without a call for each: a report holds tens of thousands."""
    return not values or (
        set(map(type, values)) <= {int, float}
        and -_LARGEST < min(values) <= max(values) < _LARGEST
        and not math.isnan(sum(values))
    )


def _shape(row: PassageResult) -> dict[str, int]:
    """The arms, and the number of layers whose attention output was compared."""
    return {name: len(score.cosine) for name, score in sorted(row.arms.items())}


def _is_count(value, low: int, high: float = _LARGEST) -> bool:
    return type(value) is int and low <= value <= high


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
