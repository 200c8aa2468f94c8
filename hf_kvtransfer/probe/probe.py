"""One tiny forward of a live model that learns what each of its layers caches. Internal.

No table of architectures and no module names: whatever module is running when `cache.update` is called is that layer's
attention, what it was called with is what the architecture really passes, and whichever parameter-less module turned
integer positions into one of those arguments is its rotary embedding.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..compat import read_into_cache, unwrap
from ..errors import UnsupportedModelError
from .recording import NUM_PROBE_TOKENS, ModuleCall, RecordingCache, is_position_ids, match_embeddings
from .rotary_call import RotaryCall, cos_and_sin


# Above 0, where a rotation is the identity. Low, to stay within the original length of length-dependent embeddings.
FIRST_PROBE_POSITION = 5

# By name: `DummyLayer` exists only since transformers 5.23.
_TOKEN_BY_TOKEN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")


@dataclass(frozen=True, eq=False)
class LayerProbe:
    """What one layer gave to its cache. Tensors are on the CPU, `[1, heads, tokens, head_dim]`.

    Args:
        attention (`str`):
            Name of the module that filled the cache, for `get_submodule` of the model without wrappers.
        key_states (`torch.Tensor`):
            The keys as cached.
        value_states (`torch.Tensor`):
            The values as cached.
        unrotated_key_states (`torch.Tensor`):
            The same keys with the rotary embedding replaced by the identity.
        unrotated_value_states (`torch.Tensor`):
            The same values with the rotary embedding replaced by the identity.
        position_embeddings (`tuple(torch.Tensor)`, *optional*):
            cos and sin as the attention received them. `None` if it received none.
        rotary_call (`RotaryCall`, *optional*):
            The call that made `position_embeddings`.
        depends_on_position_ids (`bool`):
            Whether the keys follow position ids given to the attention itself, which then hides its rotary embedding.
    """

    attention: str
    key_states: torch.Tensor
    value_states: torch.Tensor
    unrotated_key_states: torch.Tensor
    unrotated_value_states: torch.Tensor
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    rotary_call: RotaryCall | None
    depends_on_position_ids: bool


@dataclass(frozen=True, eq=False)
class Probe:
    """What a model caches, layer by layer.

    Args:
        model_class (`str`):
            For error messages.
        layers (`tuple`):
            One [`LayerProbe`] for each layer of the cache, `None` where the layer caches nothing of its own.
        sliding_windows (`tuple`):
            The window of each layer of the cache in tokens, `None` where it keeps all of them.
    """

    model_class: str
    layers: tuple[LayerProbe | None, ...]
    sliding_windows: tuple[int | None, ...]


_PROBES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def probe_model(model: PreTrainedModel) -> Probe:
    """Runs 8 tokens through a model, once in its life, and keeps what its layers gave to the cache.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A causal language model. It may be spread over devices by `accelerate`, quantised, or wrapped by PEFT.

    Returns:
        [`Probe`]: what each layer caches.

    Raises:
        [`UnsupportedModelError`]: if a layer keeps a state that is not keys and values token by token.
    """
    model = unwrap(model)
    dtype, probe = _PROBES.get(model, (None, None))
    # Casting a model afterwards changes the rounding of its cos and sin.
    if probe is None or dtype != model.dtype:
        probe = _probe(model)
        _PROBES[model] = (model.dtype, probe)
    return probe


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Probe:
    model_class = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{model_class} is an encoder-decoder: only decoder-only models are supported.")

    stack: list[ModuleCall] = []
    attention_calls: dict[int, ModuleCall] = {}
    rotary_candidates: list[ModuleCall] = []

    def enter(module, args, kwargs):
        stack.append(ModuleCall(module, args, kwargs))

    def leave(module, args, kwargs, output):
        stack.pop()
        call = ModuleCall(module, args, kwargs, output)
        if next(module.parameters(), None) is None and call.position_name is not None:
            rotary_candidates.append(call)

    def on_update(layer_idx):
        attention_calls[layer_idx] = stack[-1]

    cache = RecordingCache(model.config, on_update)
    check_cache_layers(cache, model_class)
    sliding_windows = tuple(getattr(layer, "sliding_window", None) for layer in cache.layers)

    with _eval_mode(model):
        hooks = []
        try:
            for module in model.modules():
                hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.append(module.register_forward_hook(leave, with_kwargs=True))
            token_ids = torch.arange(NUM_PROBE_TOKENS)[None] % model.get_input_embeddings().weight.shape[0]
            position_ids = torch.arange(FIRST_PROBE_POSITION, FIRST_PROBE_POSITION + NUM_PROBE_TOKENS)[None]
            read_into_cache(model, cache, token_ids, position_ids=position_ids)
        finally:
            for hook in hooks:
                hook.remove()

        replay = RecordingCache(model.config)
        names = {module: name for name, module in model.named_modules()}
        layers: list[LayerProbe | None] = [None] * len(cache.layers)
        for layer_idx, call in attention_calls.items():
            name = names[call.module]
            layers[layer_idx] = _probe_layer(layer_idx, name, call, cache, replay, rotary_candidates, model_class)
    return Probe(model_class, tuple(layers), sliding_windows)


def _probe_layer(
    layer_idx: int,
    name: str,
    call: ModuleCall,
    cache: RecordingCache,
    replay: RecordingCache,
    rotary_candidates: list[ModuleCall],
    model_class: str,
) -> LayerProbe:
    key_states, value_states = cache.updates[layer_idx]
    if key_states.ndim != 4 or value_states.ndim != 4:
        raise UnsupportedModelError(
            f"Layer {layer_idx} of {model_class} caches keys of shape {list(key_states.shape)} and values of shape "
            f"{list(value_states.shape)}, not [batch, heads, tokens, head_dim]. Re-prefill this model."
        )

    arguments = list(call.args) + list(call.kwargs.values())
    embeddings, rotary = match_embeddings(
        call.bind().arguments.get("position_embeddings"), arguments, rotary_candidates
    )
    if embeddings is not None and rotary is None:
        raise UnsupportedModelError(
            f"Layer {layer_idx} of {model_class} receives position embeddings, but no module without parameters made "
            "them from position ids, so they cannot be computed at other positions. Re-prefill this model."
        )

    # The attention runs to its end: an exception from `update` would leave the weights of an offloaded layer loaded.
    if embeddings is not None:
        identity = _identity(embeddings)

        def replace(value):
            return replay if value is cache else identity if value is embeddings else value
    else:

        def replace(value):
            return replay if value is cache else value + 3 if is_position_ids(value) else value

    call.repeat(replace)
    other_key_states, other_value_states = replay.updates[layer_idx]
    if embeddings is None:
        moved = not torch.allclose(key_states.float(), other_key_states.float(), rtol=0, atol=1e-6)
        return LayerProbe(name, key_states, value_states, key_states, value_states, None, None, moved)

    assert rotary is not None
    cos, sin = cos_and_sin(embeddings)
    return LayerProbe(
        attention=name,
        key_states=key_states,
        value_states=value_states,
        unrotated_key_states=other_key_states,
        unrotated_value_states=other_value_states,
        position_embeddings=(cos.cpu(), sin.cpu()),
        rotary_call=rotary.rotary_call,
        depends_on_position_ids=False,
    )


def check_cache_layers(cache: DynamicCache, model_class: str) -> None:
    """Refuse a model one of whose layers does not cache keys and values token by token."""
    for layer_idx, layer in enumerate(cache.layers):
        name = type(layer).__name__
        if name not in _TOKEN_BY_TOKEN_LAYERS:
            raise UnsupportedModelError(
                f"Layer {layer_idx} of {model_class} caches a {name}: a recurrent or compressed state, which does not "
                "hold keys and values token by token and cannot be translated. Re-prefill this model."
            )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    # Dropout would make two calls of one attention differ.
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _identity(embeddings: Any) -> Any:
    if isinstance(embeddings, torch.Tensor):
        return torch.ones_like(embeddings)
    cos, sin = embeddings
    return torch.ones_like(cos), torch.zeros_like(sin)
