"""What the modules of a model are called with while it runs, and what its cache is given."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from .rotary_call import RotaryCall


NUM_PROBE_TOKENS = 8


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module, to be repeated with other arguments."""

    module: nn.Module
    args: tuple
    kwargs: dict
    output: Any = None

    @cached_property
    def rotary_call(self) -> RotaryCall:
        """This call, kept without its activations."""
        bound = self.bind()
        for name, value in bound.arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                bound.arguments[name] = torch.empty([1] * value.ndim, dtype=value.dtype, device=value.device)
        assert self.position_name is not None
        return RotaryCall(self.module, bound, self.position_name)

    @property
    def position_name(self) -> str | None:
        arguments = self.bind().arguments
        return next((name for name, value in arguments.items() if is_position_ids(value)), None)

    def bind(self) -> inspect.BoundArguments:
        return inspect.signature(self.module.forward).bind(*self.args, **self.kwargs)

    def repeat(self, replace: Callable[[Any], Any]) -> None:
        self.module(*(replace(v) for v in self.args), **{k: replace(v) for k, v in self.kwargs.items()})


class RecordingCache(DynamicCache):
    """A cache that tells what it is given."""

    def __init__(self, config, on_update: Callable | None = None):
        super().__init__(config=config)
        self.on_update = on_update
        self.updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        # Copies: an attention may well go on to write into what it gave away.
        self.updates[layer_idx] = (key_states.to("cpu", copy=True), value_states.to("cpu", copy=True))
        if self.on_update is not None:
            self.on_update(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def is_position_ids(value: Any) -> bool:
    """Whether an argument of a module stands for the positions of the probe's tokens."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim >= 2
        and value.dtype in (torch.int64, torch.int32)
        and value.shape[-1] == NUM_PROBE_TOKENS
    )


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list) and value and all(isinstance(v, torch.Tensor) for v in value):
        return tuple(value)
    return ()


def match_embeddings(named: Any, arguments: list[Any], candidates: list[ModuleCall]) -> tuple[Any, ModuleCall | None]:
    """Finds the argument that is an embedding of positions, and the call that made it."""
    for argument in arguments:
        tensors = _tensors(argument)
        for call in candidates:
            if tensors and _same(tensors, _tensors(call.output), lambda a, b: a is b):
                return argument, call
    # accelerate gives a layer on another device a copy. By value also when called by no name that is known here.
    for argument in [named] if named is not None else arguments:
        tensors = _tensors(argument)
        for call in candidates:
            if tensors and _same(tensors, _tensors(call.output), lambda a, b: torch.equal(a.cpu(), b.cpu())):
                return argument, call
    return named, None


def _same(first: tuple, second: tuple, equal: Callable) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and equal(a, b) for a, b in zip(first, second, strict=True)
    )
