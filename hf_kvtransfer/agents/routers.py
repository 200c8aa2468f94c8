"""Routers that need no model to decide."""

from collections.abc import Sequence

from ..fidelity.chat import Message


class FixedRoutes:
    """
    The same models in the same order, whatever is said: to replay a trajectory, or, with `cycle`, to take turns.

    Args:
        routes (`Sequence[str]`):
            A name for each turn.
        cycle (`bool`, *optional*, defaults to `False`):
            Begin again after the last one, which otherwise takes all further turns.

    Raises:
        `ValueError`: there are none.
    """

    def __init__(self, routes: Sequence[str], cycle: bool = False):
        if isinstance(routes, str) or not routes:
            raise ValueError(f"`routes` is {routes!r}: name a model for each turn.")
        self.routes, self.cycle = list(routes), cycle

    def route(self, messages: Sequence[Message], turn: int) -> str:
        return self.routes[turn % len(self.routes) if self.cycle else min(turn, len(self.routes) - 1)]
