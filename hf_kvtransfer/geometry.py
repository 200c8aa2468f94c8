"""What a model caches, layer by layer, read from the live model and not from a table of names."""

from dataclasses import astuple, dataclass
from itertools import groupby

import torch
from transformers import PreTrainedModel

from .probe import probe_model


@dataclass(frozen=True)
class LayerGeometry:
    """The shape of what one layer caches for one token.

    Args:
        num_key_value_heads (`int`):
            Number of key and value heads.
        key_head_dim (`int`):
            Width of one key head.
        value_head_dim (`int`):
            Width of one value head.
        sliding_window (`int`, *optional*):
            The number of tokens that the layer attends to, `None` for all of them.
    """

    num_key_value_heads: int
    key_head_dim: int
    value_head_dim: int
    sliding_window: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """The number of scalars that the layer caches for one token, as keys and as values."""
        return self.num_key_value_heads * self.key_head_dim, self.num_key_value_heads * self.value_head_dim

    def split_heads(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            states (`torch.Tensor` of shape `[batch, tokens, features]`):
                For each token the keys then the values of all heads.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys and values, views `[batch, heads, tokens, head_dim]`.
        """
        keys, values = (part.unflatten(-1, (self.num_key_value_heads, -1)) for part in states.split(self.widths, -1))
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True)
class KVGeometry:
    """The shape of what a model caches for one token.

    Args:
        layers (`tuple`):
            One [`LayerGeometry`] for each layer of the cache, `None` where the layer reuses the keys and values of
            another and caches nothing of its own.
    """

    layers: tuple[LayerGeometry | None, ...]

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "KVGeometry":
        """
        Args:
            model ([`~transformers.PreTrainedModel`]):
                A live model. The first time, it runs on 8 tokens.

        Returns:
            [`KVGeometry`]: what it caches.

        Raises:
            [`UnsupportedModelError`]: if a layer keeps a state that is not keys and values token by token.
        """
        probe = probe_model(model)
        layers: list[LayerGeometry | None] = []
        for layer, sliding_window in zip(probe.layers, probe.sliding_windows, strict=True):
            if layer is None:
                layers.append(None)
                continue
            _, num_key_value_heads, _, key_head_dim = layer.key_states.shape
            value_head_dim = layer.value_states.shape[-1]
            layers.append(LayerGeometry(num_key_value_heads, key_head_dim, value_head_dim, sliding_window))
        return cls(tuple(layers))

    def num_features(self, layer_idx: int) -> int:
        """The number of scalars that a layer caches for one token, keys and values together; 0 if it caches none."""
        layer = self.layers[layer_idx]
        return 0 if layer is None else sum(layer.widths)

    def to_dict(self) -> dict:
        """
        Returns:
            `dict`: JSON-friendly; a layer is `[num_key_value_heads, key_head_dim, value_head_dim, sliding_window]`.
        """
        return {"layers": [None if layer is None else list(astuple(layer)) for layer in self.layers]}

    @classmethod
    def from_dict(cls, geometry: dict) -> "KVGeometry":
        """The inverse of [`~KVGeometry.to_dict`].

        Raises:
            `ValueError`: if a layer is not `null` or three positive integers and a window that is one or `null`.
        """
        layers = geometry.get("layers") if isinstance(geometry, dict) else None
        if not isinstance(layers, list | tuple):
            raise ValueError(f"A geometry is a dict with a list of `layers`, not {geometry!r}.")
        for layer_idx, layer in enumerate(layers):
            if layer is not None and not _is_layer(layer):
                raise ValueError(
                    f"Layer {layer_idx} of a geometry must be null or [num_key_value_heads, key_head_dim, "
                    f"value_head_dim, sliding_window], positive integers (the window may be null), not {layer!r}."
                )
        return cls(tuple(None if layer is None else LayerGeometry(*layer) for layer in layers))

    def describe(self) -> str:
        """
        Returns:
            `str`: for people, such as `30 layers of 3 KV heads x 64`.
        """
        # Alternating windows would make as many groups as layers, so equal layers are counted wherever they are.
        ordered = sorted(self.layers, key=self.layers.index)
        return ", ".join(_describe(layer, len(list(group))) for layer, group in groupby(ordered))


def _is_layer(layer: object) -> bool:
    if not isinstance(layer, list | tuple) or len(layer) != 4:
        return False
    sizes = layer[:3] if layer[3] is None else layer
    # `type`, because True is an int too.
    return all(type(size) is int and size > 0 for size in sizes)


def _describe(layer: LayerGeometry | None, count: int) -> str:
    layers = "1 layer" if count == 1 else f"{count} layers"
    if layer is None:
        return f"{layers} without a cache of its own" if count == 1 else f"{layers} without a cache of their own"
    heads = "1 KV head" if layer.num_key_value_heads == 1 else f"{layer.num_key_value_heads} KV heads"
    dims = str(layer.key_head_dim)
    if layer.value_head_dim != layer.key_head_dim:
        dims += f" (keys), {layer.value_head_dim} (values)"
    window = "" if layer.sliding_window is None else f", window {layer.sliding_window}"
    return f"{layers} of {heads} x {dims}{window}"
