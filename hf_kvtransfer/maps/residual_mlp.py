"""A linear map and a small MLP for what no linear map can say."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear, silu

from ..geometry import KVGeometry, LayerGeometry
from .base import num_previous, whole_number
from .linear import LinearMap, affine, num_inputs
from .low_rank import random_projection
from .storage import dense


class ResidualMLPMap(LinearMap):
    """
    `weight @ x + bias + up @ silu(down @ (x - feature_mean) / feature_scale + down_bias)`.

    `up` starts at zero: until it is trained, the map is its linear part.

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        in_features (`int`), out_features (`int`):
            As in [`LinearMap`].
        hidden_size (`int`):
            Width of the MLP.
        previous_tokens (`int`, *optional*, defaults to 0):
            As in [`LinearMap`].
    """

    spec_fields = ("source_layers", "hidden_size")
    feature_mean: torch.Tensor
    feature_scale: torch.Tensor

    def __init__(
        self,
        source_layers: Sequence[int],
        in_features: int,
        out_features: int,
        hidden_size: int,
        previous_tokens: int = 0,
    ):
        super().__init__(source_layers, in_features, out_features, previous_tokens)
        self.down = random_projection(hidden_size, in_features)
        self.down_bias = nn.Parameter(torch.zeros(hidden_size))
        self.up = nn.Parameter(torch.zeros(out_features, hidden_size))
        # Measured, not trained.
        self.register_buffer("feature_mean", torch.zeros(in_features))
        self.register_buffer("feature_scale", torch.ones(in_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "ResidualMLPMap":
        """
        The untrained map of `{"kind": "residual_mlp", "source_layers": [3, 4], "hidden_size": 64}`, see
        [`LayerMap.from_spec`].

        Raises:
            `ValueError`: the width is not a positive integer.
        """
        hidden_size = whole_number(spec, "hidden_size", 1)
        in_features, previous = num_inputs(spec, source, token_features), num_previous(spec, token_features)
        return cls(spec["source_layers"], in_features, sum(target.widths), hidden_size, previous)

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        output = super().forward(source_features, token_features, source_index, token_index)
        return output + self.residual(source_features, token_features, source_index, token_index)

    def residual(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the MLP adds, arguments and result as in [`LayerMap.forward`]."""
        dtype = source_features[0].dtype
        widths = [states.shape[-1] for states in source_features]
        widths.append(len(self.feature_mean) - sum(widths))
        *moments, token_moments = zip(
            self.feature_mean.to(dtype).split(widths), self.feature_scale.to(dtype).split(widths), strict=True
        )
        # Not folded into `down`: in bfloat16 a large mean would drown the feature.
        standardised = (
            (states - mean) / scale for states, (mean, scale) in zip(source_features, moments, strict=True)
        )
        if token_features is not None:
            token_features = token_features.to(dtype)
            if self.previous_tokens and token_index is not None:
                # Each place has moments of its own.
                token_features, token_index = torch.cat([token_features[index] for index in token_index], -1), None
            token_features = (token_features - token_moments[0]) / token_moments[1]
        hidden = affine(
            dense(self.down, dtype), self.down_bias.to(dtype), standardised, token_features, source_index, token_index
        )
        return linear(silu(hidden), dense(self.up, dtype))

    @torch.no_grad()
    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """As [`LayerMap.compose`]."""
        super().compose(matrix, offset)
        self.up.copy_(matrix @ self.up)
