"""What a cache keeps, as evidence has it."""

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from hf_kvtransfer.cache_policy import cache_policy

from .tiny_models import tiny_model


def test_layers_are_counted_by_what_they_keep():
    assert cache_policy(tiny_model("gemma3")) == {
        "kind": "DynamicCache",
        "full_layers": 1,
        "sliding_layers": 3,
        "shared_layers": 0,
        "sliding_window": [32],
        "quantized": False,
        "evicting": False,
    }
    assert cache_policy(DynamicCache(config=tiny_model("llama").config))["full_layers"] == 4


class KeepsSome(DynamicLayer):
    """A layer of another package."""


def test_layers_of_others_may_evict():
    cache = DynamicCache(config=tiny_model("llama").config)
    cache.layers[2] = KeepsSome()
    assert cache_policy(cache)["evicting"]


class Rounds(QuantizedLayer):
    """A quantised layer under another name."""

    _quantize = _dequantize = None


def test_other_storages():
    gemma = tiny_model("gemma3").config
    assert cache_policy(StaticCache(config=gemma, max_cache_len=64)) == cache_policy(DynamicCache(config=gemma)) | {
        "kind": "StaticCache"
    }
    cache = DynamicCache(config=tiny_model("llama").config)
    cache.layers[2] = Rounds()
    assert cache_policy(cache)["quantized"]
