"""How to call a model, whatever the transformers version and whatever wraps it."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .few_rows import FEW_ROWS, FewRows


def read_into_cache(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    num_logits: int = 0,
    **arguments: torch.Tensor | dict[str, torch.Tensor] | None,
) -> torch.Tensor | None:
    """
    Let a model read tokens for the sake of its cache: no gradients, and no more logits than asked for.

    Args:
        model (`PreTrainedModel`):
            The model that reads.
        cache (`Cache`):
            What it has read before; receives the new keys and values.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, on any device.
        num_logits (`int`, *optional*, defaults to 0):
            Number of last tokens whose logits are wanted.
        arguments (`torch.Tensor` or `dict`, *optional*):
            Further tensors for `forward`, such as `attention_mask` (or one for each type of layer) and `position_ids`;
            left out if it takes none of that name, as models without positions do.

    Returns:
        `torch.Tensor`, *optional*: `[batch, num_logits, vocab_size]`, in float32. `None` if none are wanted, or the
        model has no language modelling head.
    """
    reader = unwrap(model) if num_logits else unwrap(model).base_model
    parameters = inspect.signature(reader.forward).parameters
    device = input_device(model)
    call: dict[str, Any] = {
        name: {key: part.to(device) for key, part in value.items()}
        if isinstance(value, dict)
        else (None if value is None else value.to(device))
        for name, value in arguments.items()
        if name in parameters
    }
    call[cache_argument(reader)] = cache
    if "logits_to_keep" in parameters:  # also where the base model is the whole model
        call["logits_to_keep"] = max(num_logits, 1)
    with torch.no_grad(), _products_of(model, input_ids):
        output = reader(input_ids=input_ids.to(device), use_cache=True, **call)
    logits = getattr(output, "logits", None)
    return None if logits is None or not num_logits else logits[:, -num_logits:].float()


def _products_of(model: PreTrainedModel, input_ids: torch.Tensor) -> AbstractContextManager:
    """How the products of a reading are computed, see [`FewRows`]. Compiled code is left as it was compiled."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None or torch.compiler.is_compiling()
    return FewRows() if input_ids.numel() in FEW_ROWS and not compiled else nullcontext()


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Losses in nats `[batch, tokens]` of ids `[batch, tokens]` that logits `[batch, tokens, vocab_size]` predict."""
    # Flat: ten times as fast on a CPU as with the vocabulary in the middle.
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten(), reduction="none")
    return flat.view(input_ids.shape)


def filled_cache(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
) -> DynamicCache:
    """What a model caches of a context, `[batch, tokens]`: every token also in sliding windows."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    read_into_cache(model, cache, input_ids, position_ids=position_ids)
    return cache


def unwrap(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a PEFT wrapper: it has the adapter's layers in it, and the signature to look at."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_name(model: PreTrainedModel) -> str:
    """What to call a model in messages and configs: where it was loaded from, or its class."""
    return model.config._name_or_path or type(model).__name__


def public_name(model: PreTrainedModel) -> str:
    """[`model_name`] for artifacts, which tell of a local folder only what it is called, not where it is."""
    name = model_name(model)
    path = Path(name)
    return path.absolute().name if path.is_absolute() or path.is_dir() else name


def cache_argument(model: PreTrainedModel) -> str:
    """
    What `forward` and `generate` call their cache: transformers 5.24 renamed `past_key_values`, and `cache_params` of
    recurrent models, to `cache`.
    """
    parameters = inspect.signature(unwrap(model).forward).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model's token embeddings run, which is where its input ids belong."""
    embeddings = model.get_input_embeddings()
    if hasattr(embeddings, "get_base_layer"):  # adapted by PEFT
        embeddings = embeddings.get_base_layer()
    if embeddings.weight.device.type != "meta":
        return embeddings.weight.device
    # Offloaded: at rest the weights are nowhere, only accelerate's hook knows where the layer runs.
    hook = getattr(embeddings, "_hf_hook", None)
    devices = [getattr(h, "execution_device", None) for h in getattr(hook, "hooks", [hook])]
    device = next((device for device in devices if device is not None), model.device)
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
