"""Weights as what they were plus a change in units that suit the features."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..maps.residual_mlp import ResidualMLPMap
from ..maps.storage import matrices


class WeightStep(nn.Module):
    """
    `weight + size * step`, with `step` to be trained.

    Features of a cache differ in scale by orders of magnitude, and agree with each other: a change that is small for
    each weight is a large one for all of them together. `size` is the output's scale over the feature's, over the
    number of features, so that a step of 1 everywhere moves an output by no more than about its own scale.

    Args:
        weight (`torch.Tensor`):
            `[..., out_features, in_features]`, as fitted.
        size (`torch.Tensor`):
            Of the same shape, or broadcast to it.
    """

    weight: torch.Tensor
    size: torch.Tensor

    def __init__(self, weight: torch.Tensor, size: torch.Tensor):
        super().__init__()
        self.register_buffer("weight", weight.clone())
        self.register_buffer("size", size)

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.weight, self.size, step)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)


def train_in_steps(
    layer_map: nn.Module,
    feature_scale: torch.Tensor,
    output_scale: torch.Tensor,
    waist_scale: torch.Tensor | None = None,
) -> list[nn.Parameter]:
    """
    Let the weight matrices of a layer map, in place, be trained by [`WeightStep`]; its vectors stay as they are.

    Args:
        layer_map (`nn.Module`):
            With plain weights.
        feature_scale (`torch.Tensor`):
            Standard deviation of the features that it reads, `[in_features]` or `[heads, in_features]`.
        output_scale (`torch.Tensor`):
            Standard deviation of what it puts out, `[out_features]` or `[heads, out_features]`.
        waist_scale (`torch.Tensor`, *optional*):
            Standard deviation of what its `down` puts out and its `up` reads, `[waist]`.

    Returns:
        `list[nn.Parameter]`: The steps.
    """
    steps = []
    for module, name, parameter in list(matrices(layer_map)):
        weight = parameter.detach()
        inputs, outputs = feature_scale, output_scale
        if name == "up":
            inputs = waist_scale
        elif name == "down":
            outputs = waist_scale
            if isinstance(module, ResidualMLPMap):  # which reads features that are standardised already
                inputs = torch.ones_like(feature_scale)
        assert inputs is not None and outputs is not None
        size = (outputs[..., None] / inputs[..., None, :] / weight.shape[-1]).expand_as(weight).contiguous()
        parametrize.register_parametrization(module, name, WeightStep(weight, size))
        parametrizations: Any = module.parametrizations
        steps.append(parametrizations[name].original.requires_grad_(True))
    return steps


def take_steps(layer_map: nn.Module) -> None:
    """The inverse of [`train_in_steps`]: the weights are plain again, with the steps taken."""
    for module in list(layer_map.modules()):
        if parametrize.is_parametrized(module):
            names: Any = module.parametrizations
            for name in list(names):
                parametrize.remove_parametrizations(module, name)
