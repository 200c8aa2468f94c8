"""What reusing caches of contexts that were read earlier is worth, and what it costs."""

from .methods import TranslatedChunks
from .request import ReuseMethod, ReuseQuestion, ReuseRequest
from .score import MethodScore, ReuseScore, score_reuse


__all__ = [
    "MethodScore",
    "ReuseMethod",
    "ReuseQuestion",
    "ReuseRequest",
    "ReuseScore",
    "TranslatedChunks",
    "score_reuse",
]
