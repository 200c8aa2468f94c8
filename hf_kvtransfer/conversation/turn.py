"""What became of one turn of a conversation."""

import dataclasses
from typing import Any

from ..transfer_report import TransferReport


@dataclasses.dataclass(frozen=True)
class TurnReport:
    """
    Where a model had the tokens of its prompt from. The three kinds add up to the prompt.

    Args:
        model (`str`):
            Who replied.
        kept_tokens (`int`):
            Tokens that were in its own cache.
        translated_tokens (`dict[str, int]`):
            Tokens that were translated, by the model that has read them.
        native_tokens (`int`):
            Tokens that it has read itself now.
        reply_tokens (`int`):
            Tokens of its reply.
        reasons (`tuple[str, ...]`):
            Why tokens that another model has read were not translated, or what its own cache held was not kept.
        evicted (`tuple[str, ...]`):
            Models whose caches were given up after the turn, to stay below the ceiling.
        transfer ([`TransferReport`], *optional*):
            What became of the handoff. `None` if nothing was to be translated.
    """

    model: str
    kept_tokens: int
    translated_tokens: dict[str, int]
    native_tokens: int
    reply_tokens: int
    reasons: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    transfer: TransferReport | None = None

    def __str__(self) -> str:
        translated = "".join(f"{tokens} translated from {name}, " for name, tokens in self.translated_tokens.items())
        text = (
            f"{self.model}: {self.kept_tokens} tokens kept, {translated}{self.native_tokens} read, "
            f"{self.reply_tokens} replied"
        )
        evicted = (f"the cache of {name} was given up" for name in self.evicted)
        return "\n  - ".join([text, *self.reasons, *evicted])


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
    """
    A reply in a conversation.

    Args:
        text (`str`):
            The reply, as it stands in the conversation from now on.
        report ([`TurnReport`]):
            Where the model had its prompt from.
        output (`Any`, *optional*):
            What `generate` returned.
        losses (`list[float]`, *optional*):
            Of a reply that was given: what the model lost on each of its tokens, in nats.
    """

    text: str
    report: TurnReport
    output: Any = None
    losses: list[float] | None = None

    def __str__(self) -> str:
        return self.text
