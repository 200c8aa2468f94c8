"""One affine map from the selected source layers, and the target's view of the token, to one target layer."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap
from .storage import dense


class LinearMap(LayerMap):
    """
    All heads of one target layer from all heads of a few source layers in one matrix product.

    The features are position-free keys and values, so the map holds at any position. It is the closed-form ridge
    map of cross-model cache transfer, with two differences: all source heads feed every target head, so head counts
    may differ, and the target's own view of the token is a feature too.

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        in_features (`int`):
            Width of the features: keys and values of every selected layer, then the token features if there are any.
        out_features (`int`):
            Width of the target layer's keys and values, all heads.
    """

    def __init__(self, source_layers: Sequence[int], in_features: int, out_features: int):
        super().__init__()
        self.source_layers = tuple(source_layers)
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "LinearMap":
        """The untrained map of `{"kind": "linear", "source_layers": [3, 4]}`, see [`LayerMap.from_spec`]."""
        return cls(spec["source_layers"], num_inputs(spec, source, token_features), sum(target.widths))

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        dtype = source_features[0].dtype
        weight, bias = dense(self.weight, dtype), self.bias.to(dtype)
        return affine(weight, bias, source_features, token_features, source_index)

    @torch.no_grad()
    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """As [`LayerMap.compose`]."""
        self.weight.copy_(matrix @ self.weight)
        self.bias.copy_(matrix @ self.bias + offset)


def num_inputs(spec: dict, source: KVGeometry, token_features: int) -> int:
    """Width of the features of a map that reads all heads of its source layers, and the token."""
    return sum(source.num_features(i) for i in spec["source_layers"]) + token_features


def affine(
    weight: torch.Tensor,
    bias: torch.Tensor,
    source_features: Iterable[torch.Tensor],
    token_features: torch.Tensor | None,
    source_index: torch.Tensor | None,
) -> torch.Tensor:
    """
    `weight @ features + bias` at every token, for one map or for one map for each head.

    A sum of products, block by block, needs no copy of the concatenated features; and gathering the sum moves
    `out_features` numbers a token where gathering the features first would move all of them.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]` or `[heads, out_features, in_features]`.
        bias (`torch.Tensor`):
            `[out_features]` or `[heads, out_features]`.
        source_features (`Iterable[torch.Tensor]`):
            Blocks of features, in the order of the weight's columns, `[batch, source_tokens, features]` or
            `[heads, batch, source_tokens, features]`.
        token_features (`torch.Tensor`, *optional*):
            `[batch, target_tokens, hidden_size]`, for the weight's last columns.
        source_index (`torch.Tensor`, *optional*):
            `[batch, target_tokens]`, the source token that speaks for each target token.

    Returns:
        `torch.Tensor`: `[batch, target_tokens, out_features]` or `[heads, batch, target_tokens, out_features]`.
    """
    add_product, add_product_ = (
        (torch.addmm, torch.Tensor.addmm_) if weight.dim() == 2 else (torch.baddbmm, torch.Tensor.baddbmm_)
    )
    output, column = None, 0
    for states in source_features:
        *heads, batch, tokens, width = states.shape
        rows, block = states.reshape(*heads, batch * tokens, width), weight[..., column : column + width].mT
        output = add_product(bias.unsqueeze(-2), rows, block) if output is None else add_product_(output, rows, block)
        column += width
    output = output.unflatten(-2, (batch, tokens))
    if source_index is not None:
        output = at_tokens(output, source_index)
    if token_features is not None:
        rows = token_features.to(output.dtype).reshape(-1, token_features.shape[-1])
        flat = output.view(*heads, len(rows), output.shape[-1])
        add_product_(flat, rows.expand(*heads, *rows.shape), weight[..., column:].mT)
    return output


def at_tokens(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """States `[..., batch, tokens, features]` of the tokens in each row of `index` `[batch, target_tokens]`."""
    return states[..., torch.arange(len(index), device=states.device)[:, None], index, :]
