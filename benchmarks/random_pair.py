"""Pairs with random weights, of any two configs: time and memory do not depend on what the weights are."""

import copy

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_kvtransfer import KVGeometry, KVMapper, KVMapperConfig, SourceKV
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.geometry import LayerGeometry
from hf_kvtransfer.identity import ModelIdentity


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str, num_layers: int | None = None
) -> PreTrainedModel:
    """
    Args:
        config (`PreTrainedConfig`):
            Of a causal language model.
        dtype (`torch.dtype`), device (`torch.device`):
            Of its weights. On `"meta"` there are none.
        num_layers (`int`, *optional*):
            Only so many of its layers.
    """
    config = copy.deepcopy(config)
    if num_layers is not None:
        text_config = config.get_text_config()
        text_config.num_hidden_layers = num_layers
        if getattr(text_config, "layer_types", None):
            text_config.layer_types = text_config.layer_types[:num_layers]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def geometry_on_meta(model: PreTrainedModel) -> KVGeometry:
    """What a model without storage caches."""
    cache = DynamicCache(config=model.config)
    read_into_cache(model, cache, torch.zeros(1, 8, dtype=torch.long))
    return KVGeometry(
        tuple(
            LayerGeometry(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window)
            for layer, window in ((layer, getattr(layer, "sliding_window", None)) for layer in cache.layers)
        )
    )


def map_specs(source: KVGeometry, target: KVGeometry, num_source_layers: int) -> list[dict | None]:
    """A mapper's layers: the first is the target's own, each other reads the source layers at the same depth."""
    known = [i for i, layer in enumerate(source.layers) if layer is not None]
    number = min(num_source_layers, len(known))
    caching = [i for i, layer in enumerate(target.layers) if layer is not None]
    specs: list[dict | None] = [None] * len(target.layers)
    for i in caching:
        first = round(i / max(len(target.layers) - 1, 1) * (len(known) - number))
        specs[i] = {"kind": "linear", "source_layers": known[first : first + number]}
    specs[caching[0]] = {"kind": "native"}
    return specs


def random_mapper(
    source: KVGeometry, target: KVGeometry, hidden_size: int, num_source_layers: int, dtype: torch.dtype, device
) -> KVMapper:
    """Linear maps that read the target's hidden states, too."""
    sides = [{"name": "random", "geometry": geometry.to_dict(), "tokenizer": None} for geometry in (source, target)]
    config = KVMapperConfig(
        source=sides[0],
        target=sides[1],
        layers=map_specs(source, target, num_source_layers),
        token_features=hidden_size,
    )
    with torch.device(device):
        mapper = KVMapper(config).to(dtype)
    for weight in mapper.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return mapper.eval().requires_grad_(False)


def random_source_kv(geometry: KVGeometry, input_ids: torch.Tensor, dtype: torch.dtype, device) -> SourceKV:
    """What a source with the target's tokenizer might have read of `input_ids` `[1, tokens]`."""
    features = [
        None if layer is None else torch.randn(*input_ids.shape, sum(layer.widths), dtype=dtype, device=device)
        for layer in geometry.layers
    ]
    identity = ModelIdentity("random", None, geometry, None, {}, {}, {})
    mask, positions = torch.ones_like(input_ids), torch.arange(input_ids.shape[1])[None]
    return SourceKV(features, geometry, input_ids, mask, positions, identity)
