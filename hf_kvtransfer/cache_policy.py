"""What a model's cache keeps of the tokens that it has read."""

from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer


def cache_policy(cache: Cache | PreTrainedModel) -> dict[str, Any]:
    """
    How a cache stores its tokens, so that evidence measured under one policy is not taken for another.

    Args:
        cache (`Cache` or `PreTrainedModel`):
            A cache, or a model for the cache that `generate` makes for it by default.

    Returns:
        `dict`: `kind`, the class of the cache; `full_layers`, `sliding_layers` and `shared_layers`, how many layers
        keep every token, those in a window (`sliding_window`, the sorted sizes in tokens), and none of their own;
        `quantized`; and `evicting`, whether a layer drops tokens by another rule than a window's.
    """
    if not isinstance(cache, Cache):
        cache = DynamicCache(config=cache.config)
    kinds = [type(layer).__name__ for layer in cache.layers]
    sliding = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    shared = sum(kind == "DummyLayer" for kind in kinds)  # by name: it exists only since transformers 5.23
    return {
        "kind": type(cache).__name__,
        "full_layers": len(kinds) - len(sliding) - shared,
        "sliding_layers": len(sliding),
        "shared_layers": shared,
        # A pre-allocated window is as long as the layer.
        "sliding_window": sorted(
            {layer.max_cache_len if isinstance(layer, StaticLayer) else layer.sliding_window for layer in sliding}
        ),
        # By name: their base class exists only since transformers 5.22.
        "quantized": any("Quantized" in cls.__name__ for layer in cache.layers for cls in type(layer).__mro__),
        # Layers of other packages: transformers' own evict by window only.
        "evicting": any(not type(layer).__module__.startswith("transformers.") for layer in cache.layers),
    }
