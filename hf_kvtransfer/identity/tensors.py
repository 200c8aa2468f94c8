"""The tensors that decide what a model computes, under the names that they have without any wrapper. Internal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import unwrap
from ..errors import UnsupportedModelError


# What PEFT puts a module of the model under when it wraps it. A wrapper tells which adapters are active in it.
_WRAPPED = ("base_layer", "original_module")

# What the tensors of adapters are called that put embeddings or states of their own in front of the context.
VIRTUAL_TOKENS = "prompt_encoder"


@dataclass(frozen=True, eq=False)
class Offloaded:
    """Where accelerate keeps a tensor that the model itself does not hold at rest.

    Args:
        hook (`accelerate.hooks.ModelHook`):
            The hook that loads it before each forward.
        name (`str`):
            What the hook's `weights_map` calls it.
    """

    hook: Any
    name: str

    @property
    def on_disk(self) -> bool:
        """Whether it is read from a file each time, and not a tensor that is kept in memory."""
        name = getattr(self.hook.weights_map, "prefix", "") + self.name
        weights = getattr(self.hook.weights_map, "dataset", self.hook.weights_map)
        return name in getattr(weights, "index", {}) and name not in getattr(weights, "state_dict", {})

    def load(self) -> torch.Tensor:
        return self.hook.weights_map[self.name]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as it is stored.

    Args:
        tensor (`torch.Tensor`):
            The tensor, on the meta device if it is offloaded.
        quantization (`str`, *optional*):
            How it is quantised, or a part of something quantised. `None` for floating point data of 16 bits and more.
        offloaded (`Offloaded`, *optional*):
            Where its data is, if it is not in `tensor`.
    """

    tensor: torch.Tensor
    quantization: str | None = None
    offloaded: Offloaded | None = None


@dataclass(frozen=True, eq=False)
class ModelTensors:
    """The parameters and buffers of a model, each once.

    Names are those of the model without adapters, so that a model has the same names inside and outside PEFT.

    Args:
        weights (`dict[str, StoredTensor]`):
            Parameters and persistent buffers of the model without adapters.
        adapters (`dict[str, dict[str, StoredTensor]]`):
            For each active adapter its parameters and, as scalars, its scalings. An adapter that is disabled, or
            merged into the weights, is not active.
        rotary (`dict[str, StoredTensor]`):
            Floating point buffers of the rotary modules.
        tied (`dict[str, str]`):
            Names of weights, each with that of another which may be the same one: accelerate gives both of two tied
            parameters a tensor of their own when it takes their data away.
    """

    weights: dict[str, StoredTensor] = field(default_factory=dict)
    adapters: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    rotary: dict[str, StoredTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_model(cls, model: PreTrainedModel, rotary_modules: Iterable[nn.Module] = ()) -> "ModelTensors":
        """
        Args:
            model ([`~transformers.PreTrainedModel`]):
                A live model, which may be spread over devices, offloaded, quantised or wrapped by PEFT.
            rotary_modules (`Iterable[torch.nn.Module]`, *optional*):
                Its rotary modules.

        Returns:
            [`ModelTensors`]: its tensors, not copied.

        Raises:
            [`UnsupportedModelError`]: if the data of a tensor is nowhere.
        """
        walk = _Walk(rotary_modules)
        base = unwrap(model)
        walk.visit(base, "", "", None, walk.tensors.weights)
        if base is not model:
            prompts = getattr(model, VIRTUAL_TOKENS, None)
            walk.visit_adapters(prompts, getattr(model, "active_adapters", ()), VIRTUAL_TOKENS, None)
        weights = walk.tensors.weights
        for name, source in getattr(base, "all_tied_weights_keys", {}).items():
            if name in weights and source in weights and (weights[name].offloaded or weights[source].offloaded):
                walk.tensors.tied[name] = source
        return walk.tensors


class _Walk:
    def __init__(self, rotary_modules: Iterable[nn.Module]):
        self.tensors = ModelTensors()
        self.rotary_modules = set(rotary_modules)
        self.seen: set[int] = set()

    def visit(self, module: nn.Module, name: str, path: str, offload: Offloaded | None, into: dict) -> None:
        """`path` is where a module is, `name` the same without what PEFT has put in between."""
        hook = _offload_hook(module)
        offload = offload if hook is None else Offloaded(hook, "")
        if module in self.rotary_modules:
            # Two names of one tensor can part later: `longrope` does that.
            for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.is_floating_point():
                    self.add(module, key, buffer, _join(name, key), offload, self.tensors.rotary)
            return
        for key, parameter in module.named_parameters(recurse=False):
            self.add(module, key, parameter, _join(name, key), offload, into)
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                self.add(module, key, buffer, _join(name, key), offload, into)

        wraps = is_wrapper(module)
        active = active_adapters(module) if wraps else []
        for key, child in module._modules.items():
            if child is None:
                continue
            below = offload and Offloaded(offload.hook, _join(offload.name, key))
            if not wraps:
                self.visit(child, _join(name, key), _join(path, key), below, into)
            elif key in _WRAPPED or is_wrapper(child):
                self.visit(child, name, _join(path, key), below, into)
            else:
                self.visit_adapters(child, active, _join(path, key), below)
        scalings = module.__dict__.get("scaling")  # an attention has one too, but a number
        for adapter in active if isinstance(scalings, dict) else ():
            if adapter in scalings:
                scalar = StoredTensor(torch.tensor(float(scalings[adapter]), dtype=torch.float64))
                self.tensors.adapters.setdefault(adapter, {})[_join(path, "scaling")] = scalar

    def visit_adapters(
        self, container: nn.Module | None, active: Iterable[str], path: str, offload: Offloaded | None
    ) -> None:
        """Goes through what a dict of PEFT holds for each active adapter: a module, a parameter or a buffer."""
        if container is None:
            return
        for adapter in active:
            into = self.tensors.adapters.setdefault(adapter, {})
            if (module := container._modules.get(adapter)) is not None:
                below = offload and Offloaded(offload.hook, _join(offload.name, adapter))
                self.visit(module, path, path, below, into)
            tensor = container._parameters.get(adapter, container._buffers.get(adapter))
            if tensor is not None:
                self.add(container, adapter, tensor, path, offload, into)

    def add(
        self, module: nn.Module, key: str, tensor: torch.Tensor, name: str, offload: Offloaded | None, into: dict
    ) -> None:
        if id(tensor) in self.seen and into is not self.tensors.rotary:  # tied
            return
        self.seen.add(id(tensor))
        for suffix, part, quantization in _parts(module, tensor):
            place = offload and Offloaded(offload.hook, _join(offload.name, key))
            if part.is_meta and (place is None or suffix):
                raise UnsupportedModelError(
                    f"{name}{suffix} of the model holds no data: it is on the meta device, and no hook of accelerate "
                    "says where else. Load the model's weights before using it."
                )
            into[name + suffix] = StoredTensor(part, quantization, place if part.is_meta else None)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _offload_hook(module: nn.Module) -> Any:
    hook = module.__dict__.get("_hf_hook")  # `getattr` of a wrapper of PEFT would give that of what it wraps
    hooks = getattr(hook, "hooks", [hook])
    return next((hook for hook in hooks if getattr(hook, "weights_map", None) is not None), None)


def is_wrapper(module: nn.Module) -> bool:
    """Whether PEFT has put this in place of a module of the model."""
    return any(key in module._modules for key in _WRAPPED) and hasattr(module, "active_adapters")


def active_adapters(module: Any) -> list[str]:
    """The adapters that a layer of PEFT applies: none while they are disabled, or merged into its weights."""
    return [] if module.disable_adapters or module.merged_adapters else list(module.active_adapters)


def _parts(module: nn.Module, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """What a parameter is stored as: itself, or the codes and scales of a quantised one, and how it is quantised."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # bitsandbytes, 4 bits
        how = f"bitsandbytes {state.quant_type} in blocks of {state.blocksize}"
        # A forward on some CPUs packs the codes in another order, and unfolds the nested scales.
        how += ", packed for a CPU" if getattr(state, "packing_format_for_cpu", False) else ""
        how += ", nested" if state.nested else ""
        yield "", tensor.data, how
        yield ".absmax", state.absmax, how
        if state.nested:
            yield ".state2.absmax", state.state2.absmax, how
    elif hasattr(tensor, "__tensor_flatten__"):  # torchao, and other tensors made of tensors
        for key in tensor.__tensor_flatten__()[0]:
            for suffix, part, how in _parts(module, getattr(tensor, key)):
                yield f".{key}{suffix}", part, f"{type(tensor).__name__} of {how or part.dtype}"
    else:
        plain = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        how = None if plain else str(tensor.dtype).removeprefix("torch.")
        yield "", tensor.data, how
        # bitsandbytes, 8 bits: the first forward moves the scales from the parameter to its layer.
        scales = getattr(tensor, "SCB", None)
        scales = getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales
        if tensor.dtype == torch.int8 and scales is not None:
            yield ".SCB", scales, how
