"""What `generate` sees: a `DynamicCache` that is translated, or empty if the translation cannot be trusted."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.utils import logging

from .errors import BatchMismatchError, EvidenceError, KVTransferError, PrefixMismatchError, RefusedError
from .fidelity.gate import FidelityGate
from .fidelity.probe_band import ProbeBand, ProbeResult
from .fidelity.tail_reading import read_tail
from .guarded_cache import GuardedCache
from .layers import FilledTranslator, LayerTranslator, PendingLayer, install
from .mapper import KVMapper
from .snapshots import Growth, Snapshot
from .source import SourceKV
from .storage import check_filled, check_room, take_storage
from .transfer_report import TransferReport
from .translation import Translation, check_not_negative


logger = logging.get_logger(__name__)


class TranslatedCache(GuardedCache):
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
        storage (`Cache`, *optional*):
            How the target's tokens are stored: an empty cache of transformers, made with the target's config, whose
            layers are copied. `StaticCache(target.config, max_cache_len=4096)` for a compiled decode,
            `DynamicCache(config=target.config, offloading=True)`, or `QuantizedCache("quanto", target.config)`, which
            the evidence must have been measured with. By default `DynamicCache(config=target.config)`.
        gate ([`FidelityGate`], *optional*):
            What is asked of the mapper's evidence.
        on_refusal (`str`, *optional*, defaults to `"recompute"`):
            `"recompute"` leaves the cache empty, with a warning, `"raise"` raises.
        revision (`str`, *optional*):
            Revision of a Hub id.

    Raises:
        `ValueError`: an argument that is wrong whatever the models.
        [`KVTransferError`]: with `on_refusal="raise"`, a subclass of it says what does not fit; [`RefusedError`] if it
            is the gate or the probe that refuses. What goes wrong in the models themselves is raised as it is.

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
        storage: Cache | None = None,
        gate: FidelityGate | None = None,
        on_refusal: Literal["recompute", "raise"] = "recompute",
        revision: str | None = None,
    ):
        check_not_negative(sink_tokens=sink_tokens, tail_tokens=tail_tokens, probe_tokens=probe_tokens)
        if on_refusal not in ("recompute", "raise"):
            raise ValueError(f"`on_refusal` must be 'recompute' or 'raise', got {on_refusal!r}.")
        if not isinstance(source, SourceKV) and (source_model is None or source_input_ids is None):
            raise ValueError(
                f"`source` is a {type(source).__name__}: pass `source_model` and `source_input_ids` with it."
            )
        super().__init__(target)
        if storage is not None:
            take_storage(self, storage)
        self._on_refusal = on_refusal
        # Layers as they were before this forward pass, to go back to if a later one fails.
        self._before: dict[int, Snapshot] = {}
        self._is_settled = False
        self.report = TransferReport("recomputed", mapper.name if isinstance(mapper, KVMapper) else str(mapper))
        try:
            if not isinstance(source, SourceKV):
                source = SourceKV.from_cache(source, source_model, source_input_ids, tokenizer=source_tokenizer)
            if not isinstance(mapper, KVMapper):
                # In the dtype that the target computes in, so that no layer map is converted at every request.
                mapper = cast(
                    KVMapper, KVMapper.from_pretrained(mapper, revision=revision or "main", dtype=target.dtype)
                )
            verdict = (gate or FidelityGate()).admit(
                mapper,
                source,
                target,
                target_tokenizer=target_tokenizer,
                sink_tokens=sink_tokens,
                target_cache=storage,
            )
            self.report = TransferReport.make("recomputed", mapper, verdict=verdict)
            if not verdict.admitted:
                raise RefusedError(str(verdict))
            translation = Translation(
                source,
                mapper,
                target,
                target_tokenizer=target_tokenizer,
                input_ids=input_ids,
                attention_mask=attention_mask,
                sink_tokens=sink_tokens,
                tail_tokens=tail_tokens,
            )
            translator, probe = _probe(translation, mapper, probe_tokens)
            self.report = TransferReport.make("recomputed", mapper, verdict=verdict, probe=probe)
            if probe is not None and not probe.passed:
                raise RefusedError(f"The translated cache does not stand for this context: {probe}.")
        # Whatever fails while nothing has been used yet costs time only; wrong arguments were refused above.
        except Exception as error:
            if on_refusal == "raise":
                raise
            self._refuse(_describe(error))
            return
        check_room(self, translation.geometry, translation.length)
        self.input_ids, self.attention_mask = translation.input_ids, translation.attention_mask
        self.report = TransferReport.make("translated", mapper, translation, verdict=verdict, probe=probe)
        install(self, translator)

    @property
    def is_translation(self) -> bool:
        """Whether tokens are translated, and the cache is thus no source for another translation."""
        return self.report.outcome == "translated" and self.input_ids.shape[1] > 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._is_settled:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._before:
            self._before.clear()  # another forward pass has begun
        before, failure = Snapshot.of(self.layers[layer_idx]), None
        try:
            states = self._translate_and_update(key_states, value_states, layer_idx, before, *args, **kwargs)
        except BaseException as error:
            if "pending" in before.attributes:
                error.add_note(str(before.attributes["pending"]))
            # What native layers have given in this pass is what a prefill gives: it may stay.
            exact = -1 if self.report.native_layers is None else self.report.native_layers
            used, self._before = self._before, {layer_idx: before}
            self._restore()
            if any(i > exact for i in used) or not self._can_recompute(error, exact):
                self._before = used
                self._restore()
                raise
            self._before = used
            failure = _describe(error)
        if failure is not None:
            # Not while the error is handled: it would keep alive what the translation had allocated.
            self._recompute(failure)
            states = self._translate_and_update(key_states, value_states, layer_idx, before, *args, **kwargs)
        if not any(isinstance(layer, PendingLayer) for layer in self.layers):
            self._is_settled = True
            self._before.clear()
        return states

    def _translate_and_update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        before: Snapshot,
        *args,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        if isinstance(layer, PendingLayer):
            layer.materialize(key_states.device, key_states.dtype, key_states.shape[0])
        growth = Growth.of(layer)
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # Rather than what it was translated from, which its last reader lets go of.
        self._before[layer_idx] = before if growth is None else growth.before(layer, states)
        return states

    def _restore(self) -> None:
        """Take back what this forward pass has done to layers, so that the cache can be asked again."""
        for layer_idx, snapshot in self._before.items():
            self.layers[layer_idx] = snapshot.restored()
        self._before.clear()

    def _can_recompute(self, error: BaseException, exact: int) -> bool:
        """Whether the target can still read the context itself: no mapped layer was used before, and it would help."""
        # Layers that share another one's states count as initialised, but hold nothing.
        own = [
            layer
            for i, layer in enumerate(self.layers)
            if (i > exact or isinstance(layer, PendingLayer))
            and layer.is_initialized
            and not getattr(layer, "is_dummy", False)
        ]
        return (
            self._on_refusal == "recompute"
            and self.is_translation
            and isinstance(error, Exception)
            and not isinstance(error, BatchMismatchError)
            and bool(own)
            and all(isinstance(layer, PendingLayer) for layer in own)
        )

    def _recompute(self, failure: str) -> None:
        """Let the target read the context, in the middle of its forward pass, and stand in for the translation."""
        pending = [layer for layer in self.layers if isinstance(layer, PendingLayer)]
        translator = pending[0].pending.translator
        native = FilledTranslator(translator, translator.prefill())
        for layer in pending:
            layer.pending.translator = native.only(layer.pending.layer_idx)
        self._refuse(failure)

    def reset(self) -> None:
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        check_filled(self, "crop")
        super().crop(tokens_to_remove)

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
        logger.warning(str(self.report))

    def _give_up(self, error: KVTransferError) -> None:
        if self._on_refusal == "raise":
            raise error
        self.reset()
        self._refuse(_describe(error))

    def _keep(self, columns: int, difference: str | None) -> None:
        report = self.report
        # What was read after the translation goes first.
        translated = min(int(self.attention_mask[:, :columns].sum()) - report.native_tokens, report.translated_tokens)
        if self.is_translation and translated <= 0:
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
        if self.is_translation:
            lost = report.translated_tokens - translated
            self.report = dataclasses.replace(
                report, translated_tokens=translated, held_back_tokens=report.held_back_tokens + lost
            )

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: keys and values, and nothing of the models that they are from."""
        for layer in self.layers:
            if isinstance(layer, PendingLayer):
                layer.materialize_unasked()
        self._before.clear()
        return dict(vars(self))


def _probe(
    translation: Translation, mapper: KVMapper, wanted: int | None
) -> tuple[LayerTranslator, ProbeResult | None]:
    """Let the target read the tail, if there is a band to compare its loss with."""
    try:
        report = mapper.evidence
    except EvidenceError:  # which only a gate that is not strict has admitted
        report = None
    band = None if report is None or report.probe is None else ProbeBand.from_dict(report.probe)
    if band is None and wanted:
        raise EvidenceError(
            f"`probe_tokens` is {wanted}, but the evidence of mapper {mapper.name} has no band to compare the loss on "
            "them with. Evaluate the mapper on more text, or leave `probe_tokens` out."
        )
    tokens = 0
    if band is not None and translation.length:
        shortest = int(translation.attention_mask.sum(-1).min())
        tokens = band.num_tokens(shortest - translation.num_sinks, wanted)
    if not tokens:
        return translation, None
    readings, cache = read_tail(translation, tokens)
    return FilledTranslator(translation, cache), band.judge(readings, tokens)


def _describe(error: BaseException) -> str:
    text, notes = f"{type(error).__name__}: {error}", getattr(error, "__notes__", ())
    return " ".join([text.rstrip(".") + ".", *notes]) if notes else text
