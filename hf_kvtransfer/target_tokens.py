"""What the target itself makes of a context's tokens, read when a layer map first asks for it."""

import threading

import torch
from transformers import DynamicCache, PreTrainedModel

from .compat import input_device, read_into_cache, unwrap
from .native_states import NativeStates, read_first_layers
from .offloading import unchanged_offloading


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
        self._native: dict[int, NativeStates] = {}
        self._embeddings: torch.Tensor | None = None
        self._reading = threading.Lock()  # copies of a cache, in threads of their own, share what is read

    def native_states(self, num_layers: int) -> NativeStates:
        """What the first layers make of the context, see [`read_first_layers`]. They run once, and it is held."""
        with self._reading:
            if num_layers not in self._native:
                self._native[num_layers] = read_first_layers(
                    self.target, self.input_ids, self.attention_mask, self.position_ids, num_layers=num_layers
                )
        return self._native[num_layers]

    @torch.no_grad()
    def embeddings(self, start: int, stop: int) -> torch.Tensor:
        """Embeddings of a range of tokens, `[batch, stop - start, hidden_size]`."""
        module = self.target.get_input_embeddings()
        device = input_device(self.target)
        if not any(weight.is_meta for weight in module.parameters()):
            return module(self.input_ids[:, start:stop].to(device))
        # Offloaded: each call would load all of the vocabulary, so the embeddings of all tokens are held instead.
        with self._reading:
            if self._embeddings is None:
                self._embeddings = module(self.input_ids.to(device))
        return self._embeddings[:, start:stop]

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
