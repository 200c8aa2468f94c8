"""How to call a model, whatever the transformers version and whatever wraps it."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


def cached_forward(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    num_logits: int = 1,
    **arguments: torch.Tensor | None,
) -> torch.Tensor:
    """
    Let a model read tokens into a cache, without gradients.

    Args:
        model (`PreTrainedModel`):
            The model that reads.
        cache (`Cache`):
            What it has read before; receives the new keys and values.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on any device.
        num_logits (`int`, *optional*, defaults to 1):
            Last tokens whose logits are computed, 0 for all.
        arguments (`torch.Tensor`, *optional*):
            Further tensors for `forward`, such as `attention_mask` and `position_ids`.

    Returns:
        `torch.Tensor`: Logits, `[batch, num_logits, vocab_size]`.
    """
    # The model inside a PEFT wrapper has the adapter's layers in it, and the signature to look at.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(model.forward).parameters
    device = input_device(model)
    call: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in arguments.items()}
    call[cache_argument(model)] = cache
    if "logits_to_keep" in parameters:
        call["logits_to_keep"] = num_logits
    with torch.no_grad():
        return model(input_ids=input_ids.to(device), use_cache=True, **call).logits


def cache_argument(model: PreTrainedModel) -> str:
    """What `forward` and `generate` call their cache: transformers 5.24 renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model's token embeddings run, which is where its input ids belong."""
    embeddings = model.get_input_embeddings()
    if embeddings.weight.device.type != "meta":
        return embeddings.weight.device
    # Offloaded: at rest the weights are nowhere, only accelerate's hook knows where the layer runs.
    hook = getattr(embeddings, "_hf_hook", None)
    devices = [getattr(h, "execution_device", None) for h in getattr(hook, "hooks", [hook])]
    device = next((device for device in devices if device is not None), model.device)
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
