"""Remove and apply rotary embeddings through the model's own rotary module, never through a copy of its formula."""

from .rotary import Rotary, RotaryTables


__all__ = ["Rotary", "RotaryTables"]
