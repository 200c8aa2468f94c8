"""What `generate` sees: a `DynamicCache` whose layers are translated when the target first asks for them."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .compat import cache_argument
from .errors import BatchMismatchError, PrefixMismatchError
from .mapper import KVMapper
from .source import SourceKV
from .translation import TransferReport, Translation


class LayerTranslator(Protocol):
    """Answers for a pending layer, see [`Translation.layer`]."""

    def layer(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @property
    def default_placement(self) -> tuple[torch.device, torch.dtype]: ...


@dataclasses.dataclass
class Pending:
    """
    What is still to be computed for one layer.

    Args:
        translator (`LayerTranslator`):
            Computes it.
        layer_idx (`int`):
            The target's layer.
        length (`int`):
            Number of tokens, smaller after `crop`.
        rows (`torch.LongTensor`):
            Row of the translation that each row of the cache shows. Batch edits compose here.
    """

    translator: LayerTranslator
    layer_idx: int
    length: int
    rows: torch.Tensor


class _PendingMixin(CacheLayerMixin):
    """
    Answers lengths and takes edits without translating; turns into the stock layer when tensors are needed.

    The instance changes its class to `stock_class`, so that nothing of this is left in the decoding loop.
    """

    stock_class: type
    is_initialized = True  # a pending layer does hold tokens; some models read this to detect the first iteration

    @classmethod
    def from_stock(cls, layer: Any, pending: Pending) -> Any:
        """The pending twin of an empty stock layer. Copies attributes, since constructors differ by version."""
        twin = cls.__new__(cls)
        twin.__dict__.update({k: v for k, v in vars(layer).items() if k not in ("keys", "values", "is_initialized")})
        twin.pending = pending
        if hasattr(twin, "cumulative_length"):  # where sliding layers count
            twin.cumulative_length = pending.length
        return twin

    def materialize(self, device: torch.device, dtype: torch.dtype, batch_size: int | None = None) -> None:
        """
        Translate, and become the stock layer.

        Args:
            device (`torch.device`), dtype (`torch.dtype`):
                Where and as what the tokens are wanted.
            batch_size (`int`, *optional*):
                Rows that the target runs. `generate` repeats each row for beams and returned sequences, but not a
                cache that it was given.

        Raises:
            `BatchMismatchError`: `batch_size` is no multiple of the rows in the cache. The layer stays pending.
        """
        pending = self.pending
        rows = pending.rows
        if batch_size is not None and batch_size != len(rows):
            if batch_size % len(rows):
                raise BatchMismatchError(
                    f"The translated cache holds {len(rows)} rows, the target runs {batch_size}. Translate a source "
                    "with as many rows as there are prompts."
                )
            rows = rows.repeat_interleave(batch_size // len(rows))
        start = 0
        if self.is_sliding and not self.record_past:
            start = max(0, pending.length - self.sliding_window + 1)  # what lies before is never attended again
        try:
            keys, values = pending.translator.layer(pending.layer_idx, start, pending.length, device, dtype)
        except Exception as error:
            error.add_note(f"While translating layer {pending.layer_idx}, tokens {start} to {pending.length}.")
            raise
        if len(rows) != len(keys) or (rows != torch.arange(len(rows))).any():
            keys, values = keys[rows.to(device)], values[rows.to(device)]
        self._become_stock()
        if pending.length:
            self.lazy_initialization(keys, values)
            self.__dict__.update(keys=keys, values=values)

    def _become_stock(self) -> None:
        del self.pending
        self.__class__ = self.stock_class
        self.__dict__.update(keys=None, values=None, is_initialized=False)

    @property
    def keys(self) -> torch.Tensor:
        self._materialize_unasked()
        return self.keys

    @property
    def values(self) -> torch.Tensor:
        self._materialize_unasked()
        return self.values

    def _materialize_unasked(self) -> None:
        self.materialize(*self.pending.translator.default_placement)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.materialize(key_states.device, key_states.dtype, key_states.shape[0])
        return self.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.pending.length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be negative or 0, got {tokens_to_remove}.")
        self.pending.length = max(0, self.pending.length + tokens_to_remove)
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = self.pending.length

    def reset(self) -> None:
        self._become_stock()
        self.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.pending.rows = self.pending.rows.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.pending.rows = self.pending.rows[indices.cpu() if isinstance(indices, torch.Tensor) else indices]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        """There is nothing to move yet."""

    def prefetch(self) -> None:
        """There is nothing to move yet."""


class TranslatedLayer(_PendingMixin, DynamicLayer):
    """A full-attention layer that is translated on first access."""

    stock_class = DynamicLayer


class TranslatedSlidingWindowLayer(_PendingMixin, DynamicSlidingWindowLayer):
    """A sliding-window layer that is translated on first access, as far back as its window sees."""

    stock_class = DynamicSlidingWindowLayer


PENDING_LAYERS = {cls.stock_class: cls for cls in (TranslatedLayer, TranslatedSlidingWindowLayer)}


class TranslatedCache(DynamicCache):
    """
    A cache for a target model, translated layer by layer from a source model's when the target first asks.

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
        revision (`str`, *optional*):
            Revision of a Hub id.

    Raises:
        [`KVTransferError`]: a subclass of it says what does not fit.

    Example:

    ```python
    >>> source_kv = SourceKV.prefill(source, source_tokenizer, context)
    >>> cache = TranslatedCache(source_kv, "org/pair", target, target_tokenizer=target_tokenizer)
    >>> target.generate(**target_tokenizer(context + question, return_tensors="pt"), past_key_values=cache)
    ```
    """

    is_translation = True

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
        revision: str | None = None,
    ):
        if not isinstance(source, SourceKV):
            if source_model is None or source_input_ids is None:
                raise ValueError(
                    f"`source` is a {type(source).__name__}: pass `source_model` and `source_input_ids` with it."
                )
            source = SourceKV.from_cache(source, source_model, source_input_ids, tokenizer=source_tokenizer)
        if isinstance(mapper, str | Path):
            # In the dtype that the target computes in, so that no layer map is converted at every request.
            mapper = cast(KVMapper, KVMapper.from_pretrained(mapper, revision=revision or "main", dtype=target.dtype))
        super().__init__(config=target.config)
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
        self._argument = cache_argument(target)
        self.report: TransferReport = translation.report
        self.input_ids = translation.input_ids
        self.attention_mask = translation.attention_mask
        # Layers as they were before this forward pass, to go back to if a later one fails. Updates replace tensors.
        self._before: dict[int, tuple[type, dict[str, Any]]] = {}
        self._is_settled = False
        for layer_idx, geometry in enumerate(translation.geometry.layers):
            if geometry is not None and translation.length:
                stock = self.layers[layer_idx]
                pending = Pending(translation, layer_idx, translation.length, torch.arange(translation.batch_size))
                self.layers[layer_idx] = PENDING_LAYERS[type(stock)].from_stock(stock, pending)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._is_settled:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._before:
            self._before.clear()  # another forward pass has begun
        layer = self.layers[layer_idx]
        cls, attributes = type(layer), dict(vars(layer))
        if isinstance(layer, _PendingMixin):
            attributes["pending"] = dataclasses.replace(layer.pending)
        try:
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            self._restore()
            raise
        self._before[layer_idx] = cls, attributes
        if not any(isinstance(layer, _PendingMixin) for layer in self.layers):
            self._is_settled = True
            self._before.clear()  # lets go of the source
        return states

    def _restore(self) -> None:
        """Take back what this forward pass has done to layers, so that the cache can be asked again."""
        for layer_idx, (cls, attributes) in self._before.items():
            layer: Any = object.__new__(cls)
            layer.__dict__.update(attributes)
            self.layers[layer_idx] = layer
        self._before.clear()

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """
        Check a prompt against what the cache stands for.

        Args:
            inputs (`dict[str, torch.Tensor]`):
                What the target's tokenizer returned for the whole prompt, left-padded: `input_ids` and
                `attention_mask`, `[batch, tokens]`.

        Returns:
            `dict`: Arguments for `generate`, the cache among them.

        Raises:
            `PrefixMismatchError`: the prompt does not start with [`TranslatedCache.input_ids`], or ends with them.
            `BatchMismatchError`: it has another number of rows.
        """
        input_ids = torch.as_tensor(inputs["input_ids"])
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else torch.as_tensor(mask)
        length = self.get_seq_length()
        if len(input_ids) != len(self.input_ids):
            raise BatchMismatchError(
                f"The prompt has {len(input_ids)} rows, the translated cache {len(self.input_ids)}. Pass one prompt "
                "for each row that the source has read."
            )
        if input_ids.shape[1] <= length:
            raise PrefixMismatchError(
                f"The prompt has {input_ids.shape[1]} tokens, the translated cache already stands for {length}: at "
                "least one token must be left to read. Append to the prompt, or call `cache.crop(-1)`."
            )
        known = self.attention_mask[:, :length].bool()
        found, expected = input_ids[:, :length].cpu(), self.input_ids[:, :length]
        differs = (mask[:, :length].cpu().bool() != known) | (known & (found != expected))
        if differs.any():
            row, column = differs.nonzero()[0].tolist()
            raise PrefixMismatchError(
                f"Row {row} of the prompt has token {found[row, column].item()} at column {column}, the translated "
                f"cache stands for token {expected[row, column].item()} there. Start each prompt with the context "
                "that the source has read (left-padded), or pass the prompt as `input_ids` when making the cache."
            )
        return {**inputs, self._argument: self}
