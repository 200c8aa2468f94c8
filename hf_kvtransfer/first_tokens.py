"""A context's first tokens, which the target reads itself. Many contexts begin alike: what it made of them is held."""

from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .compat import filled_cache
from .identity.state import model_state
from .probe import probe_model


FirstTokens = list[tuple[torch.Tensor, torch.Tensor] | None]

# For each model what it has made of some beginnings, the last ones behind the others.
HELD: WeakKeyDictionary[PreTrainedModel, OrderedDict[tuple, FirstTokens]] = WeakKeyDictionary()
_MAX_HELD = 8


def read_first_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> FirstTokens:
    """
    Let a model read a few tokens at positions 0 and up.

    All weights are read for them, which takes a CPU as long as translating a few hundred tokens; and a chat template,
    or a system prompt, begins each context with the same ones. On a CPU the result is held until something of the
    model changes, for models of which that can be said, see [`model_state`].

    Args:
        model (`PreTrainedModel`):
            The model.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on the CPU.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor] | None]`: For each layer keys with rotary embedding, and values,
        `[batch, heads, tokens, head_dim]`, to be read only. `None` for a layer that caches nothing of its own.
    """
    state = model_state(model)
    if state is None:
        return _read(model, input_ids)
    held, key = HELD.setdefault(model, OrderedDict()), (*map(tuple, input_ids.tolist()), state)
    found = held.get(key)
    if found is None:
        found = held[key] = _read(model, input_ids)
        while len(held) > _MAX_HELD:
            held.popitem(last=False)
    return found


def _read(model: PreTrainedModel, input_ids: torch.Tensor) -> FirstTokens:
    layers: Any = zip(filled_cache(model, input_ids).layers, probe_model(model).layers, strict=True)
    return [None if probed is None else (layer.keys, layer.values) for layer, probed in layers]
