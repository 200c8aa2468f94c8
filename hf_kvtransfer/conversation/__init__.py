"""Several models, one conversation: each reads only what no other has read for it."""

from .conversation import Conversation
from .turn import Reply, TurnReport


__all__ = ["Conversation", "Reply", "TurnReport"]
