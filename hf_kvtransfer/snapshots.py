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


def before_update(held: Snapshot, layer: Any, states: tuple[torch.Tensor, torch.Tensor]) -> Snapshot | None:
    """
    What a layer was before an update, without keeping the tensors of that time alive.

    Args:
        held (`Snapshot`):
            The layer when it was translated, before the update.
        layer (`CacheLayerMixin`):
            The layer now.
        states (`tuple[torch.Tensor, torch.Tensor]`):
            The keys and values that its update has returned.

    Returns:
        `Snapshot`, *optional*: With views of what the layer holds now, or has held in the same storage. `None` for a
        layer that does not grow by concatenation.
    """
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not held.attributes["is_initialized"]:
        return None
    views = {}
    for name, returned in zip(("keys", "values"), states, strict=True):
        now, tokens = getattr(layer, name), held.attributes[name].shape[2]
        # A window that has slid has dropped the first tokens, which are still there in what was returned.
        whole = now if now.shape[2] >= returned.shape[2] else returned
        views[name] = whole[:, :, :tokens]
    return Snapshot(held.cls, held.attributes | views)
