"""Times of a prefill and of a handoff, and of the machine itself."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvtransfer import FidelityGate, KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import read_into_cache


# Whatever the evidence says, and without a probe: this is about time.
UNGATED: dict[str, Any] = {"gate": FidelityGate(strict=False), "probe_tokens": 0, "on_refusal": "raise"}


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Of one call, until the device has done all of it."""
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def time_prefill(target: PreTrainedModel, input_ids: torch.Tensor) -> float:
    """Until the target has read the context, without logits."""
    return seconds(lambda: read_into_cache(target, DynamicCache(config=target.config), input_ids), target.device)


def read_layers(cache: TranslatedCache) -> None:
    """Let a cache translate all of its layers."""
    for layer in cache.layers:
        _ = layer.keys  # a read translates


def time_handoff(
    source_kv: SourceKV, mapper: KVMapper, target: PreTrainedModel, target_tokenizer=None
) -> tuple[float, float]:
    """Until a cache is bound, for which the target reads its first tokens, and from there until all is translated."""
    caches: list[TranslatedCache] = []

    def bind() -> None:
        caches.append(TranslatedCache(source_kv, mapper, target, target_tokenizer=target_tokenizer, **UNGATED))

    return seconds(bind, target.device), seconds(lambda: read_layers(caches[0]), target.device)


def machine_rates(dtype: torch.dtype, device: torch.device, size: int = 2048, runs: int = 5) -> tuple[float, float]:
    """
    Operations a second of a product of two matrices, and bytes a second of a copy, each the best of some runs.

    Args:
        dtype (`torch.dtype`), device (`torch.device`):
            Of the matrices.
        size (`int`, *optional*, defaults to 2048):
            Their rows and columns. Large enough that the copy is not made in a cache.
        runs (`int`, *optional*, defaults to 5):
            Of each.
    """
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = min(seconds(lambda: a @ b, device) for _ in range(runs))
    large = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    copy = min(seconds(lambda: other.copy_(large), device) for _ in range(runs))
    return 2 * size**3 / product, 2 * large.nbytes / copy
