"""Text that a tokenizer loses characters of, so that a model has not read what the other one has."""

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import CalibrationError


logger = logging.get_logger(__name__)

# Of the texts; more are not an odd character here and there, but a tokenizer that is not made for them.
MOST_LOST = 0.1
# Texts after which that can be told without waiting for the last one.
_ENOUGH_TEXTS = 20


def lost_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """
    Where a tokenizer does not decode to what it has read. Case, accents, compatibility forms and white space are not
    counted: normalizers change them on purpose, and the tokens still say which characters they are for.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        text (`str`):
            The text.

    Returns:
        `str`, *optional*: The text from the first character on that comes back as another one, at most 20 characters
        of its plain form.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    read, decoded = (
        _plain(part)
        for part in (text, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    )
    if read == decoded:
        return None
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(read, decoded, strict=False)))
    return read[same : same + 20]


def _plain(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(
        character for character in decomposed if not (character.isspace() or unicodedata.combining(character))
    )


def round_trips(texts: Iterable, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> Iterator:
    """
    The texts that all tokenizers read without loss. Others are dropped, with a warning when the texts end.

    Args:
        texts (`Iterable`):
            Strings. What is none, such as token ids, is passed on.
        tokenizers (`Mapping[str, PreTrainedTokenizerBase]`):
            By the side that they are of.

    Raises:
        `CalibrationError`: more than a tenth of the texts would be dropped.
    """
    dropped, number, first = 0, 0, ""
    try:
        for number, text in enumerate(texts, start=1):
            losses = ((side, lost_characters(t, text)) for side, t in tokenizers.items() if isinstance(text, str))
            side, lost = next(((side, lost) for side, lost in losses if lost is not None), (None, None))
            if side is None:
                yield text
                continue
            dropped += 1
            first = first or (
                f"the first is text {number}, {text[:60]!r}, of which the {side}'s tokenizer loses {lost!r}"
            )
            if number >= _ENOUGH_TEXTS and dropped > MOST_LOST * number:
                break
    finally:
        if 0 < dropped <= MOST_LOST * number:
            logger.warning(f"{dropped} of {number} calibration texts were left out: {first}.")
    if dropped > MOST_LOST * number:
        raise CalibrationError(
            f"{dropped} of {number} texts do not survive a tokenizer: {first}. Give texts in languages and scripts "
            "that both tokenizers know."
        )
