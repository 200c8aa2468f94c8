"""Which layers of two models cache the same, because nothing that differs between them runs before: adapters."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .compat import read_into_cache, unwrap
from .identity import ModelIdentity
from .native_states import read_first_layers


# Any tokens will do: which modules run before a layer's keys and values does not depend on them.
_NUM_TOKENS = 8

_FOUND: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Exactness:
    """
    What two models have in common.

    Args:
        layers (`tuple[int, ...]`):
            Layers whose keys and values are the same in both, whatever the context.
        changed (`tuple[str, ...]`):
            The modules in which tensors differ, adapters included; `""` is the model, for what is in none of them.
    """

    layers: tuple[int, ...]
    changed: tuple[str, ...]


def exact_layers(source: ModelIdentity, target: PreTrainedModel) -> Exactness:
    """
    Find the layers whose keys and values two models of one architecture have in common, from their weights.

    What runs after a layer has given its keys and values to the cache cannot have changed them. So 8 tokens are read
    once to see what runs before which layer; an adapter on the MLPs of layers 10 and later leaves the layers up to 10
    as they are, one on all of them only layer 0. In the first layer that is left, it is looked whether keys and values
    depend at all on what has changed there: not if that is only the queries.

    Args:
        source ([`ModelIdentity`]):
            The one model, with the adapters that were active in it.
        target (`PreTrainedModel`):
            The other, live, with the adapters that are active in it now. The two may be one model at two times.

    Returns:
        [`Exactness`]: With no layers if the two have another geometry, rotary embedding, dtype or quantisation, or if
        what differs is no part of the layers, as virtual tokens.
    """
    found = ModelIdentity.from_model(target)
    changed = tuple(_changed(source, found))
    known = _FOUND.setdefault(unwrap(target), {})
    if changed not in known:
        known[changed] = _exactness(target, changed)
    sides = [(side.geometry, side.rope_parameters, side.rotary) for side in (source, found)]
    return known[changed] if sides[0] == sides[1] else Exactness((), known[changed].changed)


def _changed(source: ModelIdentity, target: ModelIdentity) -> Iterator[str]:
    """Names of the tensors that differ, those of an adapter among them."""
    # Bit by bit: weights that agree after rounding do not give the same keys and values.
    sides: list[tuple[Any, Any]] = [(source.weights, target.weights)]
    sides += [
        (source.adapters.get(name, {}), target.adapters.get(name, {}))
        for name in sorted(source.adapters.keys() | target.adapters.keys())
    ]
    for before, after in sides:
        yield from (name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name))


def _exactness(model: PreTrainedModel, changed: Sequence[str]) -> Exactness:
    order = _Order(model)
    owners = tuple(dict.fromkeys(map(order.owner, changed)))
    exact = min((order.entered[owner] for owner in owners), default=len(order.layers))
    if exact < len(order.layers):
        first = [owner for owner in owners if order.entered[owner] == exact]
        within = any(order.left[owner] > exact for owner in first)  # its keys and values are made in there
        if not within and not _depends(model, order.layers[exact], first):
            exact += 1
    return Exactness(tuple(sorted(order.layers[:exact])), owners)


class _Order:
    """
    In which order the modules of a model run, and its layers give keys and values to the cache.

    Args:
        model (`PreTrainedModel`):
            Reads 8 tokens.
    """

    def __init__(self, model: PreTrainedModel):
        model = unwrap(model)
        self.layers: list[int] = []
        # How many layers have given their keys and values when a module is entered, and left, the first time.
        self.entered: dict[str, int] = {}
        self.left: dict[str, int] = {}
        hooks, thread = [], threading.get_ident()

        def listen(name: str, into: dict[str, int], *_) -> None:
            if threading.get_ident() == thread:
                into.setdefault(name, len(self.layers))

        try:
            for name, module in model.named_modules():
                hooks.append(module.register_forward_pre_hook(partial(listen, name, self.entered)))
                hooks.append(module.register_forward_hook(partial(listen, name, self.left)))
            read_into_cache(model, _OrderCache(model, self.layers), _tokens(model), num_logits=1)
        finally:
            for hook in hooks:
                hook.remove()

    def owner(self, tensor: str) -> str:
        """The innermost module around a tensor that has run. The model itself, "", for one that belongs to none."""
        name = tensor
        while name and name not in self.entered:
            name = name.rpartition(".")[0]
        return name


class _OrderCache(DynamicCache):
    """A cache that notes the order in which it is filled."""

    def __init__(self, model: PreTrainedModel, layers: list[int]):
        super().__init__(config=model.config)
        self.order = layers

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.order.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _depends(model: PreTrainedModel, layer_idx: int, modules: Sequence[str]) -> bool:
    """Whether a layer's keys and values are others when modules put out NaN, through which nothing is lost."""
    states = []
    for poisoned in ((), modules):
        with _poisoned(model, poisoned):
            states.append(read_first_layers(model, _tokens(model), num_layers=layer_idx).keys_and_values[layer_idx])
    return not all(torch.equal(*pair) for pair in zip(*states, strict=True))


@contextmanager
def _poisoned(model: PreTrainedModel, names: Sequence[str]) -> Iterator[None]:
    thread = threading.get_ident()  # others may run the same model at the same time

    def poison(module: nn.Module, args: Any, output: Any) -> Any:
        return _nan(output) if threading.get_ident() == thread else None

    hooks = [unwrap(model).get_submodule(name).register_forward_hook(poison) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _nan(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, torch.nan) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(map(_nan, value))
    return value


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    return torch.arange(_NUM_TOKENS)[None] % unwrap(model).get_input_embeddings().weight.shape[0]
