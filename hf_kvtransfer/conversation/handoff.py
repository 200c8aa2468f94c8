"""A handoff within a conversation, and the cache that it leaves behind."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import TranslatedCache
from ..compat import read_into_cache
from ..errors import KVTransferError
from ..segments.segment import Segment
from ..source import SourceKV
from .log import ModelLog
from .plan import Run


@dataclasses.dataclass(frozen=True)
class Handoff:
    """
    What a model continues from.

    Args:
        cache ([`TranslatedCache`]):
            The beginning of its prompt.
        kept (`int`):
            First tokens of it that were in the model's own cache.
        runs (`list[Run]`):
            What was to be translated.
        before ([`ModelLog`], *optional*):
            Of that cache.
    """

    cache: TranslatedCache
    kept: int
    runs: list[Run]
    before: ModelLog | None

    def readers(self, name: str, translated: Sequence[bool], num_tokens: int) -> list[str]:
        """
        Who has read each token, now that model `name` has read the rest.

        Args:
            name (`str`):
                The model.
            translated (`Sequence[bool]`):
                Which of the first tokens are translated; what could not be is the model's own.
            num_tokens (`int`):
                Tokens in all.
        """
        readers = [name] * num_tokens
        if self.before is not None:
            readers[: self.kept] = self.before.readers[: self.kept]
        for run in self.runs:
            readers[run.start : run.stop] = [run.model] * (run.stop - run.start)
        return [
            reader if number < len(translated) and translated[number] else name
            for number, reader in enumerate(readers)
        ]


def sources_of(
    runs: Sequence[Run],
    logs: Mapping[str, ModelLog],
    models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    reasons: list[str],
) -> Iterator[tuple[Run, SourceKV]]:
    """
    What the models have read of each run. Runs of one stretch are cut from one piece.

    Args:
        runs (`Sequence[Run]`):
            What is to be translated.
        logs (`Mapping[str, ModelLog]`), models (`Mapping[str, tuple]`):
            By name.
        reasons (`list[str]`):
            Is told why a run is left out.
    """
    pieces: dict[tuple[str, tuple[int, int]], list[Run]] = {}
    for run in runs:
        stretch = logs[run.model].stretch(run.model, run.first)
        pieces.setdefault((run.model, stretch), []).append(run)
    found: dict[Run, SourceKV] = {}
    for (name, _), members in pieces.items():
        first, last = min(run.first for run in members), max(run.last for run in members)
        try:
            kv = logs[name].source_kv(*models[name], first, last)
        except KVTransferError as error:
            reasons.append(f"what {name} has read cannot be handed over: {error}")
        else:
            found |= {run: kv[run.first - first : run.last - first] for run in members}
    return ((run, found[run]) for run in runs if run in found)


def hold_all(
    model: PreTrainedModel, cache: TranslatedCache, prompt_length: int, ids: Sequence[int]
) -> TranslatedCache:
    """
    A cache of a prompt and a reply that holds all of both: `generate` does not read the last token, and a beam search
    leaves a row for each beam.

    Args:
        model (`PreTrainedModel`):
            The model that has replied.
        cache ([`TranslatedCache`]):
            As `generate` has left it.
        prompt_length (`int`):
            Tokens of the prompt.
        ids (`Sequence[int]`):
            The tokens of both.
    """
    input_ids, held = torch.tensor([ids]), int(cache.get_seq_length())
    if cache.num_rows > 1 or held > len(ids):
        cache.batch_select_indices(torch.tensor([0]))
        held = prompt_length - 1  # up to there all rows are the same
        cut = TranslatedCache.from_segments([Segment(held, held + 1)], model, input_ids, prefix=cache)
        cut.activate_past_recording()
        cache = cut
    if held < len(ids):
        positions = torch.arange(held, len(ids))[None]
        read_into_cache(model, cache, input_ids[:, held:], position_ids=positions)
    return cache
