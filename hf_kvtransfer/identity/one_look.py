"""A handoff asks in several places what a model or a tokenizer is now: it is looked at once for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar


Looked = TypeVar("Looked")
Seen = TypeVar("Seen")

_SEEN: ContextVar[dict[tuple, tuple[Any, Any]] | None] = ContextVar("seen", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Within it, in this thread, nothing is looked at twice by a function that is [`looked_at_once`]."""
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def looked_at_once(look: Callable[[Looked], Seen]) -> Callable[[Looked], Seen]:
    """Let a function of one model or tokenizer keep what it returns as long as [`one_look`] lasts."""

    @wraps(look)
    def wrapper(at: Looked) -> Seen:
        seen = _SEEN.get()
        if seen is None:
            return look(at)
        key = look, id(at)
        if key not in seen:
            seen[key] = at, look(at)  # kept alive, so that no other takes its id
        return seen[key][1]

    return wrapper
