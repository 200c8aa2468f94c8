"""Has something of a model changed since it was last looked at?"""

from collections import defaultdict

import torch
from torch import nn
from transformers import PreTrainedModel

from .one_look import looked_at_once
from .weights import NUM_SAMPLES


_PLAIN = (torch.Tensor, nn.Parameter)


@looked_at_once
def model_state(model: PreTrainedModel) -> tuple | None:
    """
    What is different after a change of a model's tensors, in a fifth of the time that its identity takes.

    Args:
        model (`PreTrainedModel`):
            A model.

    Returns:
        `tuple`, *optional*: To be compared with an earlier one of the same model. `None` for a model of which it
        cannot be said: one with adapters, hooks, offloaded or quantised weights, in training or not on a CPU.
    """
    if hasattr(model, "peft_config") or hasattr(model, "get_base_model"):
        return None
    tensors: list[torch.Tensor] = []
    for module in model.modules():
        if module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
        # Walking through the modules takes longer than all else, so it is done once.
        own = (*module._parameters.values(), *module._buffers.values())
        tensors += [tensor for tensor in own if tensor is not None]
    if any(t.device.type != "cpu" or t.is_inference() or type(t) not in _PLAIN or not t.numel() for t in tensors):
        return None
    # Changes in place leave a trace, but for those through `.data`, which some elements show.
    traces = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
    elements = defaultdict(list)
    for tensor in tensors:
        elements[tensor.dtype].append(tensor.detach().reshape(-1)[:: -(-tensor.numel() // NUM_SAMPLES)])
    shown = [torch.cat(parts).view(torch.uint8).numpy().tobytes() for parts in elements.values()]
    attention = getattr(model.config, "_attn_implementation", None)
    return attention, *traces, *shown
