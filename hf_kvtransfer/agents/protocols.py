"""What an environment, a router and a backend must be able to do. Any object that can will do."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

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
        readers (`list[str]`):
            For each token that it stands for the model that has read it. Those of others are translated.
    """

    readers: list[str]


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """
    Where a model had the tokens of its prompt from. The three kinds add up to the prompt.

    Args:
        held_tokens (`int`):
            Tokens that were in its own cache.
        translated_tokens (`dict[str, int]`):
            Tokens that were translated for this turn, by the model that has read them.
        read_tokens (`int`):
            All others, which the model has read itself now.
        reasons (`tuple[str, ...]`):
            Why it was not less.
    """

    held_tokens: int
    translated_tokens: dict[str, int]
    read_tokens: int
    reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class AgentReply:
    """
    What a model has written.

    Args:
        output_ids (`list[int]`):
            Token by token.
        text (`str`):
            The reply, as the dialogue goes on with it.
        cache ([`CacheUse`]):
            What of its prompt it did not have to read.
    """

    output_ids: list[int]
    text: str
    cache: CacheUse


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

    def generate(self, model: str, messages: Sequence[Message]) -> AgentReply:
        """
        Transfer to a model what it lacks of a dialogue, and let it reply. Both are one step: if it fails, the caches
        are as they were, and it can be asked again.
        """
        ...
