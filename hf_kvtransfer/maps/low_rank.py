"""A linear map through a narrow waist: smaller, and cheaper to apply."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap, num_previous, whole_number
from .linear import affine, num_inputs
from .storage import dense


class LowRankMap(LayerMap):
    """
    `bias + up @ (down @ features)`, all heads of a few source layers to all heads of one target layer.

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        in_features (`int`), out_features (`int`):
            As in [`LinearMap`].
        rank (`int`):
            Width of the waist.
        previous_tokens (`int`, *optional*, defaults to 0):
            As in [`LinearMap`].
    """

    spec_fields = ("source_layers", "rank")
    optional_fields = ("previous_tokens",)

    def __init__(
        self,
        source_layers: Sequence[int],
        in_features: int,
        out_features: int,
        rank: int,
        previous_tokens: int = 0,
    ):
        super().__init__()
        self.source_layers, self.previous_tokens = tuple(source_layers), previous_tokens
        self.down = random_projection(rank, in_features)
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        self.bias = nn.Parameter(torch.zeros(out_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "LowRankMap":
        """
        The untrained map of `{"kind": "low_rank", "source_layers": [3, 4], "rank": 64}`, see
        [`LayerMap.from_spec`].

        Raises:
            `ValueError`: the rank is not a positive integer.
        """
        rank = whole_number(spec, "rank", 1)
        in_features, previous = num_inputs(spec, source, token_features), num_previous(spec, token_features)
        return cls(spec["source_layers"], in_features, sum(target.widths), rank, previous)

    @property
    def workspace(self) -> int:
        """As [`LayerMap.workspace`]: the waist, and the waist at the target's token or the output."""
        out_features, rank = self.up.shape
        return rank + max(rank, out_features)

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        dtype = source_features[0].dtype
        down = dense(self.down, dtype)
        # What is gathered at the target's tokens is the waist.
        waist = affine(down, None, source_features, token_features, source_index, token_index)
        return linear(waist, dense(self.up, dtype), self.bias.to(dtype))

    @torch.no_grad()
    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """As [`LayerMap.compose`]."""
        self.up.copy_(matrix @ self.up)
        self.bias.copy_(matrix @ self.bias + offset)


def random_projection(out_features: int, in_features: int) -> nn.Parameter:
    """A weight that keeps the scale of its input. Behind it `up` starts at zero: the map adds nothing, but learns."""
    return nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5)
