"""What an environment, a router and a backend must be able to do. Any object that can will do."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ..fidelity.chat import Message


class AgentEnvironment(Protocol):
    """What an agent talks to: users, tools, other programs."""

    @property
    def done(self) -> bool:
        """Whether it is over."""
        ...

    @property
    def score(self) -> float:
        """How well it has gone so far, from 0 to 1."""
        ...

    def observe(self) -> list[Message]:
        """
        The whole dialogue up to now, the agent's own replies included, as the next model is to read it. Asked twice,
        it says the same: nothing happens but by `act`.
        """
        ...

    def act(self, text: str) -> None:
        """What the agent has written happens, and the environment answers."""
        ...


class ModelRouter(Protocol):
    """Chooses who is to reply."""

    def route(self, messages: Sequence[Message], turn: int) -> str:
        """
        The name of the next model.

        Args:
            messages (`Sequence[dict[str, str]]`):
                The dialogue.
            turn (`int`):
                How many replies there have been.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CacheHandle:
    """
    A model's cache, as it is between two turns.

    Args:
        input_ids (`list[int]`):
            The tokens that it stands for.
        is_native (`bool`):
            Whether its model has read all of them itself, so that other models can take it over.
        cache (`Any`):
            The backend's own.
    """

    input_ids: list[int]
    is_native: bool
    cache: Any


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """
    What stood in a model's cache before it read the rest of its prompt.

    Args:
        held_tokens (`int`):
            Tokens of the prompt that the model had in its own cache.
        translated_tokens (`int`):
            Tokens that were translated from another model's cache for this turn.
        read_tokens (`int`):
            All others, which the model reads itself.
        source (`str`, *optional*):
            Whose cache was asked for, whatever became of it.
        reasons (`tuple[str, ...]`):
            Why nothing was translated from it.
    """

    held_tokens: int
    translated_tokens: int
    read_tokens: int
    source: str | None = None
    reasons: tuple[str, ...] = ()


class AgentBackend(Protocol):
    """Runs the models of one dialogue, and keeps their caches from turn to turn."""

    @property
    def models(self) -> Collection[str]:
        """The names that a router may give."""
        ...

    @property
    def handles(self) -> Mapping[str, CacheHandle]:
        """The caches that there are, by model."""
        ...

    def reset(self) -> None:
        """Begin another dialogue: drop all caches."""
        ...

    def tokens(self, model: str, messages: Sequence[Message]) -> list[int]:
        """What a model reads before it replies to a dialogue, token by token."""
        ...

    def transfer(self, model: str, input_ids: Sequence[int]) -> CacheUse:
        """Bring a model's cache as far along a prompt as it gets without the model: what it holds, or another's."""
        ...

    def generate(self, model: str, input_ids: Sequence[int]) -> list[int]:
        """Let a model read the rest of a prompt and reply: the ids that it writes."""
        ...

    def text(self, model: str, output_ids: Sequence[int]) -> str:
        """What a model has written."""
        ...
