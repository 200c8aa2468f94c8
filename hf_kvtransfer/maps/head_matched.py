"""Each target KV head from one source KV head in each selected layer."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap, num_previous
from .linear import affine
from .storage import dense


class HeadMatchedMap(LayerMap):
    """
    A small affine map for each target KV head, all of them in one batched product.

    With `n` KV heads on each side it has `n` times fewer weights on the source's states than [`LinearMap`].

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        source_heads (`Sequence[Sequence[int]]`):
            For each source layer the source KV head of each target KV head.
        source_geometries (`Sequence[LayerGeometry]`):
            What each source layer caches.
        target (`LayerGeometry`):
            What the target layer caches.
        token_features (`int`):
            Width of the token features, of all tokens that are read together, 0 if there are none.
        previous_tokens (`int`, *optional*, defaults to 0):
            As in [`LinearMap`].

    The weight is `[heads, key_head_dim + value_head_dim, in_features]`. A head's features are, layer by layer, the
    keys then the values of its source head, then the token features.
    """

    spec_fields = ("source_layers", "source_heads")
    optional_fields = ("previous_tokens",)

    def __init__(
        self,
        source_layers: Sequence[int],
        source_heads: Sequence[Sequence[int]],
        source_geometries: Sequence[LayerGeometry],
        target: LayerGeometry,
        token_features: int,
        previous_tokens: int = 0,
    ):
        super().__init__()
        self.source_layers, self.previous_tokens = tuple(source_layers), previous_tokens
        self.source_heads = tuple(map(tuple, source_heads))
        self.source_geometries, self.target = tuple(source_geometries), target
        in_features = token_features + sum(
            layer.key_head_dim + layer.value_head_dim for layer in self.source_geometries
        )
        heads, out_features = target.num_key_value_heads, target.key_head_dim + target.value_head_dim
        self.weight = nn.Parameter(torch.zeros(heads, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(heads, out_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "HeadMatchedMap":
        """
        The untrained map of `{"kind": "head_matched", "source_layers": [3, 4], "source_heads": [[0, 0], [1, 0]]}`,
        see [`LayerMap.from_spec`].

        Raises:
            `ValueError`: a target head has no source head in a layer, or one that does not exist.
        """
        layers, heads = spec["source_layers"], spec["source_heads"]
        if len(heads) != len(layers):
            raise ValueError(f"`source_heads` has entries for {len(heads)} source layers, there are {len(layers)}")
        geometries = [source.layers[i] for i in layers]
        for i, chosen, layer in zip(layers, heads, geometries, strict=True):
            known = range(layer.num_key_value_heads)
            if len(chosen) != target.num_key_value_heads or any(type(j) is not int or j not in known for j in chosen):
                raise ValueError(
                    f"`source_heads` of source layer {i} are {chosen}, but {target.num_key_value_heads} KV heads are "
                    f"to be matched to one of its {len(known)} each"
                )
        previous = num_previous(spec, token_features)
        return cls(layers, heads, geometries, target, (1 + previous) * token_features, previous)

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        dtype = source_features[0].dtype
        weight, bias = dense(self.weight, dtype), self.bias.to(dtype)
        output = affine(weight, bias, self._matched(source_features), token_features, source_index, token_index)
        by_token = output.permute(1, 2, 0, 3)
        parts = by_token.split((self.target.key_head_dim, self.target.value_head_dim), -1)
        return torch.cat([part.flatten(2) for part in parts], -1)

    @torch.no_grad()
    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """As [`LayerMap.compose`]."""
        keys, values = torch.arange(len(offset), device=offset.device).split(self.target.widths)
        heads = len(self.weight)
        for head, rows in enumerate(torch.cat([keys.view(heads, -1), values.view(heads, -1)], 1)):
            own = matrix[rows][:, rows]
            self.weight[head] = own @ self.weight[head]
            self.bias[head] = own @ self.bias[head] + offset[rows]

    def _matched(self, source_features: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Keys, then values, of each layer's matched heads, `[heads, batch, source_tokens, head_dim]`."""
        for states, layer, heads in zip(source_features, self.source_geometries, self.source_heads, strict=True):
            for part in layer.split_heads(states):
                yield torch.stack([part[:, j] for j in heads])
