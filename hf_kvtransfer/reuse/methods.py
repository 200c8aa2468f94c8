"""Reuse by translation: chunks that a source has read, each alone, placed one after another in a new prompt."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import TranslatedCache
from ..effort import Effort, check_effort
from ..fidelity.gate import FidelityGate
from ..fidelity.prompts import PromptEncoder
from ..mapper import KVMapper, mapper_for
from ..segments.segment import Segment
from ..source import SourceKV
from ..translation import check_not_negative
from .request import ReuseRequest


class TranslatedChunks:
    """
    A [`ReuseMethod`]: a source reads each chunk once, and each request translates them to their new positions.

    Args:
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models. They may be the same one, with an identity for a mapper: then only positions change.
        mapper ([`KVMapper`], `str` or `Path`):
            Fitted for the pair.
        source_tokenizer (`PreTrainedTokenizerBase`), target_tokenizer (`PreTrainedTokenizerBase`):
            Their tokenizers.
        reread_tokens (`int`, *optional*, defaults to 0):
            First tokens of each chunk but the first one that the target reads itself, on top of the chunks before:
            they were attention sinks where the source has read them.
        effort (`float` or `"auto"`, *optional*, defaults to 0):
            Share of the tokens that the target reads again at once, those that the question attends to, see
            [`TranslatedCache`].
        gate ([`FidelityGate`], *optional*):
            What is asked of the mapper's evidence.
    """

    def __init__(
        self,
        source: PreTrainedModel,
        target: PreTrainedModel,
        mapper: KVMapper | str | Path,
        *,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        reread_tokens: int = 0,
        effort: Effort = 0.0,
        gate: FidelityGate | None = None,
    ):
        check_not_negative(reread_tokens=reread_tokens)
        check_effort(effort, may_be_auto=True)
        self.source, self.target, self.gate = source, target, gate
        self.reread_tokens, self.effort = reread_tokens, effort
        self.mapper = mapper_for(mapper, target)
        self.source_tokenizer, self.target_tokenizer = source_tokenizer, target_tokenizer
        self._num_front = len(PromptEncoder(source_tokenizer).front)

    def build(self, chunk: str) -> SourceKV:
        return SourceKV.prefill(self.source, self.source_tokenizer, chunk)

    def held_bytes(self, built: SourceKV) -> int:
        return sum(states.nbytes for states in built.features if states is not None)

    def prepare(self, request: ReuseRequest, built: list[SourceKV]) -> TranslatedCache:
        segments = []
        for (start, stop), source_kv in zip(request.ranges, built, strict=True):
            reread = min(start + (self.reread_tokens if start else 0), stop)
            if reread > start:
                segments.append(Segment(start, reread))
            if reread < stop:
                # What a tokenizer puts in front of a text stands once in a prompt.
                front = self._num_front if start else 0
                segments.append(Segment(reread, stop, source_kv[front:], self.mapper))
        return TranslatedCache.from_segments(
            segments,
            self.target,
            request.input_ids,
            target_tokenizer=self.target_tokenizer,
            gate=self.gate,
            probe_tokens=0,
            effort=self.effort,
        )
