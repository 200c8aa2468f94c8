"""How to call a model, whatever the transformers version and whatever wraps it."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


def read_into_cache(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, **arguments: torch.Tensor | None
) -> None:
    """
    Let a model read tokens for the sake of its cache: no gradients, and no logits where the model can do without.

    Args:
        model (`PreTrainedModel`):
            The model that reads.
        cache (`Cache`):
            What it has read before; receives the new keys and values.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on any device.
        arguments (`torch.Tensor`, *optional*):
            Further tensors for `forward`, such as `attention_mask` and `position_ids`; left out if it takes none of
            that name, as models without positions do.
    """
    decoder = unwrap(model).base_model
    parameters = inspect.signature(decoder.forward).parameters
    device = input_device(model)
    call: dict[str, Any] = {
        name: None if value is None else value.to(device) for name, value in arguments.items() if name in parameters
    }
    call[cache_argument(decoder)] = cache
    if "logits_to_keep" in parameters:  # the base model is the whole model
        call["logits_to_keep"] = 1
    with torch.no_grad():
        decoder(input_ids=input_ids.to(device), use_cache=True, **call)


def unwrap(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a PEFT wrapper: it has the adapter's layers in it, and the signature to look at."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_name(model: PreTrainedModel) -> str:
    """What to call a model in messages and configs: where it was loaded from, or its class."""
    return model.config._name_or_path or type(model).__name__


def cache_argument(model: PreTrainedModel) -> str:
    """What `forward` and `generate` call their cache: transformers 5.24 renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(unwrap(model).forward).parameters else "past_key_values"


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
