"""Models whose weights accelerate loads only while a module runs. Internal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def unchanged_offloading(model: nn.Module) -> Iterator[None]:
    """
    Leave the weights of offloaded modules where they were found.

    A module drops its weights when its forward ends. Where a model runs inside a forward of its own, that takes away
    what the outer forward still needs; and a forward that is ended by an exception never drops them.

    Args:
        model (`nn.Module`):
            Runs in here. Nothing is done for a model that is not offloaded.
    """
    before = [(module, hook, _is_loaded(module, hook)) for module in model.modules() for hook in _hooks(module)]
    try:
        yield
    finally:
        for module, hook, was_loaded in before:
            if was_loaded and not _is_loaded(module, hook):
                hook.pre_forward(module)
            elif not was_loaded and _is_loaded(module, hook):
                hook.post_forward(module, None)


class ForwardEnded(BaseException):
    """Ends a forward pass. No `Exception`: nothing on the way may take it for a failure and do things another way."""


def _hooks(module: nn.Module) -> list[Any]:
    """Those of a module's hooks that offload its weights."""
    hook = vars(module).get("_hf_hook")  # `getattr` takes longer, and there are hundreds of modules
    return [hook for hook in getattr(hook, "hooks", [hook]) if getattr(hook, "offload", False)]


def _is_loaded(module: nn.Module, hook: Any) -> bool:
    return any(weight.device.type != "meta" for weight in module.parameters(recurse=hook.place_submodules))
