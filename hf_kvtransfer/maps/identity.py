"""For models that cache almost the same: another precision, a fine-tune, an adapter."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap, whole_number
from .linear import at_tokens
from .low_rank import random_projection
from .storage import dense


class IdentityMap(LayerMap):
    """
    One source layer's keys and values as they are, or with a low-rank correction `bias + up @ (down @ states)`.

    Args:
        source_layers (`Sequence[int]`):
            The one source layer.
        num_features (`int`):
            Width of its keys and values, all heads, and of the target layer's.
        rank (`int`, *optional*, defaults to 0):
            Rank of the correction, 0 for none: then there are no weights.
    """

    spec_fields = ("source_layers", "rank")

    def __init__(self, source_layers: Sequence[int], num_features: int, rank: int = 0):
        super().__init__()
        self.source_layers, self.rank = tuple(source_layers), rank
        if rank:
            self.down = random_projection(rank, num_features)
            self.up = nn.Parameter(torch.zeros(num_features, rank))
            self.bias = nn.Parameter(torch.zeros(num_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "IdentityMap":
        """
        The untrained map of `{"kind": "identity", "source_layers": [3], "rank": 8}`, see [`LayerMap.from_spec`].

        Raises:
            `ValueError`: not one source layer, one of other heads than the target's, or the rank is no integer.
        """
        rank = whole_number(spec, "rank", 0)
        if len(spec["source_layers"]) != 1:
            raise ValueError(f"the identity reads one source layer, not {spec['source_layers']}")
        layer = source.layers[spec["source_layers"][0]]
        found, wanted = (
            (side.num_key_value_heads, side.key_head_dim, side.value_head_dim) for side in (layer, target)
        )
        if found != wanted:
            raise ValueError(
                "the identity needs equal KV heads, key and value widths, but the source layer has "
                f"{', '.join(map(str, found))} and the target layer {', '.join(map(str, wanted))}"
            )
        return cls(spec["source_layers"], sum(target.widths), rank)

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]; `token_features` are not used. Without a correction nothing is copied."""
        (states,) = source_features
        if source_index is not None:
            states = at_tokens(states, source_index)
        if not self.rank:
            return states
        down, up = (dense(weight, states.dtype) for weight in (self.down, self.up))
        return states + linear(linear(states, down), up, self.bias.to(states.dtype))
