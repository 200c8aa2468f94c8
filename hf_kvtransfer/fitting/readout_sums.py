"""What one layer's attention reads out of mapped values: sums over text, and the value maps solved from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..geometry import LayerGeometry
from ..maps.head_matched import HeadMatchedMap
from ..maps.linear import LinearMap
from .columns import key_value_columns
from .moments import Moments


FEATURES, RESIDUAL, NATIVE = "features", "residual", "native"


@dataclass(frozen=True, eq=False)
class ValueHead:
    """
    What makes the values of one KV head in a layer map.

    Args:
        columns (`torch.LongTensor` or `slice`):
            Which of the map's features are read: keys and values of each source layer, then the token features.
        weight (`torch.Tensor`), bias (`torch.Tensor`):
            `[value_head_dim, features]` and `[value_head_dim]`, views of the map's.
    """

    columns: torch.Tensor | slice
    weight: torch.Tensor
    bias: torch.Tensor


def value_heads(layer_map: nn.Module, layer: LayerGeometry) -> list[ValueHead]:
    """
    The affine part of a layer map that makes values, head by head.

    Args:
        layer_map (`nn.Module`):
            The map of a target layer.
        layer (`LayerGeometry`):
            What that layer caches.

    Returns:
        `list[ValueHead]`: One for each KV head; none for kinds whose values cannot be solved head by head.
    """
    heads = range(layer.num_key_value_heads)
    if isinstance(layer_map, HeadMatchedMap):
        values = slice(layer.key_head_dim, None)
        return [
            ValueHead(
                _matched_columns(layer_map, j),
                layer_map.weight.detach()[j, values],
                layer_map.bias.detach()[j, values],
            )
            for j in heads
        ]
    if isinstance(layer_map, LinearMap):
        keys = layer.widths[0]
        weight, bias = (
            part.detach()[keys:].unflatten(0, (len(heads), -1)) for part in (layer_map.weight, layer_map.bias)
        )
        return [ValueHead(slice(None), weight[j], bias[j]) for j in heads]
    return []


def _matched_columns(layer_map: HeadMatchedMap, head: int) -> torch.Tensor:
    """Where, among all features of its source layers and the token's, those of one target head are."""
    parts, start = [], 0
    for layer, matched in zip(layer_map.source_geometries, layer_map.source_heads, strict=True):
        parts.append(torch.cat(key_value_columns(layer, matched[head])) + start)
        start += sum(layer.widths)
    parts.append(torch.arange(layer_map.weight.shape[-1] - sum(map(len, parts))) + start)
    return torch.cat(parts)


@dataclass(frozen=True)
class Correction:
    """
    How a value head is to be changed.

    Args:
        weight (`torch.Tensor`), bias (`torch.Tensor`):
            What replaces those of the [`ValueHead`].
        strength (`float`, *optional*):
            The ridge strength chosen, `None` if no change was best.
        held_out (`tuple[float, float, float]`):
            Mean squares on held-out rows: of the readout's error before and after, and of the native readout.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    strength: float | None
    held_out: tuple[float, float, float]


class HeadSums:
    """
    Sums over what all query heads of one KV head read out.

    Values are corrected by `features @ weight + bias`. With attention weights `A` over tokens, the readout changes by
    `(A features) @ weight + (A 1) bias`: least squares on smoothed rows, in which `A 1`, the share of attention that
    goes to mapped tokens, takes the place of a constant. Memory depends on the number of features only.

    Args:
        mean (`torch.Tensor`), scale (`torch.Tensor`):
            `[features]`, of the features of single tokens. Centred, they leave a smoothed row no large part that is
            the same everywhere; in units of their scale, the penalty counts by how much single values change.
    """

    def __init__(self, mean: torch.Tensor, scale: torch.Tensor):
        self.mean, self.scale = mean, scale
        pairs = [(FEATURES, FEATURES), (FEATURES, RESIDUAL), (RESIDUAL, RESIDUAL), (NATIVE, NATIVE)]
        self.train, self.held_out = Moments(pairs), Moments(pairs)

    def add(
        self,
        weights: Sequence[torch.Tensor],
        features: Sequence[torch.Tensor],
        residual: torch.Tensor,
        native: torch.Tensor,
        held_out: bool,
    ) -> None:
        """
        Args:
            weights (`Sequence[torch.Tensor]`):
                For each row of the batch `[query heads, queries, tokens]`, to its mapped tokens.
            features (`Sequence[torch.Tensor]`):
                For each row `[tokens, features]`, of these tokens.
            residual (`torch.Tensor`), native (`torch.Tensor`):
                `[rows, query heads, queries, value_head_dim]`, the native readout less what is read out of mapped
                values, and itself.
            held_out (`bool`):
                Whether the rows are held out.
        """
        mean, scale = self.mean.to(residual.device), self.scale.to(residual.device)
        smoothed = []
        for attention, of_tokens in zip(weights, features, strict=True):
            rows = attention.flatten(0, 1)
            centred = (of_tokens - mean) / scale
            smoothed.append(torch.cat([rows @ centred, rows.sum(-1, keepdim=True)], -1))
        (self.held_out if held_out else self.train).add(
            {FEATURES: torch.cat(smoothed), RESIDUAL: residual.flatten(0, 2), NATIVE: native.flatten(0, 2)}
        )

    def solve(self, head: ValueHead, strengths: Sequence[float]) -> Correction:
        """
        Ridge towards the head as it is, with the strength that leaves the smallest held-out error; no change at all is
        always among the candidates.

        Args:
            head (`ValueHead`):
                As it was when the sums were taken.
            strengths (`Sequence[float]`):
                Relative to the mean square of the smoothed features, from the strongest down.
        """
        square, product = (_second_moment(self.train, FEATURES, other) for other in (FEATURES, RESIDUAL))
        held_square, held_product = (_second_moment(self.held_out, FEATURES, other) for other in (FEATURES, RESIDUAL))
        before, native = (_mean_square(self.held_out, block) for block in (RESIDUAL, NATIVE))
        # A relative 1e-9 is rounding: where there is nothing to gain, nothing is changed.
        best: tuple[float, float | None, torch.Tensor, torch.Tensor]
        best = before * (1 - 1e-9), None, head.weight, head.bias
        for strength in strengths:
            penalised = square.clone()
            penalised.diagonal().add_(strength * square.diagonal().mean())
            factor, failed = torch.linalg.cholesky_ex(penalised)
            if failed:
                continue
            change = torch.cholesky_solve(product, factor)
            # As it will be stored: rounding is part of the error that is measured.
            weight, bias, change = self._apply(head, change)
            error = (before - 2 * (change * held_product).sum() + (change * (held_square @ change)).sum()).item()
            if error < best[0]:
                best = error, strength, weight, bias
        after, chosen, weight, bias = best
        return Correction(weight, bias, chosen, (before, before if chosen is None else max(after, 0.0), native))

    def _apply(self, head: ValueHead, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight and bias of a head with a change `[features + 1, value_head_dim]`, and the change that this makes."""
        mean, scale = (part.double().cpu() for part in (self.mean, self.scale))
        old_weight, old_bias = head.weight.double().cpu(), head.bias.double().cpu()
        weight = (old_weight + (change[:-1] / scale[:, None]).T).to(head.weight.dtype)
        made = (weight.double() - old_weight).T
        bias = (old_bias + change[-1] - mean @ made).to(head.bias.dtype)
        made_bias = bias.double() - old_bias + mean @ made
        return weight, bias, torch.cat([made * scale[:, None], made_bias[None]])


def _second_moment(moments: Moments, a: str, b: str) -> torch.Tensor:
    """Mean of the products of two blocks, not centred: smoothed rows have no constant to take a mean up."""
    return moments.covariance([a], [b]) + torch.outer(moments.mean([a]), moments.mean([b]))


def _mean_square(moments: Moments, block: str) -> float:
    return (moments.variance([block]) + moments.mean([block]).square()).sum().item()
