"""Fingerprints: is this the model, and the tokenizer, that a mapper was fitted on?"""

from .identity import Difference, ModelIdentity


__all__ = ["Difference", "ModelIdentity"]
