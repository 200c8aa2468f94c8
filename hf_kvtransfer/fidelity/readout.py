"""What the attention of each layer of a model puts out during a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ..compat import unwrap
from ..probe import probe_model


@contextmanager
def attention_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """
    Record the attention outputs of the layers that cache something of their own.

    Args:
        model (`PreTrainedModel`):
            The model. It gets hooks for as long as the context is open.

    Yields:
        `list[torch.Tensor]`: Filled by each forward pass anew: for each of these layers what the module that filled
        the cache returned, `[batch, tokens, hidden_size]`, on that layer's device.
    """
    model = unwrap(model)
    modules = [model.get_submodule(layer.attention) for layer in probe_model(model).layers if layer is not None]
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(modules)

    def record(number):
        def hook(module, args, output):
            outputs[number] = output if isinstance(output, torch.Tensor) else output[0]

        return hook

    hooks = [module.register_forward_hook(record(number)) for number, module in enumerate(modules)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
