"""Kinds of layer map: from features of the source to the keys and values of one target layer."""

from torch import nn

from ..errors import MapperFormatError
from ..geometry import KVGeometry
from .linear import LinearMap


# An artifact names a kind; only what is listed here is ever built.
LAYER_MAPS: dict[str, type[nn.Module]] = {"linear": LinearMap}


def build_layer_map(
    spec: dict, layer_idx: int, source: KVGeometry, target: KVGeometry, token_features: int
) -> nn.Module:
    """
    The untrained map that a layer's entry in a mapper's config describes.

    Args:
        spec (`dict`):
            `{"kind": "linear", "source_layers": [3, 4]}`.
        layer_idx (`int`):
            The target layer.
        source (`KVGeometry`), target (`KVGeometry`):
            What the two models cache.
        token_features (`int`):
            Width of the target's token embedding, 0 if the map does not read it.

    Raises:
        `MapperFormatError`: the kind is unknown, or a source layer does not exist.
    """
    kind, source_layers = spec.get("kind"), spec.get("source_layers")
    if kind not in LAYER_MAPS:
        raise MapperFormatError(
            f"Layer {layer_idx} of the mapper is of kind {kind!r}, this version knows {sorted(LAYER_MAPS)}. "
            "Update hf-kvtransfer or use another revision of the mapper."
        )
    known = [i for i, layer in enumerate(source.layers) if layer is not None]
    if not source_layers or any(i not in known for i in source_layers):
        raise MapperFormatError(
            f"Layer {layer_idx} of the mapper reads source layers {source_layers}, but the source caches layers "
            f"{known[0]} to {known[-1]}. The mapper's config.json is damaged: download it again."
        )
    in_features = sum(source.num_features(i) for i in source_layers) + token_features
    return LAYER_MAPS[kind](source_layers, in_features, target.num_features(layer_idx))
