"""Cache layers as they were before a forward pass, to go back to if it fails."""

import dataclasses
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from .layers import PendingLayer


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """
    What a layer is at a moment. Made by [`Snapshot.of`].

    Args:
        cls (`type`):
            Its class, which changes when a pending layer is translated.
        attributes (`dict[str, Any]`):
            Its attributes. Most layers replace their tensors when they are updated, so references are enough.
    """

    cls: type
    attributes: dict[str, Any]

    @classmethod
    def of(cls, layer: Any) -> "Snapshot":
        """The layer as it is now."""
        attributes = dict(vars(layer))
        if isinstance(layer, PendingLayer):
            attributes["pending"] = dataclasses.replace(layer.pending)
        elif isinstance(layer, StaticLayer):  # writes into its tensors
            attributes = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in attributes.items()
            }
        return cls(type(layer), attributes)

    def restored(self) -> Any:
        """A layer as it was then."""
        layer: Any = object.__new__(self.cls)
        layer.__dict__.update(self.attributes)
        return layer


class Growth:
    """
    What a growing layer is before an update, without keeping the tensors of that time alive.

    Args:
        layer (`DynamicLayer` or `DynamicSlidingWindowLayer`):
            The layer, which holds tokens.
    """

    def __init__(self, layer: Any):
        self.tokens = layer.keys.shape[2]
        self.attributes = {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}

    @classmethod
    def of(cls, layer: Any) -> "Growth | None":
        """`None` for an empty layer, or one that does not grow by concatenation."""
        growing = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized
        return cls(layer) if growing else None

    def before(self, layer: Any, states: tuple[torch.Tensor, torch.Tensor]) -> Snapshot:
        """
        Args:
            layer (`CacheLayerMixin`):
                The same layer after the update.
            states (`tuple[torch.Tensor, torch.Tensor]`):
                The keys and values that the update has returned.

        Returns:
            `Snapshot`: The layer before it, with views of what it holds now, or has returned from the same storage.
        """
        views = {}
        for name, returned in zip(("keys", "values"), states, strict=True):
            now = getattr(layer, name)
            # A window that has slid has dropped the first tokens, which are still there in what was returned.
            whole = now if now.shape[2] >= returned.shape[2] else returned
            views[name] = whole[:, :, : self.tokens]
        return Snapshot(type(layer), self.attributes | views)
