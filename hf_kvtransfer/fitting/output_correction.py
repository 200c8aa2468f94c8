"""Small corrections of what a layer map puts out, which are folded into its weights once they are trained."""

from collections.abc import Sequence

import torch
from torch import nn

from ..geometry import LayerGeometry
from ..maps.base import LayerMap


class OutputCorrection(nn.Module):
    """
    A layer map whose keys and values are each scaled and shifted, and mixed within their head.

    Least squares makes uncertain keys small, so attention on them is too flat, and says nothing of which errors the
    target can bear. There are few numbers to train here, so few texts are enough.

    Args:
        layer_map (`LayerMap`):
            One that has [`LayerMap.compose`].
        layer (`LayerGeometry`):
            Of the target layer.
        mean (`torch.Tensor`), scale (`torch.Tensor`):
            Mean and standard deviation of what the map puts out, `[out_features]`. Training goes on in these units.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, layer_map: LayerMap, layer: LayerGeometry, mean: torch.Tensor, scale: torch.Tensor):
        super().__init__()
        self.layer_map, self.layer = layer_map, layer
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        heads, key_dim, value_dim = layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim
        self.gain, self.shift = (nn.Parameter(torch.zeros_like(mean)) for _ in range(2))
        self.mix_keys = nn.Parameter(mean.new_zeros(heads, key_dim, key_dim))
        self.mix_values = nn.Parameter(mean.new_zeros(heads, value_dim, value_dim))

    @property
    def source_layers(self) -> tuple[int, ...]:
        return self.layer_map.source_layers

    @property
    def previous_tokens(self) -> int:
        return self.layer_map.previous_tokens

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        states = self.layer_map(source_features, token_features, source_index)
        return self._correct(states).to(states.dtype)  # what the target's attention takes

    def _correct(self, states: torch.Tensor) -> torch.Tensor:
        scaled = (states - self.mean) / self.scale
        scaled = scaled + scaled * self.gain + self.shift
        mixed = [
            part + part @ mix
            for part, mix in zip(self.layer.split_heads(scaled), (self.mix_keys, self.mix_values), strict=True)
        ]
        merged = torch.cat([part.transpose(1, 2).flatten(2) for part in mixed], -1)
        return merged * self.scale + self.mean

    @torch.no_grad()
    def fold(self) -> LayerMap:
        """The layer map, its weights changed so that it gives what was corrected."""
        width = len(self.mean)
        answers = self._correct(torch.eye(width + 1, width, dtype=self.mean.dtype, device=self.mean.device)[None])[0]
        offset = answers[-1]  # the answer to zeros
        self.layer_map.compose((answers[:-1] - offset).T, offset)
        return self.layer_map


def can_be_corrected(layer_map: nn.Module) -> bool:
    """Whether [`OutputCorrection`] can be folded into a layer map."""
    return isinstance(layer_map, LayerMap) and type(layer_map).compose is not LayerMap.compose
