"""What translating does to outcomes: the same routes once with it and once without."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..fidelity.statistics import resampled_totals
from .protocols import AgentBackend, AgentEnvironment, ModelRouter
from .routers import FixedRoutes
from .trajectory import Trajectory, sample_trajectory


@dataclasses.dataclass(frozen=True)
class Outcome:
    """
    One task, twice.

    Args:
        native ([`Trajectory`]), translated ([`Trajectory`]):
            Of the two backends.
    """

    native: Trajectory
    translated: Trajectory

    @property
    def same_turns(self) -> int:
        """First turns in which both have written the same."""
        pairs = zip(self.native.turns, self.translated.turns, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a.text != b.text), min(map(len, self._turns)))

    @property
    def is_same(self) -> bool:
        """Whether both have written the same from beginning to end."""
        return self.same_turns == max(map(len, self._turns))

    @property
    def _turns(self) -> tuple[list, list]:
        return self.native.turns, self.translated.turns


@dataclasses.dataclass(frozen=True)
class Comparison:
    """
    Tasks, each with both outcomes.

    Args:
        outcomes (`list[Outcome]`):
            In the order of the tasks.
    """

    outcomes: list[Outcome]

    @property
    def native_score(self) -> float:
        """Mean score of the native backend."""
        return float(np.mean([outcome.native.score for outcome in self.outcomes]))

    @property
    def translated_score(self) -> float:
        """Mean score of the other."""
        return float(np.mean([outcome.translated.score for outcome in self.outcomes]))

    def score_difference(self) -> tuple[float, float, float]:
        """
        How much higher the translated score is, with both ends of its 95 % interval: a percentile bootstrap over
        tasks, whose two outcomes are drawn together.
        """
        differences = np.array([[o.translated.score - o.native.score] for o in self.outcomes])
        low, high = np.percentile(resampled_totals(differences)[:, 0] / len(differences), [2.5, 97.5])
        return float(differences.mean()), float(low), float(high)

    def __str__(self) -> str:
        difference, low, high = self.score_difference()
        same = sum(outcome.is_same for outcome in self.outcomes)
        read = [sum(getattr(o, arm).read_tokens for o in self.outcomes) for arm in ("native", "translated")]
        seconds = [sum(getattr(o, arm).seconds for o in self.outcomes) for arm in ("native", "translated")]
        return (
            f"{len(self.outcomes)} tasks: score {self.translated_score:.3f} translated, {self.native_score:.3f} "
            f"native, difference {difference:+.3f} [{low:+.3f}, {high:+.3f}]; {same} are the same word for word; "
            f"{read[1]:,} tokens read instead of {read[0]:,}, {seconds[1]:.1f} s instead of {seconds[0]:.1f} s"
        )


def compare(
    tasks: Sequence[Callable[[], AgentEnvironment]],
    router: ModelRouter,
    native: AgentBackend,
    translated: AgentBackend,
    *,
    max_turns: int = 32,
) -> Comparison:
    """
    Play each task on translated caches, and again natively with the same models in the same turns.

    The two diverge with the first word that differs, as they would in use: what is compared is how they end. How much
    a single reply differs is what [`evaluate_mapper`] measures.

    Args:
        tasks (`Sequence[Callable[[], AgentEnvironment]]`):
            Each makes an environment at its beginning, the same one whenever it is called.
        router ([`ModelRouter`]):
            Asked in the translated run. The native one replays what it said; where that takes more turns, the last
            model takes them.
        native ([`AgentBackend`]), translated ([`AgentBackend`]):
            The same models, without mappers and with them.
        max_turns (`int`, *optional*, defaults to 32):
            The most turns of a task.

    Returns:
        [`Comparison`]

    Raises:
        `ValueError`: there are no tasks, or one is over before its first turn.
        [`UnknownModelError`]: the router names a model that a backend does not have.
    """
    if not tasks:
        raise ValueError("`tasks` is empty: there is nothing to compare.")
    outcomes = []
    for number, make in enumerate(tasks):
        first = sample_trajectory(make(), router, translated, max_turns=max_turns)
        if not first.turns:
            raise ValueError(f"Task {number} of `tasks` is over before its first turn.")
        second = sample_trajectory(make(), FixedRoutes(first.routes), native, max_turns=max_turns)
        outcomes.append(Outcome(native=second, translated=first))
    return Comparison(outcomes)
