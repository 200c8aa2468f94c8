"""One dialogue from beginning to end: who replied what, having read which tokens from where."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from ..errors import UnknownModelError
from ..fidelity.chat import Message
from .protocols import AgentBackend, AgentEnvironment, CacheUse, ModelRouter


@dataclasses.dataclass(frozen=True)
class Turn:
    """
    One reply.

    Args:
        model (`str`):
            Who gave it.
        observed (`list[dict[str, str]]`):
            Messages since the turn before, the agent's own reply there among them.
        input_ids (`list[int]`), output_ids (`list[int]`):
            The exact tokens that the model was given, and that it wrote.
        text (`str`):
            What it wrote.
        cache ([`CacheUse`]):
            What of its prompt it did not have to read.
        seconds (`float`):
            How long it took.
    """

    model: str
    observed: list[Message]
    input_ids: list[int]
    output_ids: list[int]
    text: str
    cache: CacheUse
    seconds: float


@dataclasses.dataclass
class Trajectory:
    """
    The turns of one dialogue.

    Args:
        turns (`list[Turn]`):
            In order.
        done (`bool`):
            Whether the environment said that it was over.
        score (`float`):
            What it said of the outcome.
    """

    turns: list[Turn] = dataclasses.field(default_factory=list)
    done: bool = False
    score: float = 0.0

    @property
    def routes(self) -> list[str]:
        """Who took each turn."""
        return [turn.model for turn in self.turns]

    @property
    def translated_tokens(self) -> int:
        """Tokens of all prompts that came from other models' caches."""
        return sum(sum(turn.cache.translated_tokens.values()) for turn in self.turns)

    @property
    def read_tokens(self) -> int:
        """Tokens of all prompts that their models read themselves."""
        return sum(turn.cache.read_tokens for turn in self.turns)

    @property
    def seconds(self) -> float:
        """What all turns took together."""
        return sum(turn.seconds for turn in self.turns)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Trajectory":
        """
        Read what [`Trajectory.save`] wrote.

        Raises:
            `ValueError`: the file holds something else.
        """
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**entries | {"turns": [_turn(turn) for turn in entries["turns"]]})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} does not hold a trajectory: {error!r}.") from error


def sample_trajectory(
    environment: AgentEnvironment,
    router: ModelRouter,
    backend: AgentBackend,
    *,
    max_turns: int = 32,
    trajectory: Trajectory | None = None,
) -> Trajectory:
    """
    Let the models that a router chooses act in an environment until it is done.

    A turn is recorded when it has been acted on. If something fails before, nothing has happened in the environment:
    the same call with `trajectory` goes on with the turn that failed.

    Args:
        environment ([`AgentEnvironment`]):
            At its beginning, or where `trajectory` ends.
        router ([`ModelRouter`]):
            Chooses a model for each turn.
        backend ([`AgentBackend`]):
            Runs them. Its caches are dropped first, unless a trajectory goes on.
        max_turns (`int`, *optional*, defaults to 32):
            The most turns of the trajectory.
        trajectory ([`Trajectory`], *optional*):
            To go on with. It is recorded in place, so that its turns are at hand if something fails.

    Returns:
        [`Trajectory`]

    Raises:
        [`UnknownModelError`]: the router names a model that the backend does not have.
    """
    if trajectory is None:
        trajectory = Trajectory()
        backend.reset()
    while not environment.done and len(trajectory.turns) < max_turns:
        messages = environment.observe()
        model = router.route(messages, len(trajectory.turns))
        if model not in backend.models:
            raise UnknownModelError(
                f"The router named {model!r} for turn {len(trajectory.turns) + 1}, the backend has "
                f"{', '.join(sorted(backend.models))}. Nothing was done in this turn."
            )
        known = sum(len(turn.observed) for turn in trajectory.turns)
        turn = _take_turn(backend, model, messages, known)
        environment.act(turn.text)
        trajectory.turns.append(turn)
    trajectory.done, trajectory.score = environment.done, environment.score
    return trajectory


def _take_turn(backend: AgentBackend, model: str, messages: list[Message], known: int) -> Turn:
    input_ids = backend.tokens(model, messages)
    began = time.perf_counter()
    reply = backend.generate(model, messages)
    seconds = time.perf_counter() - began
    observed = [dict(message) for message in messages[known:]]
    return Turn(model, observed, list(input_ids), reply.output_ids, reply.text, reply.cache, seconds)


def _turn(entries: dict[str, Any]) -> Turn:
    use = entries["cache"]
    return Turn(**entries | {"cache": CacheUse(**use | {"reasons": tuple(use["reasons"])})})
