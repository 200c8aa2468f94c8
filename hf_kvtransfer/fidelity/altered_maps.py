"""A mapper with other layer maps in it: what controls and planted corruptions are made of."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..mapper import KVMapper
from ..maps.linear import at_tokens


def with_maps(mapper: KVMapper, maps: Sequence[nn.Module]) -> KVMapper:
    """
    A mapper of the same config with other layer maps, for [`Translation.with_mapper`].

    Args:
        mapper ([`KVMapper`]):
            Is not changed.
        maps (`Sequence[nn.Module]`):
            One for each target layer.
    """
    other = copy.copy(mapper)
    other._modules = mapper._modules | {"layers": nn.ModuleList(maps)}
    return other


@torch.no_grad()
def altered(layer_map: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of a layer map whose weight matrices went through `change`. Biases stay as they are."""
    other = copy.deepcopy(layer_map)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.copy_(change(parameter))
    return other


class Unchanged(nn.Module):
    """
    Gives the states of one source layer to the target as they are.

    Args:
        layer_idx (`int`):
            The source layer.
    """

    def __init__(self, layer_idx: int):
        super().__init__()
        self.source_layers = (layer_idx,)

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LinearMap.forward`]; `token_features` are not used."""
        (states,) = source_features
        return states if source_index is None else at_tokens(states, source_index)
