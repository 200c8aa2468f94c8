"""From the sums of some target layers to their maps, each as it is going to be stored."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..maps import build_layer_map
from ..maps.storage import num_bytes, quantized
from .costs import MapPlan
from .inputs import Inputs
from .memory import explained_memory_error
from .processes import Processes
from .solve import LayerProblem, affine_part, solve_layer
from .stages import LayerSums


@dataclasses.dataclass(frozen=True)
class FittedLayer:
    """
    Args:
        spec (`dict`):
            As in a mapper's config.
        layer_map (`nn.Module`):
            The map.
        report (`dict`):
            Ridge strengths, held-out explained variance of keys and of values, and bytes.
    """

    spec: dict[str, Any]
    layer_map: nn.Module
    report: dict[str, Any]


def fit_layers(
    plan: MapPlan,
    sums: LayerSums,
    metrics: Mapping[int, torch.Tensor],
    strengths: Sequence[float],
    seed: int,
    processes: Processes,
) -> dict[int, FittedLayer]:
    """
    Solve some target layers, each in one of the processes, and give all of them to each process.

    Args:
        plan ([`MapPlan`]):
            The kind of the maps.
        sums ([`LayerSums`]):
            Of these layers, over all processes.
        metrics (`Mapping[int, torch.Tensor]`):
            What an error costs, see [`LayerProblem`].
        strengths (`Sequence[float]`):
            Candidates for ridge strengths.
        seed (`int`):
            Of what is not fitted: an MLP starts somewhere.
        processes ([`Processes`]):
            The processes.
    """
    own = {}
    for number, (i, inputs) in enumerate(sums.selection.items()):
        if processes.is_mine(number):
            with explained_memory_error(f"solving target layer {i}", "Pass `memory`, or lower `num_source_layers`"):
                own[i] = _fit_layer(plan, i, inputs, sums, metrics.get(i), strengths, seed + i)
    return {i: processes.of(number % processes.count, own.get(i)) for number, i in enumerate(sums.selection)}


def _fit_layer(
    plan: MapPlan,
    target_layer: int,
    inputs: Inputs,
    sums: LayerSums,
    metric: torch.Tensor | None,
    strengths: Sequence[float],
    seed: int,
) -> FittedLayer:
    solution = solve_layer(plan.spec(target_layer, inputs), sums.problem(target_layer, metric), strengths)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer_map = build_layer_map(solution.spec, target_layer, plan.source, plan.target, plan.token_features)
    layer_map.to(plan.dtype).requires_grad_(False)
    own = layer_map.state_dict()
    for name, tensor in solution.tensors.items():
        own[name].copy_(tensor)
    if plan.storage is not None:
        layer_map = quantized(layer_map, **plan.storage)
    worth = _worth(layer_map, sums.problem(target_layer, None), plan.token_width(inputs))
    return FittedLayer(solution.spec, layer_map, {"ridge_strengths": solution.strengths} | worth)


def _worth(layer_map: nn.Module, problem: LayerProblem, token_width: int) -> dict[str, Any]:
    """What a map explains of held-out keys and values, and what it takes: of its weights as they are saved."""
    weight, bias = affine_part(layer_map, [sum(layer.widths) for layer in problem.source], token_width)
    return {
        "explained_variance": [
            problem.held_out.explained_variance(weight[:, columns], bias[columns], columns)
            for columns in problem.groups
        ],
        "bytes": num_bytes(layer_map),
    }
