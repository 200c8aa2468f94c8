"""What `generate` sees: a `DynamicCache` that is translated, or empty if the translation cannot be trusted."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.utils import logging

from .admission import Admission
from .effort import Effort, check_effort, read_again
from .errors import KVTransferError, PrefixMismatchError, RefusedError
from .fidelity.gate import FidelityGate
from .fidelity.tail_probe import probe_tail
from .identity.one_look import one_look
from .layers import LayerTranslator, install
from .mapper import KVMapper
from .restoring_cache import RestoringCache, describe
from .segments.binding import SegmentBinding
from .segments.joined import SegmentedTranslation
from .segments.segment import Segment, check_segments
from .source import SourceKV
from .storage import check_filled, check_room, take_storage
from .transfer_report import TransferReport
from .translation import Translation, check_not_negative


if TYPE_CHECKING:
    from .policy import TransferPolicy

logger = logging.get_logger(__name__)

OnRefusal = Literal["recompute", "raise"]


class TranslatedCache(RestoringCache):
    """
    A cache for a target model, translated layer by layer from a source model's when the target first asks.

    If the mapper's evidence does not admit it, the translation fails, or the target's loss on the end of the context
    is not what a right translation leads one to expect, the cache is empty instead, and `generate` reads the whole
    prompt as it would have done without it. `report` says which happened, and why.

    Args:
        source ([`SourceKV`] or `Cache`):
            What the source has read. A plain cache needs `source_model` and `source_input_ids`.
        mapper ([`KVMapper`], `str` or `Path`):
            Fitted for this pair, or the folder or Hub id of one.
        target (`PreTrainedModel`):
            The model that will continue.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed if the two models' tokenizers differ.
        input_ids (`torch.LongTensor`, *optional*):
            The target's ids of the prompt, `[batch, tokens]`, left-padded. By default the source's text through
            `target_tokenizer`. Give it if the prompt is rendered differently on the two sides (chat templates), or if
            the rows of a batch go on at different places.
        attention_mask (`torch.LongTensor`, *optional*):
            Goes with `input_ids`.
        source_model (`PreTrainedModel`, *optional*), source_input_ids (`torch.LongTensor`, *optional*),
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For a plain cache as `source`, see [`SourceKV.from_cache`].
        sink_tokens (`int`, *optional*):
            First tokens that the target reads itself, by default as many as were left out of the mapper's fit.
        tail_tokens (`int`, *optional*, defaults to 1):
            Last tokens of the context that are held back for the target to read. At least 1 if the prompt is no longer
            than the context: `generate` reads everything twice when the cache is as long as the prompt.
        probe_tokens (`int`, *optional*):
            Tokens before these that the target reads at once, on top of the translated rest, to compare what it makes
            of them with the bands in the mapper's evidence: 8, 16 or 32, other numbers are rounded down to one of
            these, and contexts of less than twice as many tokens are probed with fewer, below 16 not at all. By
            default as many as the evidence recommends; 0 for no probe.
        effort (`float` or `"auto"`, *optional*, defaults to 0):
            Share of the translated tokens that the target reads again, from 0, where all are translated, to 1, which
            is a prefill. It reads them at once, on top of the others: those that the end of `input_ids` attends to, if
            at least 4 tokens of it are not translated, or else those of which its own first layers make something
            else. Rows must be without padding. The probe is of the translation, before. `"auto"` is the least of 0
            and the efforts that the mapper's evidence has measured with which the gate admits it.
        storage (`Cache`, *optional*):
            How the target's tokens are stored: an empty cache of transformers, made with the target's config, whose
            layers are copied. `StaticCache(target.config, max_cache_len=4096)` for a compiled decode,
            `DynamicCache(config=target.config, offloading=True)`, or `QuantizedCache("quanto", target.config)`, which
            the evidence must have been measured with. By default `DynamicCache(config=target.config)`.
        gate ([`FidelityGate`], *optional*):
            What is asked of the mapper's evidence.
        policy ([`TransferPolicy`], *optional*):
            Is asked first whether a handoff of as many tokens as the source has read is worth it. By default any is.
        on_refusal (`str`, *optional*, defaults to `"recompute"`):
            `"recompute"` leaves the cache empty, with a warning, `"raise"` raises.
        revision (`str`, *optional*):
            Revision of a Hub id.

    Raises:
        `ValueError`: an argument that is wrong whatever the models.
        [`KVTransferError`]: with `on_refusal="raise"`, a subclass of it says what does not fit; [`RefusedError`] if it
            is the policy, the gate or the probe that refuses. What goes wrong in the models themselves is raised as it
            is.

    Example:

    ```python
    >>> source_kv = SourceKV.prefill(source, source_tokenizer, context)
    >>> cache = TranslatedCache(source_kv, "org/pair", target, target_tokenizer=target_tokenizer)
    >>> target.generate(**target_tokenizer(context + question, return_tensors="pt"), past_key_values=cache)
    >>> print(cache.report)
    ```
    """

    def __init__(
        self,
        source: SourceKV | Cache,
        mapper: KVMapper | str | Path,
        target: PreTrainedModel,
        *,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        source_model: PreTrainedModel | None = None,
        source_input_ids: torch.Tensor | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        sink_tokens: int | None = None,
        tail_tokens: int = 1,
        probe_tokens: int | None = None,
        effort: Effort = 0.0,
        storage: Cache | None = None,
        gate: FidelityGate | None = None,
        policy: "TransferPolicy | None" = None,
        on_refusal: OnRefusal = "recompute",
        revision: str | None = None,
    ):
        check_not_negative(sink_tokens=sink_tokens, tail_tokens=tail_tokens, probe_tokens=probe_tokens)
        check_effort(effort, may_be_auto=True)
        if not isinstance(source, SourceKV) and (source_model is None or source_input_ids is None):
            raise ValueError(
                f"`source` is a {type(source).__name__}: pass `source_model` and `source_input_ids` with it."
            )
        self._begin(target, storage, on_refusal, mapper.name if isinstance(mapper, KVMapper) else str(mapper))
        admission = Admission(gate, target, target_tokenizer, sink_tokens, tail_tokens, storage, effort, revision)

        @functools.cache
        def source_kv() -> SourceKV:
            if isinstance(source, SourceKV):
                return source
            return SourceKV.from_cache(source, source_model, source_input_ids, tokenizer=source_tokenizer)

        if policy is not None:
            foreseen = admission.foresee_effort(mapper, source_kv)
            if not self._is_worth_it(policy, source, source_input_ids, foreseen, input_ids):
                return

        def bind() -> Translation:
            return Translation(
                source_kv(),
                admission.admit(mapper, source_kv()),
                target,
                target_tokenizer=target_tokenizer,
                input_ids=input_ids,
                attention_mask=attention_mask,
                sink_tokens=sink_tokens,
                tail_tokens=tail_tokens,
            )

        self._stand_for(bind, admission, probe_tokens)

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[Segment],
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        prefix: Cache | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        sink_tokens: int | None = None,
        tail_tokens: int = 1,
        probe_tokens: int | None = None,
        effort: Effort = 0.0,
        storage: Cache | None = None,
        gate: FidelityGate | None = None,
        on_refusal: OnRefusal = "recompute",
    ) -> "TranslatedCache":
        """
        A cache of which ranges come from several sources, through a mapper each, and others from the target itself.

        Translated ranges stand for themselves: they depend on nothing that precedes them. Native ranges are read on
        top of all that precedes them, so those between translated ones are read at once, in order, and what they stand
        on is translated for all layers. A range whose mapper the gate refuses, or that is not the text of its source,
        is native, too; the cache is empty if that leaves nothing, or if the probe refuses.

        Args:
            segments (`Sequence[Segment]`):
                One after the other, without gaps, from the prompt's first token or from the end of `prefix`. What
                stands behind the last translated one is left for `generate` to read.
            target (`PreTrainedModel`):
                The model that will continue.
            input_ids (`torch.LongTensor`), attention_mask (`torch.LongTensor`, *optional*):
                The target's ids of the prompt, `[batch, tokens]`, rows without padding.
            prefix (`Cache`, *optional*):
                What the target has in a cache of the prompt's first tokens, every one in every layer (see
                `activate_past_recording`). It is left as it is, and stands by itself where the segments are refused.
            target_tokenizer, sink_tokens, tail_tokens, probe_tokens, effort, storage, gate, on_refusal:
                As of [`TranslatedCache`]: the tail is that of the prompt, the probe of the last translated segment.
                `effort` is a share of the tokens from the first translated one on.

        Raises:
            `ValueError`: segments that overlap, leave a gap or reach beyond the prompt or the target's positions.
            `BatchMismatchError`: rows are padded, or not those of `prefix`.
            `SourceCacheError`: `prefix` has dropped tokens.
            [`KVTransferError`]: with `on_refusal="raise"`, also for a single segment that cannot be translated.
        """
        check_not_negative(sink_tokens=sink_tokens, tail_tokens=tail_tokens, probe_tokens=probe_tokens)
        check_effort(effort, may_be_auto=True)
        held = 0 if prefix is None else int(prefix.get_seq_length())
        first = min(segments[0].start, held) if segments else held
        num_tokens = input_ids.shape[1]
        check_segments(segments, first, num_tokens, target)
        length = max(num_tokens - tail_tokens, 0)
        binding = SegmentBinding(target, target_tokenizer, input_ids, attention_mask, length, prefix, first)
        cache = cls.__new__(cls)
        cache._begin(target, storage, on_refusal, "no mapper")
        admission = Admission(gate, target, target_tokenizer, sink_tokens, None, storage, effort)

        def bind() -> SegmentedTranslation:
            return binding.bind(segments, admission, sink_tokens, raises=on_refusal == "raise")

        cache._stand_for(bind, admission, probe_tokens, binding.prefix)
        known = getattr(prefix, "translated_mask", None)
        if known is not None and known.numel():
            known = known[:, : cache._num_prefix]
            cache.translated_mask[:, : known.shape[1]] |= known
        return cache

    def _begin(self, target: PreTrainedModel, storage: Cache | None, on_refusal: OnRefusal, mapper: str) -> None:
        """Be an empty cache."""
        if on_refusal not in ("recompute", "raise"):
            raise ValueError(f"`on_refusal` must be 'recompute' or 'raise', got {on_refusal!r}.")
        super().__init__(target)
        if storage is not None:
            take_storage(self, storage)
        self._on_refusal, self._num_prefix = on_refusal, 0
        self.report = TransferReport("recomputed", mapper)

    def _stand_for(
        self,
        bind: Callable[[], Translation | SegmentedTranslation],
        admission: Admission,
        probe_tokens: int | None,
        prefix: SegmentedTranslation | None = None,
    ) -> None:
        """Hold what `bind` gives if nothing speaks against it, else the prefix, if there is one."""
        translation: Translation | SegmentedTranslation
        translator: LayerTranslator
        probe = None
        try:
            with one_look():
                translation = bind()
            translator, probe = probe_tail(translation, probe_tokens)
            if probe is not None and not probe.passed:
                raise RefusedError(f"The translated cache does not stand for this context: {probe}.")
            translated, probed = translation.translated_mask.clone(), 0 if probe is None else probe.tokens
            translated[:, translation.length - probed :] = False
            if admission.effort:
                translator, read = read_again(translation, translator, admission.effort, probed)
                translated &= ~read
            outcome = "translated" if translation.segments else "recomputed"
            self.report = TransferReport.make(
                outcome,
                translation,
                int(translated.sum()),
                verdict=admission.verdict,
                probe=probe,
                effort=admission.effort,
                effort_reasons=admission.effort_reasons,
            )
        # Whatever fails while nothing has been used yet costs time only; wrong arguments were refused before.
        except Exception as error:
            if self._on_refusal == "raise":
                raise
            if admission.mappers:
                mappers, verdict = admission.mappers, admission.verdict
                self.report = dataclasses.replace(TransferReport.named(mappers), verdict=verdict, probe=probe)
            self._refuse(describe(error))
            if prefix is None:
                return
            translation, translator, translated = prefix, prefix, prefix.translated_mask.clone()
        check_room(self, translation.geometry, translation.length)
        self.input_ids, self.attention_mask = translation.input_ids, translation.attention_mask
        self.translated_mask = translated
        self._num_prefix = 0 if prefix is None else prefix.length
        install(self, translator)

    def _forget(self) -> None:
        super()._forget()
        # Where keys and values are translated, `[batch, tokens]`; the target has read all tokens behind it.
        self.translated_mask = self.attention_mask.bool()

    def _is_worth_it(
        self,
        policy: "TransferPolicy",
        source: SourceKV | Cache,
        source_input_ids: torch.Tensor | None,
        effort: float,
        prompt_ids: torch.Tensor | None,
    ) -> bool:
        input_ids = cast(torch.Tensor, source.input_ids if isinstance(source, SourceKV) else source_input_ids)
        tokens = input_ids.shape[-1]
        question = 0 if prompt_ids is None else max(prompt_ids.shape[-1] - tokens, 0)
        decision = policy.decide(tokens, len(input_ids) if input_ids.dim() == 2 else 1, effort, question)
        if decision.choice == "recompute":
            if self._on_refusal == "raise":
                raise RefusedError(f"A handoff is not worth it: {decision.reason}.")
            # Nothing is wrong: it is what the policy is for, and no warning.
            self.report = dataclasses.replace(self.report, reasons=(str(decision),))
            logger.info(str(self.report))
        return decision.choice == "transfer"

    @property
    def is_translation(self) -> bool:
        """Whether tokens are translated, and the cache is thus no source for a translation of them."""
        return bool(self.translated_mask.any())

    @property
    def _may_recompute(self) -> bool:
        return self._on_refusal == "recompute" and self.report.outcome == "translated"

    @property
    def _exact_layers(self) -> int:
        # Of what the prefix is made of nothing is known here.
        exact = self.report.native_layers
        return -1 if exact is None or self._num_prefix else exact

    def reset(self) -> None:
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        check_filled(self, "crop")
        super().crop(tokens_to_remove)
        self.translated_mask = self.translated_mask[:, : self.input_ids.shape[1]]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        check_filled(self, "reorder_cache")
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        check_filled(self, "batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        check_filled(self, "batch_select_indices")
        super().batch_select_indices(indices)

    def _refuse(self, failure: str) -> None:
        report = self.report
        refused_by_gate = report.verdict is not None and not report.verdict.admitted
        reasons = report.verdict.reasons if refused_by_gate else (failure,)
        self.report = dataclasses.replace(
            report,
            outcome="recomputed",
            reasons=reasons,
            translated_tokens=0,
            native_tokens=report.native_tokens + report.translated_tokens,
        )
        self.translated_mask = torch.zeros_like(self.translated_mask)
        logger.warning(str(self.report))

    def _give_up(self, error: KVTransferError) -> None:
        if self._on_refusal == "raise":
            raise error
        self.reset()
        self._refuse(describe(error))

    def _keep(self, columns: int, difference: str | None) -> None:
        report = self.report
        translated = int(self.translated_mask[:, self._num_prefix : columns].sum())
        if report.translated_tokens and not translated and not self._num_prefix:
            why = difference or f"of its {columns + 1} tokens the last is to be read"
            return self._give_up(
                PrefixMismatchError(
                    f"The prompt begins with nothing that was translated: {why}. Start it with the context that the "
                    "source has read (left-padded), or pass it as `input_ids` when making the cache."
                )
            )
        if difference is not None:
            logger.warning(f"{columns} tokens of the translated cache are kept: {difference}.")
        super()._keep(columns, difference)
        if self.report is report:  # and not given up
            lost = report.translated_tokens - translated
            self.report = dataclasses.replace(
                report, translated_tokens=translated, held_back_tokens=report.held_back_tokens + lost
            )
