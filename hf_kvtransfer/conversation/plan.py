"""Which tokens of a prompt another model of the conversation has read, and in which of its own."""

import dataclasses
from collections.abc import Mapping

from ..alignment.spans import Span
from .log import ModelLog
from .prompt import ReadText


@dataclasses.dataclass(frozen=True)
class Run:
    """
    Tokens `start` to `stop` of a prompt, of which `model` has read the text in its tokens `first` to `last`.
    """

    start: int
    stop: int
    model: str
    first: int
    last: int


def plan_runs(prompt: ReadText, begin: int, logs: Mapping[str, ModelLog], min_tokens: int) -> list[Run]:
    """
    Find what can be translated.

    The contents of messages are the same text for all models; what chat templates put around them can be. A token is
    never taken from a model in whose cache it is a translation, nor from one that has read something else before it.

    Args:
        prompt ([`ReadText`]):
            What a model is to read.
        begin (`int`):
            Its first tokens that need not be read.
        logs (`Mapping[str, ModelLog]`):
            What the other models hold, by name; earlier ones are preferred.
        min_tokens (`int`):
            Shorter runs are left out.

    Returns:
        `list[Run]`: In order, and apart.
    """
    runs: list[tuple[Run, int]] = []
    for number, place in enumerate(prompt.places):
        if place is None or (begin and place[1] <= prompt.spans[begin - 1][1]):
            continue
        start, stop = _tokens(prompt.spans, place)
        start = max(start, begin)
        # Whoever has read the message before is asked first, so that the two can be one run.
        names = [runs[-1][0].model, *logs] if runs else list(logs)
        for name in names if start < stop else ():
            cut = max(prompt.spans[start][0] - place[0], 0)  # of which the model holds the beginning itself
            found = _tokens_read(name, logs[name], prompt, number, cut)
            if found is None:
                continue
            run = Run(start, stop, name, *found)
            joined = _joined(runs[-1], run, number, prompt, logs[name]) if runs else None
            if joined is None:
                runs.append((run, number))
            else:
                runs[-1] = joined, number
            break
    return [run for run, _ in runs if run.stop - run.start >= min_tokens]


def _tokens_read(name: str, log: ModelLog, prompt: ReadText, number: int, cut: int) -> tuple[int, int] | None:
    """Tokens of a message, from its character `cut` on, that a model has read itself, after the same messages."""
    if number >= log.read.shared_messages(prompt.messages) or (place := log.read.places[number]) is None:
        return None
    first, last = _tokens(log.read.spans, (place[0] + cut, place[1]))
    if first == last or set(log.readers[first:last]) != {name}:
        return None
    return first, last


def _joined(before: tuple[Run, int], run: Run, number: int, prompt: ReadText, log: ModelLog) -> Run | None:
    """One run instead of two, if the model has also read what stands between them."""
    last, last_number = before
    if last.model != run.model or last_number != number - 1:
        return None
    between = []
    for read in (prompt, log.read):
        (_, end), (start, _) = read.places[number - 1], read.places[number]
        between.append(read.text[end:start])
    if between[0] != between[1] or set(log.readers[last.last : run.first]) - {run.model}:
        return None
    return Run(last.start, run.stop, run.model, last.first, run.last)


def _tokens(spans: list[Span], place: Span) -> tuple[int, int]:
    """The tokens whose last character stands in a place, which follow each other."""
    inside = [i for i, (first, end) in enumerate(spans) if first < end and place[0] < end <= place[1]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
