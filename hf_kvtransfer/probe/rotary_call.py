"""A call of a model's own rotary module, as the model made it, to be made again at other positions."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class RotaryCall:
    """One call of a model's rotary module, to be repeated at any positions.

    Args:
        module (`torch.nn.Module`):
            The rotary module of the model itself.
        arguments (`inspect.BoundArguments`):
            What the model called it with. Floating point tensors are shrunk to one element: rotary modules read only
            their device and dtype.
        position_name (`str`):
            The argument that held the position ids.
    """

    module: nn.Module
    arguments: inspect.BoundArguments
    position_name: str

    @property
    def layer_type(self) -> str | None:
        """The layer type the module was asked for, or `None` if it has one kind of frequencies only."""
        return self.arguments.arguments.get("layer_type")

    @torch.no_grad()
    def __call__(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            position_ids (`torch.Tensor` of shape `[batch, tokens]`):
                The positions.

        Returns:
            `tuple(torch.Tensor)`: cos and sin, `[batch, tokens, width]`, of the width and dtype that the module gives.
        """
        recorded = self.arguments.arguments[self.position_name]
        # M-RoPE is given one row of positions for each of time, height and width: text has the same in all of them.
        position_ids = position_ids.to(recorded.device).expand(*recorded.shape[:-2], *position_ids.shape)
        arguments = self.arguments.arguments | {self.position_name: position_ids}
        bound = inspect.BoundArguments(self.arguments.signature, arguments)
        return cos_and_sin(self.module(*bound.args, **bound.kwargs))


def cos_and_sin(position_embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits what a rotary module returns, a pair or one complex tensor, into cos and sin `[batch, tokens, width]`."""
    if isinstance(position_embeddings, torch.Tensor):
        position_embeddings = (position_embeddings.real, position_embeddings.imag)
    # Some M-RoPE modules leave time, height and width apart; for text they are the same.
    cos, sin = (t[0] if t.ndim == 4 else t for t in position_embeddings)
    return cos, sin
