"""All that an evaluation measures on one document."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from ..errors import AlignmentError, EvaluationDataError, PrefixMismatchError
from ..translation import Translation
from .arms import ARMS, effort_arm
from .corruptions import corruptions
from .data import Document
from .replay import NativeCache, Replay
from .results import PassageResult
from .tail_reading import MAX_PROBE_TOKENS, read_tail


logger = logging.get_logger(__name__)

# Share of a document's context that its stand-in may begin with, too.
_MAX_SHARED = 0.25


class DocumentReplay:
    """
    Evaluates documents, one at a time.

    Args:
        replay ([`Replay`]):
            Scores their passages.
        documents (`Sequence[Document]`):
            All of them.
        probe_documents (`int`), corrupted_documents (`int`):
            How many the probe reads, and how many of these also with corruptions.
        seed (`int`):
            Of the corruptions.
        efforts (`Sequence[float]`, *optional*, defaults to `()`):
            With which the translated cache is scored, too.
    """

    def __init__(
        self,
        replay: Replay,
        documents: Sequence[Document],
        probe_documents: int,
        corrupted_documents: int,
        seed: int,
        efforts: Sequence[float] = (),
    ):
        self.replay, self.documents, self.seed = replay, documents, seed
        self.arms = (*ARMS, *map(effort_arm, efforts))
        long = [i for i, d in enumerate(documents) if len(d.passages[-1].target_ids) > 2 * MAX_PROBE_TOKENS]
        self.probed = _spread(long, probe_documents)
        self.corrupted = _spread(self.probed, corrupted_documents)
        # A document's own and its donor's, which is mostly the next one's own.
        self._read = functools.lru_cache(maxsize=2)(lambda number: replay.read_source(documents[number].passages[-1]))

    def record(self, number: int) -> dict[str, Any]:
        """
        Evaluate a document.

        Returns:
            `dict`: `document`, its key; `results`, a list of [`PassageResult`] as dicts; `right`, a [`TailReading`] as
            a dict or `None`, and `wrong`, the same by corruption; `skipped`, the kind of the error for which there is
            nothing of these, or `None`. Its message, which may quote the document, is logged at level DEBUG.
        """
        key = self.documents[number].key
        try:
            return {"document": key, "skipped": None} | self._measure(number)
        except (AlignmentError, PrefixMismatchError) as error:
            logger.debug(f"Document {key!r} is left out: {error}")
            return {"document": key, "skipped": type(error).__name__, "results": [], "right": None, "wrong": {}}

    def _measure(self, number: int) -> dict[str, Any]:
        document = self.documents[number]
        longest = self._translate(number)
        donor = self._donor(number)
        native_cache = NativeCache() if len(document.passages) > 1 else None
        results = []
        for passage in document.passages:
            source_kv = self.replay.read_source(passage, longest.source_kv)
            scores = self.replay.score(passage, source_kv, arms=self.arms, donor=donor, native_cache=native_cache)
            choices = len(passage.continuations) if len(passage.continuations) > 1 else None
            label = None if choices is None else passage.label
            result = PassageResult(document.key, document.capability, passage.turn, choices, label, scores)
            results.append(result.rounded().to_dict())
        right, wrong = None, {}
        if number in self.probed and longest.length >= 2 * MAX_PROBE_TOKENS:
            right = _read_tail(longest)
            if number in self.corrupted:
                planted = corruptions(longest, donor.source_kv, self.seed + number)
                wrong = {name: _read_tail(translation) for name, translation in planted}
        return {"results": results, "right": right, "wrong": wrong}

    def _translate(self, number: int) -> Translation:
        """The context of a document's last passage."""
        return self.replay.translate(self.documents[number].passages[-1], self._read(number))

    def _donor(self, number: int) -> Translation:
        """The next document, in a ring, that can be translated and does not begin as this one does."""
        ids = [document.passages[-1].target_ids for document in self.documents]
        ring = [*range(number + 1, len(ids)), *range(number)]
        # What few-shot examples or a system prompt have in common would make a wrong document half a right one.
        own = ids[number]
        shared = {other: len(os.path.commonprefix([own, ids[other]])) > len(own) * _MAX_SHARED for other in ring}
        for other in sorted(ring, key=shared.__getitem__):
            if ids[other] == own:
                continue
            try:
                return self._translate(other)
            except (AlignmentError, PrefixMismatchError):
                continue
        raise EvaluationDataError(
            f"No other document can be translated, to stand in for {self.documents[number].key!r} as a control. Give "
            "more, and different, documents."
        )


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` of the numbers, at even distances."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _read_tail(translation: Translation) -> dict[str, Any]:
    (reading,), _ = read_tail(translation, MAX_PROBE_TOKENS)
    return dataclasses.asdict(reading)
