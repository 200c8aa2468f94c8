"""Calibration text from wherever it is."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import CalibrationError, EvaluationDataError
from ..fidelity.chat import render_dialogue
from ..fidelity.prompts import PromptEncoder
from ..fidelity.rows import parse_message
from ..text_files import json_lines, text_pieces


# Of a plain text file, in characters: some hundred tokens, as much context as the maps need to see.
CHUNK_LENGTH = 2000

# What is read where no text is given: filtered web pages of all kinds, name and configuration.
DEFAULT_DATASET = ("HuggingFaceFW/fineweb-edu", "sample-10BT")


def content_of(text: str | Sequence[int] | torch.Tensor) -> bytes:
    """What a text or token ids are told from others by, one after the other in a digest: its length, and itself."""
    content = text if isinstance(text, str) else str(torch.as_tensor(text).tolist())
    return len(content).to_bytes(8, "big") + content.encode("utf-8", "surrogatepass")


def calibration_texts(
    texts: str | Path | Mapping | Iterable | None, tokenizer: PreTrainedTokenizerBase | None = None, seed: int = 0
) -> Iterator:
    """
    Pieces of text from files, datasets or iterables.

    Args:
        texts (`str`, `Path`, `Mapping` or `Iterable`, *optional*):
            - A `.jsonl` file with a `text` or `messages` in each row, or any other text file (cut at blank lines).
            - The name of a dataset for `datasets.load_dataset` (its `train` split, streamed), with such rows.
            - An iterable of strings, of such rows, or of token ids.
            - A mixture of these, `{texts: share}`, or pairs `[(texts, share), ...]` where they cannot be keys. Each
              next piece is drawn from one of them by its share, until one has no more.
            - `None`: FineWeb-Edu, a filtered sample of the web.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target's, whose chat template dialogues (`messages`) are written in.
        seed (`int`, *optional*, defaults to 0):
            Of the draws from a mixture.

    Raises:
        `CalibrationError`: a row has no text, a share is not positive, or `datasets` is needed and not installed.
    """
    if texts is None:
        return _dataset(*DEFAULT_DATASET, tokenizer=tokenizer)
    if (shares := _shares(texts)) is not None:
        return _mixture([(calibration_texts(part, tokenizer, seed), share) for part, share in shares], seed)
    if isinstance(texts, str | Path):
        if not Path(texts).is_file():
            return _dataset(str(texts), tokenizer=tokenizer)
        path = Path(texts)
        if path.suffix != ".jsonl":
            return text_pieces(path, CHUNK_LENGTH, CalibrationError)
        return _read(json_lines(path, CalibrationError), f"Line {{}} of {path}", tokenizer, only_rows=True)
    return _read(enumerate(texts, start=1), "Item {} of `texts`", tokenizer)


def _shares(texts: Any) -> list[tuple[Any, float]] | None:
    """The parts of a mixture, if it is one: no text, row or list of ids is a pair of something else and a number."""
    if isinstance(texts, Mapping):
        pairs = list(texts.items())
    elif isinstance(texts, list | tuple) and texts and all(map(_is_pair, texts)):
        pairs = list(texts)
    else:
        return None
    for part, share in pairs:
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < float("inf"):
            raise CalibrationError(f"The share of {part!r:.80} in `texts` must be a positive number, got {share!r}.")
    return pairs


def _is_pair(item: Any) -> bool:
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    return isinstance(item[1], int | float) and not isinstance(item[0], Real)


def _mixture(parts: list[tuple[Iterator, float]], seed: int) -> Iterator:
    # Drawn and not dealt in turn, which could agree with the turn in which texts are held out.
    draw = random.Random(seed)
    streams, shares = zip(*parts, strict=True)
    while True:
        (stream,) = draw.choices(streams, shares)
        try:
            yield next(stream)
        except StopIteration:
            return


def _read(
    rows: Iterable[tuple[int, Any]], place: str, tokenizer: PreTrainedTokenizerBase | None, only_rows: bool = False
) -> Iterator:
    """Rows as strings; token ids as they are."""
    encoder = None if tokenizer is None else PromptEncoder(tokenizer)
    for number, row in rows:
        if isinstance(row, Mapping) and isinstance(row.get("text"), str):
            yield row["text"]
        elif isinstance(row, Mapping) and row.get("messages") is not None:
            yield _dialogue(row["messages"], place.format(number), encoder)
        elif only_rows or isinstance(row, Mapping):
            found = sorted(map(str, row)) if isinstance(row, Mapping) else repr(row)
            raise CalibrationError(
                f"{place.format(number)} must be an object with a `text` or with `messages`, got {found!s:.80}."
            )
        else:
            yield row


def _dialogue(messages: Any, place: str, encoder: PromptEncoder | None) -> str:
    if encoder is None:
        raise CalibrationError(
            f"{place} is a dialogue: pass `target_tokenizer`, whose chat template it is written in."
        )
    try:
        if not isinstance(messages, list | tuple) or not messages:
            raise EvaluationDataError(f"`messages` must be a list of messages, got {messages!r:.80}.")
        parsed = [parse_message(number, message) for number, message in enumerate(messages, start=1)]
        return encoder.text_to_read(render_dialogue(encoder.tokenizer, parsed))
    except EvaluationDataError as error:
        raise CalibrationError(f"{place}: {error}") from error


def _dataset(name: str, *configuration: str, tokenizer: PreTrainedTokenizerBase | None) -> Iterator:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"`texts={name!r}` is no file. To read it as the name of a dataset, `pip install datasets`."
        ) from error
    rows = load_dataset(name, *configuration, split="train", streaming=True)
    yield from _read(enumerate(rows, start=1), f"Row {{}} of dataset {name!r}", tokenizer, only_rows=True)
