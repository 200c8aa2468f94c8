"""Calibration texts that are long enough to go on in."""

from collections.abc import Iterable
from typing import Any

import torch

from ..alignment.spans import encode_with_spans
from .states import PairedStates


def long_texts(reader: PairedStates, texts: Iterable, min_length: int) -> list[tuple[Any, torch.Tensor]]:
    """
    Texts cut to the reader's length, each with the target's token ids of it.

    Args:
        reader ([`PairedStates`]):
            Knows the tokenizers, and the length.
        texts (`Iterable`):
            Strings, or token ids if there are no tokenizers. Those that a tokenizer cannot read are left out.
        min_length (`int`):
            Tokens below which a text is left out.

    Raises:
        `CalibrationError`: texts of the wrong kind, or more than a tenth that a tokenizer cannot read.
    """
    whole, tokenizer = reader.whole(texts), reader.target_tokenizer
    if tokenizer is None:
        return [(ids, ids) for ids in whole if len(ids) >= min_length]
    # Counted anew: what was cut off may have been part of a token.
    encoded = ((text, encode_with_spans(tokenizer, text)[0]) for text in whole)
    return [(text, torch.tensor(ids)) for text, ids in encoded if len(ids) >= min_length]
