"""
Devices `sim:0`, `sim:1`, ... on a machine that has none: their tensors are on the CPU with real numbers, and an
operation on tensors of two of them fails as it does between two GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


# May take tensors of two devices, or of the CPU beside one: copies, and indices on the CPU.
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::set_data", "aten::_copy_from")
_INDEXING = ("aten::index", "aten::_index_put", "aten::_unsafe_index")


class SimulatedTensor(torch.Tensor):
    """A tensor that says that it is elsewhere."""

    @staticmethod
    def __new__(cls, data, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device(device),
            requires_grad=False,
        )

    def __init__(self, data, device):
        self.data_on_cpu = data

    def __repr__(self):
        return f"SimulatedTensor({self.data_on_cpu}, device={self.device})"

    def tolist(self):
        return self.data_on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _is_simulated(device) -> bool:
    return device is not None and torch.device(device).type == "sim"


def _run(func, args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    devices = {value.device for value in flat if isinstance(value, SimulatedTensor)}
    on_cpu = any(isinstance(v, torch.Tensor) and not isinstance(v, SimulatedTensor) and v.dim() > 0 for v in flat)
    name = func._schema.name
    mixed = len(devices) > 1 or (devices and on_cpu and not name.startswith(_INDEXING))
    if mixed and name not in _COPIES:
        found = sorted(map(str, devices)) + ["cpu"] * on_cpu
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {name}")
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    elif name == "aten::copy_":
        device = args[0].device
    else:
        device = next(iter(devices), torch.device("cpu"))
    if device.type == "sim" and device.index is None:
        device = torch.device("sim", 0)
    plain = [value.data_on_cpu if isinstance(value, SimulatedTensor) else value for value in flat]
    plain_args, plain_kwargs = tree_unflatten(plain, spec)
    if _is_simulated(plain_kwargs.get("device")):
        plain_kwargs["device"] = torch.device("cpu")
    output = func(*plain_args, **plain_kwargs)
    # What is written in place, or into `out`, is returned as it was given.
    given = {id(value.data_on_cpu): value for value in flat if isinstance(value, SimulatedTensor)}

    def wrap(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, SimulatedTensor):
            return value
        if id(value) in given:
            return given[id(value)]
        return SimulatedTensor(value, device) if device.type == "sim" else value

    return tree_map(wrap, output)


class _Constructors(TorchFunctionMode):
    """`torch.tensor(data, device=...)` allocates below the dispatcher: made on the CPU and copied instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_simulated(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tree_flatten((args, kwargs))[0]
        if _is_simulated(kwargs.get("device")) or any(isinstance(value, SimulatedTensor) for value in tensors):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def simulated_devices() -> Iterator[None]:
    """In here there are devices of type `sim`. Registers them for the whole process: run it in one of its own."""
    _setup_privateuseone_for_python_backend("sim")
    with _Constructors(), _Dispatch():
        yield


def spread(model: nn.Module, device_of: Callable[[str], str]) -> nn.Module:
    """
    Spread a decoder over devices, in place, with accelerate's own hooks.

    Args:
        model (`PreTrainedModel`):
            With modules named as Llama's.
        device_of (`Callable`):
            The device of the module of a name.
    """
    for name, module in model.named_modules():
        device = device_of(name)
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                moved = SimulatedTensor(parameter.detach(), device)
                module._parameters[key] = nn.Parameter(moved, requires_grad=False)
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = SimulatedTensor(buffer, device)
    skipped = list(model._skip_keys_device_placement)
    decoder = model.model
    for name, module in model.named_modules():
        if module in (decoder.embed_tokens, decoder.norm, decoder.rotary_emb, model.lm_head, *decoder.layers):
            hook = AlignDevicesHook(torch.device(device_of(name)), io_same_device=False, skip_keys=skipped)
            add_hook_to_module(module, hook)
    return model
