"""Which token of the source speaks for which of the target: by the characters that they stand for."""

from .alignment import TokenAlignment, align_tokens


__all__ = ["TokenAlignment", "align_tokens"]
