"""The target reads some of the tokens in a cache again, wherever they stand, on top of all that precedes them."""

import weakref

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .compat import filled_cache, input_device, read_into_cache, unwrap
from .errors import UnsupportedModelError
from .geometry import KVGeometry
from .layers import PendingLayer


# Those that take a mask of each query's own.
_ATTENTION = ("eager", "sdpa")
# Tokens that a model reads once to see whether it heeds such a mask, and those of them that it reads again.
_NUM_TRIED, _TRIED = 12, (3, 4, 7, 10)
# What it makes of them may differ from what it made before by this share, in any dtype.
_MAX_DIFFERENCE = 0.1

_HEED_MASKS: weakref.WeakSet = weakref.WeakSet()


def reread(target: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
    """
    Let a model read tokens again that are in its cache. Their keys and values are replaced, in every layer.

    Each of them attends to what the cache has of the tokens before it, those that are read again among them. With all
    tokens that is a prefill; reading the first one again gives what a prefill gives of it, whatever stands behind.

    Args:
        target (`PreTrainedModel`):
            The model that reads.
        cache (`Cache`):
            Of this model: every token in every layer (see `activate_past_recording`), or pending layers of all tokens.
        input_ids (`torch.LongTensor`):
            What the cache holds, `[batch, tokens]`, rows without padding.
        positions (`torch.LongTensor`):
            Which of them to read, `[batch, reread]`, in ascending order; as many in each row.

    Raises:
        `UnsupportedModelError`: the model's attention takes no mask of each token's own.
    """
    if not positions.numel():
        return
    check_heeds_masks(target)
    _read(target, cache, input_ids, positions)


def _read(target: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
    read_into_cache(
        target,
        _InPlaceCache(cache, positions),
        input_ids.gather(1, positions),
        attention_mask=attention_masks(target, positions, torch.arange(input_ids.shape[1])),
        position_ids=positions,
    )


class _InPlaceCache(DynamicCache):
    """Puts the keys and values of some tokens where a cache has them already."""

    def __init__(self, cache: Cache, positions: torch.Tensor):
        super().__init__()
        self.layers, self._positions = cache.layers, positions

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        layer = self.layers[layer_idx]
        if isinstance(layer, PendingLayer):
            layer.materialize(key_states.device, key_states.dtype)
        place = self._positions.to(key_states.device)[:, None, :, None]
        # New tensors: others may hold the old ones.
        layer.keys = layer.keys.scatter(2, place.expand_as(key_states), key_states)
        layer.values = layer.values.scatter(2, place.expand_as(value_states), value_states)
        return layer.keys, layer.values


def attention_masks(
    target: PreTrainedModel, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """
    Which token attends to which, to be added to their scores.

    Args:
        target (`PreTrainedModel`):
            The model that reads.
        positions (`torch.LongTensor`):
            Of the tokens that it reads, `[batch, queries]`.
        keys (`torch.LongTensor`):
            Positions of what they can attend to, `[keys]`.

    Returns:
        `torch.Tensor` or `dict`: One mask `[batch, 1, queries, keys]`, or one for each type of layer.

    Raises:
        `UnsupportedModelError`: the model's config does not tell how far its layers attend.
    """
    geometry = KVGeometry.from_model(target)
    windows = [None if layer is None else layer.sliding_window for layer in geometry.layers]
    types = getattr(target.config.get_text_config(decoder=True), "layer_types", None)
    if types is None or len(set(types)) == 1:
        own = {window for window, layer in zip(windows, geometry.layers, strict=True) if layer is not None}
        if len(own) == 1:
            return _mask(target, positions, keys, own.pop())
    by_type: dict[str, set[int | None]] = {}
    for layer_type, window, layer in zip(types or (), windows, geometry.layers, strict=False):
        if layer is not None:
            by_type.setdefault(layer_type, set()).add(window)
    if not by_type or any(len(own) > 1 for own in by_type.values()) or "chunked_attention" in by_type:
        raise UnsupportedModelError(
            f"{type(unwrap(target)).__name__} does not say which of its layers attend how far (`layer_types` of its "
            f"config is {types}), so that no token can be read again by itself. Leave `effort` at 0."
        )
    return {name: _mask(target, positions, keys, own.pop()) for name, own in by_type.items()}


def _mask(target: PreTrainedModel, positions: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    behind = positions[:, :, None] - keys  # [batch, queries, keys]
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    mask = torch.zeros(hidden.shape, dtype=target.dtype).masked_fill(hidden, torch.finfo(target.dtype).min)
    return mask[:, None].to(input_device(target))


def check_heeds_masks(target: PreTrainedModel) -> None:
    """
    Read a few tokens again: a model that attends to others than those it is to attend to makes something else.

    Raises:
        `UnsupportedModelError`: it does, or its attention takes no mask of each token's own.
    """
    model = unwrap(target)
    if model in _HEED_MASKS:
        return
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if attention not in _ATTENTION:
        raise UnsupportedModelError(
            f"The attention of {type(model).__name__} is {attention!r}, which takes no mask of each token's own. To "
            f"read single tokens again, load it with `attn_implementation` {' or '.join(_ATTENTION)}, or leave "
            "`effort` at 0."
        )
    ids = (torch.arange(_NUM_TRIED)[None] * 7 + 3) % target.get_input_embeddings().weight.shape[0]
    cache = filled_cache(target, ids)
    geometry = KVGeometry.from_model(target)
    own = [i for i, layer in enumerate(geometry.layers) if layer is not None]
    before = {i: (cache.layers[i].keys, cache.layers[i].values) for i in own}
    _read(target, cache, ids, torch.tensor([_TRIED]))
    for i in own:
        for states, first in zip((cache.layers[i].keys, cache.layers[i].values), before[i], strict=True):
            again, once = (x[:, :, list(_TRIED)].float() for x in (states, first))
            if (again - once).norm() > _MAX_DIFFERENCE * once.norm():
                raise UnsupportedModelError(
                    f"{type(model).__name__} makes other keys and values of tokens that it reads again with a mask of "
                    f"their own (layer {i}). Leave `effort` at 0, or let it read the context itself."
                )
    _HEED_MASKS.add(model)
