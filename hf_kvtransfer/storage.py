"""How a translated cache stores its tokens: growing, pre-allocated, quantised or offloaded, as transformers does."""

import copy
from typing import Any

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from .geometry import KVGeometry
from .layers import PendingLayer


def take_storage(cache: Cache, storage: Cache) -> None:
    """
    Let a cache store its tokens as another one does.

    Args:
        cache (`Cache`):
            Empty, made with the target's config.
        storage (`Cache`):
            Empty. Its layers are copied.

    Raises:
        `ValueError`: it is no cache for the same model, or it holds tokens.
    """
    if not isinstance(storage, Cache) or not hasattr(storage, "layers"):
        raise ValueError(
            "`storage` must be an empty cache such as `StaticCache(target.config, max_cache_len=4096)`, got "
            f"{type(storage).__name__}."
        )
    caching, stored = (
        [i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        for layers in (cache.layers, storage.layers)
    )
    if len(storage.layers) != len(cache.layers) or caching != stored:
        raise ValueError(
            f"`storage` has {len(storage.layers)} layers, {len(stored)} of them with keys and values; the target has "
            f"{len(cache.layers)} and {len(caching)}. Make it with the config of the target."
        )
    for i in stored:
        layer = storage.layers[i]
        if not isinstance(layer, DynamicLayer | StaticLayer):
            raise ValueError(f"`storage` has a {type(layer).__name__} as layer {i}, which no translation can fill.")
        if layer.is_initialized:
            raise ValueError("`storage` holds tokens already, or room for them. Pass a new one.")
    cache.layers = copy.deepcopy(storage.layers)
    cache.offloading = storage.offloading
    if storage.offloading:
        cache.only_non_sliding, cache.prefetch_stream = storage.only_non_sliding, storage.prefetch_stream


def check_room(cache: Cache, geometry: KVGeometry, length: int) -> None:
    """
    Check that pre-allocated layers have room for the tokens they stand for and one that is to be read.

    Args:
        cache (`Cache`):
            Empty.
        geometry (`KVGeometry`):
            What the target caches.
        length (`int`):
            Tokens that are translated.

    Raises:
        `ValueError`: a layer is too short.
    """
    for geometry_layer, layer in zip(geometry.layers, cache.layers, strict=True):
        if geometry_layer is None or not isinstance(layer, StaticLayer):
            continue
        needed = min(length + 1, geometry_layer.sliding_window or length + 1)
        if layer.max_cache_len < needed:
            raise ValueError(
                f"`storage` has room for {layer.max_cache_len} tokens, the translation stands for {length} and at "
                "least one more is to be read. Make it with a larger `max_cache_len`."
            )


def check_filled(cache: Cache, operation: str) -> None:
    """
    Refuse what a storage cannot do once it is filled, where transformers would raise nothing or something obscure.

    Args:
        cache (`Cache`):
            The cache, translated or not.
        operation (`str`):
            The name of its method.

    Raises:
        `RuntimeError`: a layer that is filled cannot do it.
    """
    for layer in cache.layers:
        if isinstance(layer, PendingLayer) or not isinstance(layer, CacheLayerMixin) or not layer.is_initialized:
            continue
        if not _can(layer, operation):
            raise RuntimeError(
                f"`{operation}` is not possible once the target has used a cache of {type(layer).__name__}s: "
                "transformers has no such operation for them. Do it before, or copy the cache before it is used "
                "(`copy.deepcopy`)."
            )


def _can(layer: Any, operation: str) -> bool:
    quantized = hasattr(layer, "_quantized_keys")
    if operation == "crop":
        return layer.is_croppable and not quantized
    if operation == "reorder_cache":  # before transformers 5.22 quantised layers had none of their own
        return not quantized or type(layer).reorder_cache is not CacheLayerMixin.reorder_cache
    # Quantised layers inherit what edits the tokens that are not yet quantised only.
    return hasattr(layer, operation) and not quantized
