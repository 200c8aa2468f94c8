"""What a question attends to in a cache of all that precedes it, whatever computes the attention."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .compat import read_into_cache
from .layers import PendingLayer
from .rereading import attention_masks, check_heeds_masks


# Fewer tokens ask nothing; of more the last ones do.
MIN_QUESTION, MAX_QUESTION = 4, 64

_SOFTMAX = (softmax, torch.softmax, torch.Tensor.softmax)


def question_attention(target: PreTrainedModel, cache: Cache, prompt_ids: torch.Tensor) -> torch.Tensor | None:
    """
    Let a model read the end of a prompt on top of a cache, and tell what the last token attends to in it.

    The last token is the one that an answer begins behind. What others attend to is mostly what stands near them.

    Args:
        target (`PreTrainedModel`):
            The model that reads.
        cache (`Cache`):
            Of this model: the prompt's first tokens, every one in every layer, or pending layers of all of them. It
            is left as it is, but for pending layers, which are translated.
        prompt_ids (`torch.LongTensor`):
            The prompt, `[batch, tokens]`, rows without padding. Behind the cache at most its last 64 tokens are read.

    Returns:
        `torch.Tensor`, *optional*: `[batch, cached tokens]`, on the CPU: the largest weight that any head gives a
        token, the mean over layers. `None` if fewer than 4 tokens stand behind the cache, or if the model's attention
        cannot be listened to.

    Raises:
        `UnsupportedModelError`: the model's attention takes no mask of each token's own.
    """
    length, total = int(cache.get_seq_length()), prompt_ids.shape[1]
    start = max(length, total - MAX_QUESTION)
    if total - start < MIN_QUESTION:
        return None
    check_heeds_masks(target)
    positions = torch.arange(start, total).expand(len(prompt_ids), -1)
    keys = torch.cat([torch.arange(length), torch.arange(start, total)])
    beside = _Beside(cache)
    with _Listener(beside, length) as listener:
        read_into_cache(
            target,
            beside,
            prompt_ids[:, start:],
            attention_mask=attention_masks(target, positions, keys),
            position_ids=positions,
        )
    return listener.mean


class _Beside(DynamicCache):
    """Gives what a cache holds, and behind it what is read on top, which nobody keeps."""

    def __init__(self, cache: Cache):
        super().__init__()
        self._held = cache
        # Of the layer whose attention runs now, until it has been listened to.
        self.num_keys: int | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        held: Any = self._held.layers[layer_idx]
        if isinstance(held, PendingLayer):
            held.materialize(key_states.device, key_states.dtype)
        self.num_keys = held.keys.shape[2] + key_states.shape[2]
        return torch.cat([held.keys, key_states], 2), torch.cat([held.values, value_states], 2)


class _Listener(TorchFunctionMode):
    """
    Hears what the last token of a reading weighs keys with, in the thread in which it is entered.

    Transformers' attention is either torch's, which tells no weights, so that they are computed here once more, or
    written out (`eager`) with a softmax, which is listened to.
    """

    def __init__(self, cache: _Beside, length: int):
        super().__init__()
        self._cache, self._length = cache, length
        self._sum: torch.Tensor | None = None
        self._heard = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self._cache.num_keys is not None:
            self._hear(_weights(*args, **kwargs))
        output = func(*args, **kwargs)
        if func in _SOFTMAX:
            self._hear(output)
        return output

    def _hear(self, weights: torch.Tensor) -> None:
        num_keys = self._cache.num_keys
        # Wider, where a score that reads nothing stands behind those of the keys.
        if num_keys is None or weights.dim() != 4 or weights.shape[-1] < num_keys:
            return
        self._cache.num_keys = None
        largest = weights[:, :, -1, : self._length].float().amax(1).cpu()
        self._sum = largest if self._sum is None else self._sum + largest
        self._heard += 1

    @property
    def mean(self) -> torch.Tensor | None:
        """`[batch, length]`, over the layers that were heard; `None` if none was."""
        return None if self._sum is None else self._sum / self._heard


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What torch's attention weighs values with for the last of its queries, `[batch, heads, 1, keys]`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query[:, :, -1:].unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT).flatten(1, 2) * scale
    if attn_mask is not None:
        mask = attn_mask[:, :, -1:]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.float().softmax(-1)
