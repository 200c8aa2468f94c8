"""What a layer map costs before it is fitted: bytes as saved, multiply-adds for each token."""

from functools import lru_cache
from typing import Any

import torch

from ..geometry import KVGeometry
from ..maps import build_layer_map
from ..maps.storage import num_bytes, reserve_codes
from .inputs import Inputs


# Of a `residual_mlp` map, if none is asked for.
DEFAULT_HIDDEN_SIZE = 256
# Of a saved file, in bytes: its own header, and the header's entry for each tensor (name, shape, place).
_FILE_HEADER, _TENSOR_HEADER = 128, 144


class MapPlan:
    """
    The specs of one kind of layer map for a pair of models, and what a map of each costs.

    Args:
        kind (`str`):
            One of [`~maps.LAYER_MAPS`].
        source ([`KVGeometry`]), target ([`KVGeometry`]):
            What the two models cache.
        token_features (`int`):
            Width of the features of one token, 0 if there are none.
        rank (`int`, *optional*):
            Of `"low_rank"` maps, by default a quarter of the target layer's width, and of the correction of
            `"identity"` maps, by default 0.
        hidden_size (`int`, *optional*):
            Of `"residual_mlp"` maps.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Of the weights.
        storage (`dict`, *optional*):
            `bits` and `group_size`, if the weights are quantised.

    Raises:
        `ValueError`: an option does not belong to the kind.
    """

    def __init__(
        self,
        kind: str,
        source: KVGeometry,
        target: KVGeometry,
        token_features: int,
        rank: int | None = None,
        hidden_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        storage: dict | None = None,
    ):
        for name, value, kinds in (
            ("rank", rank, ("low_rank", "identity")),
            ("hidden_size", hidden_size, ("residual_mlp",)),
        ):
            if value is not None and kind not in kinds:
                raise ValueError(
                    f"`{name}={value}` is for kind {' and '.join(kinds)}, not for {kind!r}: leave it out."
                )
            least = 0 if kind == "identity" else 1
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be {least} or more for kind {kind!r}, got {value!r}.")
        self.kind, self.source, self.target, self.token_features = kind, source, target, token_features
        self.rank, self.hidden_size, self.dtype, self.storage = rank, hidden_size, dtype, storage
        self._cost = lru_cache(maxsize=None)(self._measure)

    def spec(self, target_layer: int, inputs: Inputs) -> dict[str, Any]:
        """The spec of a map that reads some inputs, with each head of a head-matched map on the source's first."""
        source_layers = list(inputs.source_layers)
        spec: dict[str, Any] = {"kind": self.kind, "source_layers": source_layers}
        if inputs.previous_tokens:
            spec["previous_tokens"] = inputs.previous_tokens
        if self.kind == "head_matched":
            heads = self.target.layers[target_layer].num_key_value_heads
            spec["source_heads"] = [[0] * heads for _ in source_layers]
        elif self.kind == "low_rank":
            width = self.target.num_features(target_layer)
            spec["rank"] = max(1, width // 4) if self.rank is None else min(self.rank, width)
        elif self.kind == "identity":
            spec["rank"] = min(self.rank or 0, self.target.num_features(target_layer))
        elif self.kind == "residual_mlp":
            spec["hidden_size"] = self.hidden_size or DEFAULT_HIDDEN_SIZE
        return spec

    def num_bytes(self, target_layer: int, inputs: Inputs) -> int:
        """Bytes that a map takes in a saved mapper."""
        return self._cost(target_layer, tuple(inputs.source_layers), inputs.previous_tokens)[0]

    def num_products(self, target_layer: int, inputs: Inputs) -> int:
        """Multiply-adds that a map takes for each token."""
        return self._cost(target_layer, tuple(inputs.source_layers), inputs.previous_tokens)[1]

    def token_width(self, inputs: Inputs) -> int:
        """Width of the features of all tokens that a map reads together."""
        return (1 + inputs.previous_tokens) * self.token_features

    def num_features(self, target_layer: int, inputs: Inputs) -> int:
        """Features from which one output of a map is predicted."""
        layers = [self.source.layers[j] for j in inputs.source_layers]
        if self.kind == "head_matched":
            return self.token_width(inputs) + sum(layer.key_head_dim + layer.value_head_dim for layer in layers)
        if self.kind == "identity" and not self.rank:
            return 1
        return self.token_width(inputs) + sum(sum(layer.widths) for layer in layers)

    def file_overhead(self) -> int:
        """Bytes of a saved mapper that belong to no map."""
        return _FILE_HEADER

    def _measure(self, target_layer: int, source_layers: tuple[int, ...], previous_tokens: int) -> tuple[int, int]:
        spec = self.spec(target_layer, Inputs(source_layers, previous_tokens))
        with torch.device("meta"):
            layer_map = build_layer_map(spec, target_layer, self.source, self.target, self.token_features)
            layer_map = layer_map.to(self.dtype)
        products = sum(parameter.numel() for parameter in layer_map.parameters() if parameter.dim() > 1)
        if self.storage is not None:
            layer_map = reserve_codes(layer_map, **self.storage)
        return num_bytes(layer_map) + _TENSOR_HEADER * len(layer_map.state_dict()), products
