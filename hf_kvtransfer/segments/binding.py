"""From a list of segments to a translation: what can be translated is, and the target reads the rest."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..admission import Admission
from ..completeness import check_holds_every_token
from ..errors import BatchMismatchError, KVTransferError, RefusedError
from ..geometry import KVGeometry
from .joined import SegmentedTranslation
from .mapped import SegmentedPrompt, SegmentTranslation
from .segment import Segment


class SegmentBinding:
    """
    Binds segments to a target's prompt.

    Args:
        target (`PreTrainedModel`):
            The model that will continue.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed for sources with another one.
        input_ids (`torch.LongTensor`), attention_mask (`torch.LongTensor`, *optional*):
            The prompt, `[batch, tokens]`.
        length (`int`):
            Tokens of it that may be cached.
        prefix (`Cache`, *optional*), num_prefix (`int`):
            What the target has in a cache already of its first tokens, and how many of them are to be used.

    Raises:
        `BatchMismatchError`: rows are padded, or as many as in `prefix`.
        `SourceCacheError`: `prefix` does not hold every token.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        length: int,
        prefix: Cache | None,
        num_prefix: int,
    ):
        if attention_mask is not None and not attention_mask.all():
            raise BatchMismatchError(
                "Rows of several segments must be without padding, but `attention_mask` has zeros. Make a cache for "
                "each row, or group rows of one length."
            )
        self.length = length
        self.prompt = SegmentedPrompt(target, tokenizer, input_ids, length)
        if prefix is not None:
            held = int(prefix.get_seq_length())
            check_holds_every_token(prefix, KVGeometry.from_model(target), len(input_ids), held)
        self._prefix, self._num_prefix = prefix, num_prefix

    @property
    def prefix(self) -> SegmentedTranslation | None:
        """What stands before the segments, if anything does."""
        return SegmentedTranslation(self.prompt, self._prefix, self._num_prefix) if self._num_prefix else None

    def bind(
        self,
        segments: Sequence[Segment],
        admission: Admission,
        sink_tokens: int | None,
        raises: bool,
    ) -> SegmentedTranslation:
        """
        Bind the segments, and let the target read what stands between those that are translated.

        Args:
            segments (`Sequence[Segment]`):
                In order, from the end of the prefix.
            admission ([`Admission`]):
                Admits their mappers.
            sink_tokens (`int`, *optional*):
                First tokens that the target reads itself, by default as in the fit of each mapper.
            raises (`bool`):
                Whether a segment that cannot be translated is an error; else the target reads it.

        Raises:
            `RefusedError`: none of several segments can be translated.
        """
        bound: list[SegmentTranslation] = []
        reasons: list[str] = []
        start = SegmentedTranslation(self.prompt, self._prefix, self._num_prefix)
        for segment in segments:
            if segment.is_native or segment.start >= self.length:
                continue
            try:
                mapper = admission.admit(segment.mapper, segment.source_kv)
                sinks = mapper.config.sink_tokens if sink_tokens is None else sink_tokens
                if min(segment.stop, self.length) > sinks:
                    bound.append(SegmentTranslation(segment, mapper, self.prompt, sinks, start.layer_seconds))
            except KVTransferError as error:
                if raises:
                    raise
                reasons.append(f"tokens {segment} are the target's to read: {error}")
        if reasons and not bound:
            raise RefusedError("No segment can be translated:\n  - " + "\n  - ".join(reasons))
        translation = start
        for segment_translation in bound:
            # What is left out behind the last of them is read with the rest of the prompt.
            if segment_translation.start > translation.length:
                translation = translation.then_read(segment_translation.start)
            translation = translation.then(segment_translation)
        translation.reasons = tuple(reasons)
        return translation
