"""Cache layers that are translated when the target first asks for them, and are stock layers from then on."""

import copy
import dataclasses
import types
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from .errors import BatchMismatchError
from .geometry import KVGeometry


class LayerTranslator(Protocol):
    """Answers for pending layers, see [`Translation`]."""

    geometry: KVGeometry
    length: int

    @property
    def batch_size(self) -> int: ...

    @property
    def description(self) -> str: ...

    def layer(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @property
    def default_placement(self) -> tuple[torch.device, torch.dtype]: ...

    def prefill(self) -> DynamicCache: ...

    def check_target(self) -> None:
        """Raise [`PairMismatchError`] if the target is not any more what it was when the request was bound."""
        ...

    def only(self, layer_idx: int) -> "LayerTranslator":
        """The same for one layer, which keeps alive no more of the source than that layer reads."""
        ...


@dataclasses.dataclass
class Pending:
    """
    What is still to be computed for one layer.

    Args:
        translator (`LayerTranslator`):
            Computes it. It holds what this layer reads: the source layer is let go of by its last reader.
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

    def __str__(self) -> str:
        return f"While layer {self.layer_idx} was translated, {self.length} tokens: {self.translator.description}."


class PendingLayer(CacheLayerMixin):
    """
    Answers lengths and takes edits without translating; turns into the stock layer when tensors are needed.

    The instance changes its class to `stock_class`, so that nothing of this is left in the decoding loop. That
    may be any class of transformers that stores keys and values token by token: growing, with a window, pre-allocated,
    quantised.
    """

    stock_class: type
    is_initialized = True  # a pending layer does hold tokens; some models read this to detect the first iteration

    @classmethod
    def from_stock(cls, layer: Any, pending: Pending) -> Any:
        """The pending twin of an empty stock layer. Copies attributes, since constructors differ by version."""
        twin = cls.__new__(cls)
        twin.__dict__.update({k: v for k, v in vars(layer).items() if k not in ("keys", "values", "is_initialized")})
        twin.pending = pending
        _count(twin, pending.length)
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
        start = self._first_token()
        keys, values = pending.translator.layer(pending.layer_idx, start, pending.length, device, dtype)
        if len(rows) != len(keys) or (rows != torch.arange(len(rows))).any():
            keys, values = keys[rows.to(device)], values[rows.to(device)]
        self._become_stock()
        if pending.length:
            _fill(self, keys, values)
            _count(self, pending.length)

    def _first_token(self) -> int:
        """The first token that the stock layer would hold: what lies before is never attended again."""
        if not self.is_sliding or getattr(self, "record_past", False):
            return 0
        held = self.max_cache_len if isinstance(self, StaticLayer) else self.sliding_window - 1
        return max(0, self.pending.length - held)

    def _become_stock(self) -> None:
        del self.pending
        self.__class__ = self.stock_class
        # Counters of static layers are tensors that they write into: a snapshot of the pending layer keeps its own.
        own = {name: value.clone() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        self.__dict__.update(own, keys=None, values=None, is_initialized=False)
        _count(self, 0)

    @property
    def keys(self) -> torch.Tensor:
        self.materialize_unasked()
        return self.keys

    @property
    def values(self) -> torch.Tensor:
        self.materialize_unasked()
        return self.values

    def materialize_unasked(self) -> None:
        """Translate for whoever looks at the layer before the target has used it."""
        pending = self.pending
        try:
            self.materialize(*pending.translator.default_placement)
        except Exception as error:
            error.add_note(str(pending))
            raise

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.materialize(key_states.device, key_states.dtype, key_states.shape[0])
        return self.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.pending.length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be negative or 0, got {tokens_to_remove}.")
        self.pending.length = max(0, self.pending.length + tokens_to_remove)
        _count(self, self.pending.length)

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


class TranslatedLayer(PendingLayer, DynamicLayer):
    """A full-attention layer that is translated on first access."""

    stock_class = DynamicLayer


class TranslatedSlidingWindowLayer(PendingLayer, DynamicSlidingWindowLayer):
    """A sliding-window layer that is translated on first access, as far back as its window sees."""

    stock_class = DynamicSlidingWindowLayer


_PENDING_CLASSES: dict[type, Any] = {cls.stock_class: cls for cls in (TranslatedLayer, TranslatedSlidingWindowLayer)}


def pending_class(stock_class: type) -> Any:
    """The class of a layer that is translated on first access, and is then of `stock_class`."""
    if stock_class not in _PENDING_CLASSES:
        # Without a layer type: transformers would register it as the class of all layers of that type.
        namespace = {"stock_class": stock_class, "_layer_type": None, "__module__": __name__}
        name = f"Translated{stock_class.__name__}"
        made = types.new_class(name, (PendingLayer, stock_class), exec_body=lambda body: body.update(namespace))
        _PENDING_CLASSES[stock_class] = made
    return _PENDING_CLASSES[stock_class]


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give an empty stock layer its first tokens."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        layer.lazy_initialization(keys, values)  # as its `update`, without a copy
        layer.keys, layer.values = keys, values
    else:
        layer.update(keys, values)


def _count(layer: Any, length: int) -> None:
    """Let a layer that counts its tokens, also those that have left its window, count so many."""
    for name in ("cumulative_length", "cumulative_length_int"):
        if isinstance(vars(layer).get(name), int):
            setattr(layer, name, length)


def install(cache: DynamicCache, translator: LayerTranslator, length: int | None = None) -> DynamicCache:
    """
    Let a translation stand in the empty layers of a cache.

    Args:
        cache (`DynamicCache`):
            Empty, made with the target's config.
        translator ([`Translation`] or another `LayerTranslator`):
            Asked for each layer when the target first uses it.
        length (`int`, *optional*):
            Number of its first tokens that the cache is to hold, all by default.

    Returns:
        `DynamicCache`: `cache`.
    """
    length = translator.length if length is None else length
    for layer_idx, layer in enumerate(translator.geometry.layers if length else ()):
        if layer is not None:
            stock = cache.layers[layer_idx]
            pending = Pending(translator.only(layer_idx), layer_idx, length, torch.arange(translator.batch_size))
            cache.layers[layer_idx] = pending_class(type(stock)).from_stock(stock, pending)
    return cache


class FilledTranslator:
    """
    Answers from a cache that is filled already; what its sliding windows have dropped is asked of a translator.

    Args:
        translator (`LayerTranslator`):
            Of the same tokens.
        cache (`DynamicCache`):
            Filled with them.
    """

    def __init__(self, translator: LayerTranslator, cache: DynamicCache):
        self.translator, self.layers = translator, dict(enumerate(cache.layers))
        self.geometry, self.length, self.batch_size = translator.geometry, translator.length, translator.batch_size

    def __deepcopy__(self, memo) -> "FilledTranslator":
        return self  # never changed, as a translation

    def only(self, layer_idx: int) -> "FilledTranslator":
        other = copy.copy(self)
        other.translator, other.layers = self.translator.only(layer_idx), {layer_idx: self.layers[layer_idx]}
        return other

    @property
    def default_placement(self) -> tuple[torch.device, torch.dtype]:
        return self.translator.default_placement

    @property
    def description(self) -> str:
        return self.translator.description

    def prefill(self) -> DynamicCache:
        return self.translator.prefill()

    def check_target(self) -> None:
        self.translator.check_target()

    def layer(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        first = self.length - layer.keys.shape[2]
        held = [
            states[:, :, max(start - first, 0) : max(stop - first, 0)].to(device, dtype)
            for states in (layer.keys, layer.values)
        ]
        if start >= first:
            return held[0], held[1]
        dropped = self.translator.layer(layer_idx, start, min(first, stop), device, dtype)
        keys, values = (torch.cat(states, dim=2) for states in zip(dropped, held, strict=True))
        return keys, values
