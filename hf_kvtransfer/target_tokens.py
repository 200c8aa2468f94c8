"""What the target itself makes of a context's tokens, read when a layer map first asks for it."""

import threading
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .compat import input_device, read_into_cache, unwrap
from .distinct_states import DistinctStates, read_distinct
from .maps.linear import MAX_DISTINCT
from .native_states import NativeStates, read_first_layers
from .offloading import unchanged_offloading


# Tokens of a row that are compared at a time.
_BLOCK = 256


class TargetTokens:
    """
    A context's tokens as the target's embeddings or its first layers see them.

    Args:
        target (`PreTrainedModel`):
            The model that will continue.
        input_ids (`torch.LongTensor`), attention_mask (`torch.LongTensor`), position_ids (`torch.LongTensor`):
            The context, `[batch, tokens]`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
    ):
        self.target = target
        self.input_ids, self.attention_mask, self.position_ids = input_ids, attention_mask, position_ids
        self._native: dict[int, NativeStates | DistinctStates] = {}
        self._follows: dict[int | None, bool] = {}
        self._embeddings: torch.Tensor | None = None
        self._reading = threading.Lock()  # copies of a cache, in threads of their own, share what is read

    def native_states(self, num_layers: int) -> NativeStates | DistinctStates:
        """
        What the first layers make of the context, see [`read_first_layers`]; before the first attention of its
        distinct tokens, if they allow. They run once, and it is held.
        """
        with self._reading:
            if num_layers not in self._native:
                distinct = None if num_layers else read_distinct(self.target, self.input_ids)
                self._native[num_layers] = distinct or read_first_layers(
                    self.target, self.input_ids, self.attention_mask, self.position_ids, num_layers=num_layers
                )
        return self._native[num_layers]

    @torch.no_grad()
    def keys_and_values(
        self, start: int, stop: int, num_layers: int, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What one of the first layers caches of a range of tokens, each `[batch, heads, stop - start, head_dim]`.

        Args:
            start (`int`), stop (`int`):
                Range of the context's tokens.
            num_layers (`int`):
                As in [`TargetTokens.native_states`].
            layer_idx (`int`):
                The layer, at most `num_layers`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Tensors of the caller's own.
        """
        states = self.native_states(num_layers)
        if isinstance(states, DistinctStates):
            with self._reading:
                return states.keys_and_values(start, stop, self.target, self.input_ids, self.position_ids)
        layer: Any = states.keys_and_values[layer_idx]
        return layer[0][:, :, start:stop].clone(), layer[1][:, :, start:stop].clone()

    def num_held(self, num_layers: int) -> int:
        """Numbers that are held of what the first layers make of the context; they run if they have not yet."""
        states = self.native_states(num_layers)
        held = states.hidden_states.numel()
        if isinstance(states, NativeStates):
            held += sum(part.numel() for layer in states.keys_and_values if layer is not None for part in layer)
        return held

    @torch.no_grad()
    def features(
        self, start: int, stop: int, num_layers: int | None, room: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        What layer maps read of a range of tokens: hidden states behind the first layers, or else embeddings.

        Text repeats its words. Tokens of one id have one embedding, and mostly one state before the first attention:
        it is given once, so that what a map makes of it is computed once.

        Args:
            start (`int`), stop (`int`):
                Range of the context's tokens.
            num_layers (`int`, *optional*):
                As in [`TargetTokens.native_states`]; `None` for embeddings.
            room (`int`):
                Numbers that may be copied of states that are held.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: States, `[rows, hidden_size]`, and the row of each token,
            `[batch, stop - start]`; or those of all tokens, `[batch, stop - start, hidden_size]`, and `None`.
        """
        native = None if num_layers is None else self.native_states(num_layers)
        if isinstance(native, DistinctStates):
            return self._rows(native, start, stop, room)
        ids = self.input_ids[:, start:stop]
        distinct, index = ids.unique(return_inverse=True)
        repeats = len(distinct) <= MAX_DISTINCT * ids.numel()
        if native is not None:
            states = native.hidden_states
            if not repeats or not self._follow_ids(states, num_layers):
                return states[:, start:stop], None
            row, column = _first_places(index, len(distinct))
            return states[row.to(states.device), column.to(states.device) + start], index
        if self._is_offloaded:
            return self._held_embeddings()[:, start:stop], None
        return (self._embed(distinct[None])[0], index) if repeats else (self._embed(ids), None)

    def _rows(self, native: DistinctStates, start: int, stop: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`TargetTokens.features`]. At the end of the context the first rows are those that occur, in a view."""
        index, states = native.index[:, start:stop], native.hidden_states
        if stop < self.input_ids.shape[1]:
            distinct, rows = index.unique(return_inverse=True)
            if len(distinct) <= MAX_DISTINCT * index.numel() and len(distinct) * states.shape[1] <= room:
                return states.index_select(0, distinct.to(states.device)), rows
        return states[: int(index.max()) + 1], index

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.target.get_input_embeddings()(input_ids.to(input_device(self.target)))

    @property
    def _is_offloaded(self) -> bool:
        return any(weight.is_meta for weight in self.target.get_input_embeddings().parameters())

    def _held_embeddings(self) -> torch.Tensor:
        """Those of all tokens: each call would load all of the vocabulary."""
        with self._reading:
            if self._embeddings is None:
                self._embeddings = self._embed(self.input_ids)
        return self._embeddings

    def prefill(self, length: int) -> DynamicCache:
        """What the target caches when it reads the first tokens, every one of them also in sliding windows."""
        cache = DynamicCache(config=self.target.config)
        cache.activate_past_recording()
        mask = self.attention_mask[:, :length]
        with unchanged_offloading(unwrap(self.target)):  # it may be in the middle of a forward pass
            read_into_cache(
                self.target,
                cache,
                self.input_ids[:, :length],
                attention_mask=None if mask.all() else mask,
                position_ids=self.position_ids[:, :length],
            )
        return cache

    def _follow_ids(self, states: torch.Tensor, num_layers: int | None) -> bool:
        """Whether all tokens of one id have one and the same state: not behind an attention, or with positions."""
        if num_layers not in self._follows:
            distinct, index = self.input_ids.unique(return_inverse=True)
            row, column = (place.to(states.device) for place in _first_places(index, len(distinct)))
            self._follows[num_layers] = all(
                torch.equal(part, states[row[some], column[some]])
                for part, some in zip(states.split(_BLOCK, 1), index.to(states.device).split(_BLOCK, 1), strict=True)
            )
        return self._follows[num_layers]


def _first_places(index: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column at which each number below `count` first stands in `index` `[batch, tokens]`."""
    places = torch.arange(index.numel())
    first = places.new_full((count,), index.numel()).scatter_reduce_(0, index.flatten(), places, "amin")
    return first // index.shape[1], first % index.shape[1]
