"""What a cache keeps, as evidence has it."""

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

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
