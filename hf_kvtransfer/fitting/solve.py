"""The weights of one layer map, in closed form from sums over its features and targets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..geometry import LayerGeometry
from .columns import key_value_columns
from .forward_selection import Correlations, ForwardSelection
from .reduced_rank import reduce_rank
from .ridge import Gaussian, fit_ridge


# Of features that a layer map is asked about at once.
_ROWS = 2048


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """
    What one target layer is fitted from.

    Args:
        train ([`Gaussian`]), held_out ([`Gaussian`]):
            Moments of the features (keys and values of each source layer, then the token features) and of the target
            layer's keys and values.
        source ([`Sequence[LayerGeometry]`]):
            The source layers that are read.
        target ([`LayerGeometry`]):
            The target layer.
        metric (`torch.Tensor`, *optional*):
            `[targets, targets]`, what an error costs, see [`reduce_rank`]. By default keys and values count by the
            share of their variance that is explained.
    """

    train: Gaussian
    held_out: Gaussian
    source: Sequence[LayerGeometry]
    target: LayerGeometry
    metric: torch.Tensor | None = None

    @property
    def groups(self) -> list[slice]:
        """The target's columns that are keys, and those that are values: each gets its own ridge strength."""
        keys, values = self.target.widths
        return [slice(0, keys), slice(keys, keys + values)]

    @property
    def source_starts(self) -> list[int]:
        """The first column of each source layer, and of the token features."""
        starts = [0]
        for layer in self.source:
            starts.append(starts[-1] + sum(layer.widths))
        return starts

    @property
    def token_columns(self) -> torch.Tensor:
        """Columns of the token features."""
        return torch.arange(self.source_starts[-1], len(self.train.mean_x))

    def head_columns(self, number: int) -> list[torch.Tensor]:
        """For each head of a source layer its columns: keys, then values."""
        layer, start = self.source[number], self.source_starts[number]
        return [torch.cat(key_value_columns(layer, head)) + start for head in range(layer.num_key_value_heads)]

    def error_metric(self) -> torch.Tensor:
        if self.metric is not None:
            return self.metric.to("cpu", torch.float64)
        shares = [1 / self.train.var_y[columns].sum().clamp(min=1e-300) for columns in self.groups]
        return torch.cat(
            [share.expand(columns.stop - columns.start) for share, columns in zip(shares, self.groups, strict=True)]
        ).diag()


@dataclasses.dataclass(frozen=True)
class Solution:
    """
    Args:
        spec (`dict`):
            The map's spec, with the choices that the fit has made.
        tensors (`dict[str, torch.Tensor]`):
            Its parameters and buffers that are not left as initialised, float64.
        strengths (`list`):
            The ridge strengths chosen, of keys and of values; for each head if each has its own.
    """

    spec: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    strengths: list


def solve_layer(spec: dict[str, Any], problem: LayerProblem, strengths: Sequence[float]) -> Solution:
    """
    Args:
        spec (`dict`):
            What is to be fitted, see [`MapPlan.spec`].
        problem ([`LayerProblem`]):
            The sums.
        strengths (`Sequence[float]`):
            Candidates for ridge strengths.
    """
    if spec["kind"] == "head_matched":
        return _head_matched(spec, problem, strengths)
    if spec["kind"] == "identity":
        return _identity(spec, problem, strengths)
    train = problem.train
    fit = fit_ridge(train, problem.held_out, problem.groups, strengths)
    if spec["kind"] == "low_rank":
        tensors = _through_waist(fit.weight, train, spec["rank"], problem)
    else:
        tensors = {"weight": fit.weight.T, "bias": fit.bias}
        if spec["kind"] == "residual_mlp":
            scale = train.feature_scale()
            # What hardly varies is not blown up, and its rounding with it.
            tensors |= {"feature_mean": train.mean_x, "feature_scale": scale.clamp(min=1e-3 * scale.median())}
    return Solution(spec, tensors, fit.strengths)


def _through_waist(weight: torch.Tensor, train: Gaussian, rank: int, problem: LayerProblem) -> dict[str, torch.Tensor]:
    down, up = reduce_rank(weight, train.cov_xx, rank, problem.error_metric())
    return {"down": down, "up": up, "bias": train.mean_y - up @ (down @ train.mean_x)}


def _identity(spec: dict[str, Any], problem: LayerProblem, strengths: Sequence[float]) -> Solution:
    if not spec["rank"]:
        return Solution(spec, {}, [])
    # The correction predicts what the source's states lack, and reads nothing but them.
    states, targets = torch.arange(problem.source_starts[1]), torch.arange(len(problem.train.mean_y))
    train, held_out = (
        moments.select(states, targets).less_features() for moments in (problem.train, problem.held_out)
    )
    fit = fit_ridge(train, held_out, problem.groups, strengths)
    return Solution(spec, _through_waist(fit.weight, train, spec["rank"], problem), fit.strengths)


def _head_matched(spec: dict[str, Any], problem: LayerProblem, strengths: Sequence[float]) -> Solution:
    correlations = Correlations.of(problem.train, problem.held_out)
    key_dim = problem.target.key_head_dim
    groups = [slice(0, key_dim), slice(key_dim, key_dim + problem.target.value_head_dim)]
    source_heads: list[list[int]] = [[] for _ in problem.source]
    weights, biases, chosen_strengths = [], [], []
    for head in range(problem.target.num_key_value_heads):
        targets = torch.cat(key_value_columns(problem.target, head))
        heads = _match_heads(correlations, problem, targets, key_dim)
        blocks = [problem.head_columns(number)[j] for number, j in enumerate(heads)]
        columns = torch.cat([*blocks, problem.token_columns])
        train, held_out = (moments.select(columns, targets) for moments in (problem.train, problem.held_out))
        fit = fit_ridge(train, held_out, groups, strengths)
        weights.append(fit.weight.T)
        biases.append(fit.bias)
        chosen_strengths.append(fit.strengths)
        for of_layer, j in zip(source_heads, heads, strict=True):
            of_layer.append(j)
    tensors = {"weight": torch.stack(weights), "bias": torch.stack(biases)}
    return Solution({**spec, "source_heads": source_heads}, tensors, chosen_strengths)


def _match_heads(correlations: Correlations, problem: LayerProblem, targets: torch.Tensor, key_dim: int) -> list[int]:
    """For each source layer the head that one target head should read: the best first, each given the ones before."""
    selection = ForwardSelection(correlations, targets)
    if len(problem.token_columns):
        selection.take(problem.token_columns)
    variance = correlations.variance[targets]
    scale = torch.cat(
        [1 / part.sum().clamp(min=1e-300).expand(len(part)) for part in variance.tensor_split([key_dim])]
    )
    blocks = {
        (number, j): block
        for number in range(len(problem.source))
        for j, block in enumerate(problem.head_columns(number))
    }
    heads: dict[int, int] = {}
    while blocks:
        errors = [(residual * scale).sum() for residual in selection.residuals_with(list(blocks.values()))]
        (number, j), block = list(blocks.items())[int(torch.stack(errors).argmin())]
        selection.take(block)
        heads[number] = j
        blocks = {name: block for name, block in blocks.items() if name[0] != number}
    return [heads[number] for number in range(len(problem.source))]


def affine_part(
    layer_map: nn.Module, source_widths: Sequence[int], token_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What a layer map computes, as one matrix: of its weights as they are stored, rounded or quantised.

    Args:
        layer_map (`nn.Module`):
            A map that is affine in its features.
        source_widths (`Sequence[int]`):
            Width of each source layer that it reads.
        token_width (`int`):
            Width of the token features that stand behind them, of all tokens that are read together, 0 for none.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Weight `[features, targets]` and bias `[targets]`, float64.
    """
    width = sum(source_widths) + token_width

    def answers(first: int, last: int) -> torch.Tensor:
        """To features of which one is 1, a range of them. The one behind the last is none at all."""
        rows = torch.zeros(1, last - first, width, dtype=torch.float64)
        index = torch.arange(first, min(last, width))
        rows[0, index - first, index] = 1
        *sources, tokens = rows.split([*source_widths, token_width], -1)
        return layer_map(sources, tokens if token_width else None)[0]

    with torch.no_grad():
        bias = answers(width, width + 1)[0]
        weight = bias.new_empty(width, len(bias))
        for first in range(0, width, _ROWS):
            last = min(first + _ROWS, width)
            torch.sub(answers(first, last), bias, out=weight[first:last])
    return weight, bias
