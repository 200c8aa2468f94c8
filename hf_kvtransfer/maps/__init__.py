"""Kinds of layer map: from features of the source to the keys and values of one target layer."""

from torch import nn

from ..errors import MapperFormatError
from ..geometry import KVGeometry
from .base import LayerMap
from .head_matched import HeadMatchedMap
from .identity import IdentityMap
from .linear import LinearMap
from .low_rank import LowRankMap
from .native import NativeLayer
from .residual_mlp import ResidualMLPMap
from .storage import reserve_codes


# An artifact names a kind; only what is listed here is ever built.
LAYER_MAPS: dict[str, type[LayerMap]] = {
    "head_matched": HeadMatchedMap,
    "identity": IdentityMap,
    "linear": LinearMap,
    "low_rank": LowRankMap,
    "native": NativeLayer,
    "residual_mlp": ResidualMLPMap,
}


def build_layer_map(
    spec: dict,
    layer_idx: int,
    source: KVGeometry,
    target: KVGeometry,
    token_features: int,
    storage: dict | None = None,
) -> nn.Module:
    """
    The untrained map that a layer's entry in a mapper's config describes.

    Args:
        spec (`dict`):
            Such as `{"kind": "linear", "source_layers": [3, 4]}`; each class in `LAYER_MAPS` names its fields.
        layer_idx (`int`):
            The target layer.
        source (`KVGeometry`), target (`KVGeometry`):
            What the two models cache.
        token_features (`int`):
            Width of the target's features of a token, 0 if there are none.
        storage (`dict`, *optional*):
            `bits` and `group_size` of the weight matrices, if they are quantised.

    Raises:
        `MapperFormatError`: the kind is unknown, a source layer does not exist, or a field of the kind is missing,
            unknown or impossible.
    """
    kind, source_layers = spec.get("kind"), spec.get("source_layers")
    if kind not in LAYER_MAPS:
        raise MapperFormatError(
            f"Layer {layer_idx} of the mapper is of kind {kind!r}, this version knows {sorted(LAYER_MAPS)}. "
            "Update hf-kvtransfer or use another revision of the mapper."
        )
    layer_map = LAYER_MAPS[kind]
    known = [i for i, layer in enumerate(source.layers) if layer is not None]
    if "source_layers" in layer_map.spec_fields and not (
        isinstance(source_layers, list | tuple)
        and source_layers
        and all(type(i) is int and i in known for i in source_layers)
    ):
        raise MapperFormatError(
            f"Layer {layer_idx} of the mapper reads source layers {source_layers}, but the source caches layers "
            f"{known}. The mapper's config.json is damaged: download it again."
        )
    try:
        # What is not known cannot be left out: it may change what the map computes.
        if unknown := sorted(spec.keys() - {"kind", *layer_map.spec_fields, *layer_map.optional_fields}):
            raise ValueError(f"unknown fields {unknown}")
        built = layer_map.from_spec(spec, source, target.layers[layer_idx], token_features)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:  # torch: no such size
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise MapperFormatError(
            f"Layer {layer_idx} of the mapper, of kind {kind!r}, cannot be built: {problem}. The mapper's config.json "
            "is damaged or of a later version: download it again, or update hf-kvtransfer."
        ) from error
    return built if storage is None else reserve_codes(built, **storage)
