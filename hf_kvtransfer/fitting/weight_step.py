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
    layer_map: nn.Module, feature_scale: torch.Tensor, output_scale: torch.Tensor
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

    Returns:
        `list[nn.Parameter]`: The steps.
    """
    steps = []
    for module, name, parameter in list(matrices(layer_map)):
        weight = parameter.detach()
        out_features, in_features = weight.shape[-2:]
        rows, columns = (weight.square().mean(dim, keepdim=True).sqrt() for dim in (-1, -2))
        # What a matrix does not share with the map as a whole, a waist, is told by the size of its weights.
        from_outputs, from_inputs = out_features == output_scale.shape[-1], in_features == feature_scale.shape[-1]
        row = output_scale[..., None] if from_outputs else rows / rows.mean().clamp(min=1e-12)
        # An MLP reads features that are standardised already.
        inputs = (
            torch.ones_like(feature_scale) if isinstance(module, ResidualMLPMap) and name == "down" else feature_scale
        )
        column = 1 / inputs[..., None, :] if from_inputs else _or_ones(columns / columns.mean())
        size = (row * column / in_features).expand_as(weight).contiguous()
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


def _or_ones(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
