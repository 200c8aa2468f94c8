"""Floating point operations and bytes of a prefill and of a translation, from shapes alone."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from hf_kvtransfer import KVGeometry


def attended(length: int, window: int | None, skips_masked: bool = True) -> int:
    """
    Pairs of tokens that attention multiplies.

    Args:
        length (`int`):
            Tokens of the context.
        window (`int`, *optional*):
            Tokens that a token attends to at most.
        skips_masked (`bool`, *optional*, defaults to `True`):
            As fused kernels do. Otherwise what the mask hides is multiplied too.
    """
    if not skips_masked:
        return length * length
    window = min(window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def prefill_flops(model: PreTrainedModel, geometry: KVGeometry, length: int, skips_masked: bool = True) -> int:
    """
    Operations (two for each multiply-add) of matrix products in a dense decoder that reads a context, without logits.

    Args:
        model (`PreTrainedModel`):
            The model; it may be on the `meta` device.
        geometry (`KVGeometry`):
            What it caches.
        length (`int`):
            Tokens of the context.
        skips_masked (`bool`, *optional*, defaults to `True`):
            As in [`attended`].
    """
    weights = sum(part.weight.numel() for part in model.base_model.modules() if isinstance(part, nn.Linear))
    heads = model.config.get_text_config().num_attention_heads
    attention = sum(
        attended(length, layer.sliding_window, skips_masked) * heads * (layer.key_head_dim + layer.value_head_dim)
        for layer in geometry.layers
        if layer is not None
    )
    return 2 * (weights * length + attention)


def weight_bytes(model: PreTrainedModel, element_size: int) -> int:
    """Bytes of the weights that a forward pass reads for a few tokens: all but the table of embeddings."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is table
    return element_size * sum(p.numel() for p in model.parameters() if p is not table or tied)


def kv_bytes(geometry: KVGeometry, length: int, element_size: int) -> int:
    """Bytes of a cache."""
    return element_size * length * sum(map(geometry.num_features, range(len(geometry.layers))))


def map_weights(source: KVGeometry, target: KVGeometry, layers: Sequence[dict | None], token_features: int) -> int:
    """Numbers in the matrices of linear maps: multiply-adds for each token, too."""
    return sum(
        target.num_features(i) * _num_inputs(source, spec, token_features)
        for i, spec in enumerate(layers)
        if spec is not None and spec["kind"] == "linear"
    )


def _num_inputs(source: KVGeometry, spec: dict, token_features: int) -> int:
    num_tokens = 1 + spec.get("previous_tokens", 0)
    return sum(map(source.num_features, spec["source_layers"])) + num_tokens * token_features


def translation_bytes(
    source: KVGeometry,
    target: KVGeometry,
    layers: Sequence[dict | None],
    token_features: int,
    length: int,
    element_size: int,
) -> int:
    """Bytes that linear maps move at the least: weights and features are read, and what comes out is written."""
    mapped = [(i, spec) for i, spec in enumerate(layers) if spec is not None and spec["kind"] == "linear"]
    features = sum(_num_inputs(source, spec, token_features) for _, spec in mapped)
    outputs = sum(target.num_features(i) for i, _ in mapped)
    weights = map_weights(source, target, layers, token_features)
    return element_size * (weights + length * (features + outputs))
