"""A mapper with other layer maps in it: what controls and planted corruptions are made of."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ..mapper import KVMapper
from ..maps.base import LayerMap
from ..maps.identity import IdentityMap
from ..maps.storage import dequantized, matrices


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


def raw_source(mapper: KVMapper) -> KVMapper | None:
    """
    A mapper that gives each source layer's states as they are to the target layer of the same number. Native layers
    stay native.

    Args:
        mapper ([`KVMapper`]):
            Of the same pair. It is not changed.

    Returns:
        [`KVMapper`]: `None` where the two models cache other shapes.
    """
    shapes = [
        [layer and (layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim) for layer in side.layers]
        for side in (mapper.source_geometry, mapper.target_geometry)
    ]
    if shapes[0] != shapes[1]:
        return None
    maps = list(mapper.layers)
    for i in mapper.config.mapped_layers:
        maps[i] = IdentityMap([i], mapper.source_geometry.num_features(i))
    return with_maps(mapper, maps)


@torch.no_grad()
def random_map(mapper: KVMapper, seed: int) -> KVMapper:
    """
    The mapper with each output's weights in random order, for maps of every kind. Quantised weights become plain ones.

    An identity has no weights that could be shuffled, but it is a linear map: its weights are those of the identity
    matrix, and in random order each of its outputs reads one feature, whichever it may be.

    Args:
        mapper ([`KVMapper`]):
            Is not changed. Its biases stay as they are, and its native layers native.
        seed (`int`):
            Of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    maps = []
    for layer_map in mapper.layers:
        other = dequantized(layer_map, mapper.dtype)
        for _, _, weight in matrices(other):
            order = torch.rand(weight.shape, generator=generator).argsort(-1)
            weight.copy_(weight.gather(-1, order.to(weight.device)))
        if isinstance(other, IdentityMap):
            width = mapper.source_geometry.num_features(other.source_layers[0])
            other = _OfOtherFeatures(other, torch.randint(width, (width,), generator=generator))
        maps.append(other)
    return with_maps(mapper, maps)


class _OfOtherFeatures(LayerMap):
    """A map of one source layer that takes each feature from another place."""

    places: torch.Tensor

    def __init__(self, layer_map: IdentityMap, places: torch.Tensor):
        super().__init__()
        self.layer_map, self.source_layers = layer_map, layer_map.source_layers  # an identity reads no tokens
        self.register_buffer("places", places)

    def forward(self, source_features: Sequence[torch.Tensor], *features) -> torch.Tensor:
        return self.layer_map([states[..., self.places] for states in source_features], *features)
