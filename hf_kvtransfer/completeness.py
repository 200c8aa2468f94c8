"""Does a cache still hold all that its model has read?"""

from transformers.cache_utils import Cache

from .errors import SourceCacheError
from .geometry import KVGeometry


def check_holds_every_token(cache: Cache, geometry: KVGeometry, batch_size: int, num_tokens: int) -> None:
    """
    Raise [`SourceCacheError`] unless every layer of a cache has the key and value of every token.

    Args:
        cache (`Cache`):
            What a model has filled.
        geometry (`KVGeometry`):
            What that model caches.
        batch_size (`int`), num_tokens (`int`):
            Rows and tokens that the cache is said to stand for.
    """
    if len(cache.layers) != len(geometry.layers):
        raise SourceCacheError(
            f"The source cache has {len(cache.layers)} layers, its model {len(geometry.layers)}: "
            f"{geometry.describe()}. Pass the model that filled the cache."
        )
    if cache.get_seq_length() != num_tokens:
        raise SourceCacheError(
            f"The source cache stands for {cache.get_seq_length()} tokens, `input_ids` has {num_tokens}. Pass exactly "
            "the tokens that the cache holds; after `generate` the last sampled token is not in it."
        )
    for layer_idx, layer in enumerate(geometry.layers):
        if layer is None:
            continue
        keys = cache.layers[layer_idx].keys
        held = 0 if keys is None or not keys.numel() else keys.shape[2]
        if held < num_tokens:
            raise SourceCacheError(
                f"Layer {layer_idx} of the source cache holds {held} of {num_tokens} tokens: a sliding window, a "
                "quantised or a compressed cache has dropped the others. Prefill with `SourceKV.prefill`, which keeps "
                "them, or call `cache.activate_past_recording()` before the prefill."
            )
        expected = [batch_size, layer.num_key_value_heads, held, layer.key_head_dim]
        if list(keys.shape) != expected:
            raise SourceCacheError(
                f"Layer {layer_idx} of the source cache has keys of shape {list(keys.shape)}, expected {expected}. "
                "Pass the model that filled the cache, and one row of `input_ids` for each of its rows."
            )


def check_read_natively(cache: Cache, start: int, stop: int) -> None:
    """Raise [`SourceCacheError`] unless the model of a cache has read all tokens of a range itself."""
    translated = getattr(cache, "translated_mask", None)
    if translated is not None and translated[:, start:stop].any():
        columns = translated.any(0).nonzero()
        raise SourceCacheError(
            f"Tokens {start} to {stop} are asked of a TranslatedCache, whose tokens {int(columns[0])} to "
            f"{int(columns[-1]) + 1} are translated. A translation of a translation loses too much: use the cache of "
            "the model that read the tokens, and pass as `tokens` a range that this model has read itself."
        )
