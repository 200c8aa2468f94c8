"""What a model's first layers make of a context: their keys and values, and the input of the last one's attention."""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from .compat import read_into_cache, unwrap
from .errors import UnsupportedModelError
from .offloading import ForwardEnded, unchanged_offloading
from .probe import probe_model


@dataclass(frozen=True, eq=False)
class NativeStates:
    """
    What a model computes when it reads a context with its first layers only. Made by [`read_first_layers`].

    Args:
        keys_and_values (`tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]`):
            For each layer its keys and values as the model caches them, rotary embedding applied, each
            `[batch, heads, tokens, head_dim]`. `None` for a layer that caches nothing of its own.
        hidden_states (`torch.Tensor`):
            `[batch, tokens, hidden_size]`, what the attention of the last of these layers is called with.
    """

    keys_and_values: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    hidden_states: torch.Tensor


class AttentionInput:
    """
    Listens to what one layer's attention is called with while it is entered, in the thread that entered it: others
    may run the same model at the same time.

    Args:
        model (`PreTrainedModel`):
            A live model. The first time, it runs on 8 tokens.
        layer_idx (`int`):
            The layer.

    Raises:
        `ValueError`: there is no such layer, or it caches nothing of its own.
    """

    def __init__(self, model: PreTrainedModel, layer_idx: int):
        layers = probe_model(model).layers
        caching = [i for i, layer in enumerate(layers) if layer is not None]
        if layer_idx not in caching:
            raise ValueError(
                f"{type(unwrap(model)).__name__} has no layer {layer_idx} that caches keys and values of its own, "
                f"only layers {caching}. Choose the number of native layers among them."
            )
        layer = layers[layer_idx]
        assert layer is not None
        self._attention = unwrap(model).get_submodule(layer.attention)
        self._hidden_states: torch.Tensor | None = None

    def __enter__(self) -> "AttentionInput":
        self._thread, self._hidden_states = threading.get_ident(), None
        self._hook = self._attention.register_forward_pre_hook(self._listen, with_kwargs=True)
        return self

    def __exit__(self, *exception) -> None:
        self._hook.remove()

    def without_queries(self) -> AbstractContextManager:
        """Within it, the attention's queries are zeros: for a pass that ends before they are used."""
        projection = getattr(self._attention, "q_proj", None)
        return _ZerosFrom(projection.weight) if type(projection) is torch.nn.Linear else nullcontext()

    def _listen(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        # Another thread that is about to call a hook which is just being removed calls it without `kwargs`.
        if threading.get_ident() == self._thread and kwargs is not None:
            named = kwargs.get("hidden_states")
            states = (named, *args, *kwargs.values())
            self._hidden_states = next((value.detach() for value in states if _is_hidden_states(value)), None)

    @property
    def hidden_states(self) -> torch.Tensor:
        """
        `[batch, tokens, hidden_size]`, of the last call.

        Raises:
            `UnsupportedModelError`: the attention was not called, or with nothing of this shape.
        """
        if self._hidden_states is None:
            raise UnsupportedModelError(
                f"{type(self._attention).__name__} was not called with hidden states [batch, tokens, hidden_size], so "
                "they cannot serve as token features. Use a mapper without native layers."
            )
        return self._hidden_states


@torch.no_grad()
def read_first_layers(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    *,
    num_layers: int,
) -> NativeStates:
    """
    Run a model's first layers on a context, and nothing behind them.

    The keys and values of layer `num_layers` depend on what the layers before it put out alone. They are the last to
    be computed: neither that layer's attention nor anything after it runs. All tokens are kept also in sliding
    windows.

    Args:
        model (`PreTrainedModel`):
            The model. It may be offloaded, wrapped by PEFT, or in the middle of a forward pass of its own.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on any device.
        attention_mask (`torch.LongTensor`, *optional*):
            `[batch, tokens]`, 0 for padding on the left.
        position_ids (`torch.LongTensor`, *optional*):
            `[batch, tokens]`.
        num_layers (`int`):
            Layers that run to their end. 0 costs no more than the projections of layer 0.

    Returns:
        [`NativeStates`]: Of layers 0 to `num_layers`.

    Raises:
        `ValueError`: layer `num_layers` does not exist or caches nothing of its own.
        `UnsupportedModelError`: the model does not fill its cache, or hides the input of its attention.
    """
    cache = _CacheUpTo(model.config, num_layers)
    cache.activate_past_recording()
    attention_input = AttentionInput(model, num_layers)
    padded = attention_mask is not None and not attention_mask.all()
    try:
        with attention_input, attention_input.without_queries(), unchanged_offloading(unwrap(model)):
            read_into_cache(
                model,
                cache,
                input_ids,
                attention_mask=attention_mask if padded else None,
                position_ids=position_ids,
            )
    except ForwardEnded:
        pass
    else:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} read a context without giving the keys and values of layer {num_layers} "
            "to its cache. Call `model.eval()`: gradient checkpointing turns the cache off."
        )
    layers = zip(cache.layers[: num_layers + 1], probe_model(model).layers, strict=False)
    return NativeStates(
        tuple(None if probed is None else (layer.keys, layer.values) for layer, probed in layers),
        attention_input.hidden_states,
    )


class _ZerosFrom(TorchFunctionMode):
    """Takes a weight for zeros in this thread, and its product for done."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = weight

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and len(args) > 1 and args[1] is self.weight:
            return args[0].new_zeros(*args[0].shape[:-1], len(self.weight))
        return func(*args, **(kwargs or {}))


class _CacheUpTo(DynamicCache):
    """A cache that ends the forward pass as soon as it has the keys and values of a layer."""

    def __init__(self, config, last_layer: int):
        super().__init__(config=config)
        self.last_layer = last_layer

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last_layer:
            raise ForwardEnded
        return states


def _is_hidden_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3
