"""What one mapped segment says about its range of a prompt."""

from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..alignment import TokenAlignment, align_tokens
from ..alignment.spans import Span, character_spans
from ..errors import AlignmentError, BatchMismatchError, PrefixMismatchError
from ..mapper import KVMapper
from ..source import SourceKV
from ..target_tokens import TargetTokens
from ..translation import MIN_COVERAGE, Translation
from .segment import Segment


class SegmentedPrompt:
    """
    The target's prompt, of which segments are ranges.

    Args:
        target (`PreTrainedModel`):
            The model that will continue.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed for sources with another one.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, without padding.
        length (`int`):
            How many of them are cached at most.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        input_ids: torch.Tensor,
        length: int,
    ):
        self.length = length
        self.target, self.tokenizer, self.input_ids = target, tokenizer, input_ids.cpu()
        self.attention_mask = torch.ones_like(self.input_ids)
        self.position_ids = torch.arange(self.input_ids.shape[1]).expand_as(self.input_ids)
        cached = (states[:, :length] for states in (self.input_ids, self.attention_mask, self.position_ids))
        self.tokens = TargetTokens(target, *cached)

    @cached_property
    def _decoded(self) -> list[tuple[str, list[Span]]]:
        return [character_spans(self.tokenizer, row) for row in self.input_ids.tolist()]

    def text(self, row: int, start: int, stop: int) -> tuple[str, list[Span]]:
        """The text of a range of tokens, and the characters of it that each of them stands for."""
        text, spans = self._decoded[row]
        begin = min(first for first, _ in spans[start:stop])
        end = max(behind for _, behind in spans[start:stop])
        return text[begin:end], [(first - begin, behind - begin) for first, behind in spans[start:stop]]


class SegmentTranslation(Translation):
    """
    Answers, as a [`Translation`], for the tokens of one segment, by their numbers in the whole prompt.

    Tokens at either end of the segment that the source has not read, such as those of a chat template, do not belong
    to it: it stands for tokens `start` to `length`.

    Args:
        segment ([`Segment`]):
            One with a source.
        mapper ([`KVMapper`]):
            That of the segment.
        prompt ([`SegmentedPrompt`]):
            What it is a range of.
        sink_tokens (`int`):
            First tokens of the prompt that the target reads itself.
        layer_seconds (`dict[int, float]`):
            Where to add how long each layer took.

    Raises:
        `PairMismatchError`, `TokenizerMismatchError`, `AlignmentError`, `BatchMismatchError`, `UnsupportedModelError`
        `PrefixMismatchError`: the models share a tokenizer, and the source has read other tokens.
    """

    def __init__(
        self,
        segment: Segment,
        mapper: KVMapper,
        prompt: SegmentedPrompt,
        sink_tokens: int,
        layer_seconds: dict[int, float],
    ):
        source_kv: SourceKV = segment.source_kv
        self._bind(source_kv, mapper, prompt.target, prompt.tokenizer)
        rows = len(prompt.input_ids)
        if source_kv.batch_size != rows or not source_kv.attention_mask.all():
            raise BatchMismatchError(
                f"The source of segment {segment} has {source_kv.batch_size} rows, the prompt {rows}; and rows of "
                "several segments must be without padding. Translate rows of other lengths one by one."
            )
        stop = min(segment.stop, prompt.length)
        alignments = [self._align_row(segment, prompt, row, stop) for row in range(rows)]
        # No further than every row's source can speak.
        self.start = max(sink_tokens, segment.start + max(int(a.aligned.long().argmax()) for a in alignments))
        self.length = min(stop, segment.start + min(a.last_aligned for a in alignments) + 1)
        first, last = self.start - segment.start, max(self.length - segment.start, 0)
        read = [alignment[first:last] for alignment in alignments]
        self.coverage = sum(alignment.coverage for alignment in read) / rows
        self.boundary_share = sum(alignment.boundary_share for alignment in read) / rows
        if self.length <= self.start or self.coverage < MIN_COVERAGE:
            raise AlignmentError(
                f"Of the target's tokens {segment} only {self.coverage if last > first else 0:.0%} are text that the "
                f"segment's source has read, at least {MIN_COVERAGE:.0%} are needed. Check that `source_kv` is cut to "
                "the same text."
            )
        self.input_ids, self.attention_mask, self.position_ids = (
            states[:, : self.length] for states in (prompt.input_ids, prompt.attention_mask, prompt.position_ids)
        )
        self.known_ids, self.key_positions = self.input_ids, self.position_ids
        self.source_index = torch.zeros_like(self.input_ids)
        self.source_index[:, self.start :] = torch.stack([alignment.source_index for alignment in read])
        self._in_step = bool((self.source_index == torch.arange(self.length)).all())
        # The target reads the prompt's first tokens before any segment.
        self.num_sinks, self._first_token = 0, torch.zeros(rows, dtype=torch.long)
        self._target_tokens, self.layer_seconds = prompt.tokens, layer_seconds

    @property
    def mapped_tokens(self) -> int:
        return self.length - self.start

    def _align_row(self, segment: Segment, prompt: SegmentedPrompt, row: int, stop: int) -> TokenAlignment:
        source_kv: SourceKV = segment.source_kv
        ids, read = prompt.input_ids[row, segment.start : stop], source_kv.input_ids[row]
        if self.mapper.config.source["tokenizer"] == self.mapper.config.target["tokenizer"]:
            if torch.equal(read[: len(ids)], ids):
                return TokenAlignment.identity(len(ids))
            if source_kv.text is None or prompt.tokenizer is None:
                raise PrefixMismatchError(
                    f"Tokens {segment} of row {row} of `input_ids` begin with {ids[:8].tolist()} ({len(ids)} tokens), "
                    f"the segment's source has read {read[:8].tolist()} ({len(read)}). Cut `source_kv` to this range."
                )
        text, spans = prompt.text(row, segment.start, stop)
        return align_tokens(source_kv.text[row], source_kv.row_spans(row), text, spans)
