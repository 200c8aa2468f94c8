"""Several segments of one prompt, and what the target has read itself between them, as one translation."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..adapters import TargetAdapters
from ..compat import input_device, model_name, read_into_cache
from ..geometry import KVGeometry
from ..layers import install
from .mapped import SegmentedPrompt, SegmentTranslation


class SegmentedTranslation:
    """
    Answers for the layers of a cache whose first tokens the target has in a cache already, and whose others are
    translated. Built up with [`~SegmentedTranslation.then`] and [`~SegmentedTranslation.then_read`].

    Args:
        prompt ([`SegmentedPrompt`]):
            The prompt.
        held (`Cache`, *optional*), num_held (`int`, *optional*, defaults to 0):
            A cache of the target in which every layer has the prompt's first tokens, so many of them.
    """

    def __init__(self, prompt: SegmentedPrompt, held: Cache | None = None, num_held: int = 0):
        self.prompt, self.num_held, self.length = prompt, num_held, num_held
        self.geometry = KVGeometry.from_model(prompt.target)
        self._adapters = TargetAdapters(prompt.target)
        self._held = dict(enumerate(held.layers)) if held is not None else {}
        self._mapped: tuple[SegmentTranslation, ...] = ()
        # Also of the segments that are in `held` by now.
        self.translated_mask = torch.zeros(len(prompt.input_ids), num_held, dtype=torch.bool)
        self.segments: tuple[SegmentTranslation, ...] = ()
        # Why there are not more of them.
        self.reasons: tuple[str, ...] = ()
        self.layer_seconds: dict[int, float] = {}

    def then(self, segment: SegmentTranslation) -> "SegmentedTranslation":
        """This, and behind it a segment that begins where it ends."""
        other = copy.copy(self)
        other._mapped, other.segments = (*self._mapped, segment), (*self.segments, segment)
        other.length = segment.length
        new = torch.ones(self.batch_size, segment.length - segment.start, dtype=torch.bool)
        other.translated_mask = torch.cat([self.translated_mask, new], dim=1)
        return other

    def then_read(self, stop: int) -> "SegmentedTranslation":
        """This, and behind it the tokens up to `stop`, which the target reads now, on top of all that precedes."""
        other, start, prompt = copy.copy(self), self.length, self.prompt
        cache = DynamicCache(config=prompt.target.config)
        cache.activate_past_recording()  # what follows is asked for in one piece
        install(cache, self)
        read_into_cache(
            prompt.target, cache, prompt.input_ids[:, start:stop], position_ids=prompt.position_ids[:, start:stop]
        )
        other._held, other.num_held, other.length = dict(enumerate(cache.layers)), stop, stop
        other._mapped = ()
        new = torch.zeros(self.batch_size, stop - start, dtype=torch.bool)
        other.translated_mask = torch.cat([self.translated_mask, new], dim=1)
        return other

    @property
    def target(self) -> PreTrainedModel:
        return self.prompt.target

    @property
    def batch_size(self) -> int:
        return len(self.prompt.input_ids)

    @property
    def prompt_ids(self) -> torch.Tensor:
        """All of the prompt, `[batch, tokens]`."""
        return self.prompt.input_ids

    @property
    def input_ids(self) -> torch.Tensor:
        """`[batch, length]`."""
        return self.prompt.input_ids[:, : self.length]

    @property
    def attention_mask(self) -> torch.Tensor:
        """`[batch, length]`, no padding."""
        return self.prompt.attention_mask[:, : self.length]

    @property
    def held_back_tokens(self) -> int:
        """Tokens of the prompt that the target still has to read, of all rows."""
        return (self.prompt.input_ids.shape[1] - self.length) * self.batch_size

    @property
    def coverage(self) -> float:
        """As of an alignment, the mean over the tokens of all segments."""
        return self._mean([segment.coverage for segment in self.segments])

    @property
    def boundary_share(self) -> float:
        """As of an alignment, the mean over the tokens of all segments."""
        return self._mean([segment.boundary_share for segment in self.segments])

    def _mean(self, shares: Sequence[float]) -> float:
        tokens = [segment.mapped_tokens for segment in self.segments]
        return sum(n * share for n, share in zip(tokens, shares, strict=True)) / max(sum(tokens), 1)

    @property
    def default_placement(self) -> tuple[torch.device, torch.dtype]:
        return input_device(self.target), self.target.dtype

    @property
    def description(self) -> str:
        if self._mapped:
            return "; ".join(dict.fromkeys(segment.description for segment in self._mapped))
        return f"what {model_name(self.target)} has read ({self.geometry.describe()})"

    def only(self, layer_idx: int) -> Self:
        other = copy.copy(self)
        other._held = {i: layer for i, layer in self._held.items() if i == layer_idx}
        other._mapped = tuple(segment.only(layer_idx) for segment in self._mapped)
        other.segments = ()  # they hold all layers
        return other

    def __deepcopy__(self, memo) -> "SegmentedTranslation":
        return self  # never changed, as a translation

    def layer(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        if start < self.num_held:
            held, end = self._held[layer_idx], min(stop, self.num_held)
            keys, values = (states[:, :, start:end].to(device, dtype) for states in (held.keys, held.values))
            parts.append((keys, values))
        for segment in self._mapped:
            first, last = max(start, segment.start), min(stop, segment.length)
            if first < last:
                parts.append(segment.layer(layer_idx, first, last, device, dtype))
        if len(parts) == 1:
            return parts[0]
        if parts:
            keys, values = (torch.cat(states, dim=2) for states in zip(*parts, strict=True))
            return keys, values
        layer = self.geometry.layers[layer_idx]  # all was cut off
        keys, values = (
            torch.empty(self.batch_size, layer.num_key_value_heads, 0, width, device=device, dtype=dtype)
            for width in (layer.key_head_dim, layer.value_head_dim)
        )
        return keys, values

    def prefill(self) -> DynamicCache:
        return self.prompt.tokens.prefill(self.length)

    def check_target(self) -> None:
        self._adapters.check()
