"""A context's first tokens, which the target reads itself. Many contexts begin alike: what it made of them is held."""

from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .compat import filled_cache
from .probe import probe_model


FirstTokens = list[tuple[torch.Tensor, torch.Tensor] | None]

# For each model what it has made of some beginnings, the last ones behind the others.
HELD: WeakKeyDictionary[PreTrainedModel, OrderedDict[tuple, FirstTokens]] = WeakKeyDictionary()
_MAX_HELD = 8
# Elements of each tensor that are looked at.
_SAMPLES = 8
_PLAIN = (torch.Tensor, nn.Parameter)


def read_first_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> FirstTokens:
    """
    Let a model read a few tokens at positions 0 and up.

    All weights are read for them, which takes a CPU as long as translating a few hundred tokens; and a chat template,
    or a system prompt, begins each context with the same ones. On a CPU the result is held until something of the
    model changes, for models that are nothing but their weights: not with adapters, hooks or offloaded weights, nor in
    training.

    Args:
        model (`PreTrainedModel`):
            The model.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on the CPU.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor] | None]`: For each layer keys with rotary embedding, and values,
        `[batch, heads, tokens, head_dim]`, to be read only. `None` for a layer that caches nothing of its own.
    """
    state = _state(model)
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


def _state(model: PreTrainedModel) -> tuple | None:
    """What is different after a change of the model, `None` if it has parts of which that cannot be said."""
    if hasattr(model, "peft_config") or hasattr(model, "get_base_model"):
        return None
    tensors: list[torch.Tensor] = []
    for module in model.modules():
        if module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
        # Walking through the modules takes longer than all else, so it is done once.
        own = (*module._parameters.values(), *module._buffers.values())
        tensors += [tensor for tensor in own if tensor is not None]
    if any(t.device.type != "cpu" or t.is_inference() or type(t) not in _PLAIN or not t.numel() for t in tensors):
        return None
    # Changes in place leave a trace, but for those through `.data`, which some elements show.
    traces = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
    elements = [t.detach().reshape(-1)[:: -(-t.numel() // _SAMPLES)].double() for t in tensors]
    attention = getattr(model.config, "_attn_implementation", None)
    return attention, *traces, torch.cat(elements).numpy().tobytes()
